"""Text to token ids and back, for any checkpoint."""

from kvcourse.tokenizer.base import Tokenizer
from kvcourse.tokenizer.stream import StreamDecoder

__all__ = ["StreamDecoder", "Tokenizer"]
