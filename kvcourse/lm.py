"""A model together with its tokenizer: text in, text out."""

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from kvcourse.config import ModelConfig
from kvcourse.device import resolve
from kvcourse.generation import decode, warm_up
from kvcourse.metrics import Generation
from kvcourse.model import Transformer
from kvcourse.texts import Texts
from kvcourse.tokenizer import StreamDecoder, Tokenizer
from kvcourse.weights.fetch import SOURCES, model_file
from kvcourse.weights.gguf_file import read_gguf


@dataclass(frozen=True)
class LM:
    """A language model that can be talked to: `model` computes, `tokenizer` translates between text and ids."""

    model: Transformer
    tokenizer: Tokenizer
    name: str

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text (no chat template, no control tokens)."""
        return self.tokenizer.encode(text)

    def decode(self, ids) -> str:
        """Text of token ids, without control tokens such as the end-of-answer mark."""
        return self.tokenizer.decode(ids)

    def chat(self, messages: list[dict]) -> list[int]:
        """Token ids of a conversation up to where the model's answer begins, by the model's chat template."""
        return self.tokenizer.chat(messages)

    def prompt_ids(self, prompt: str | list[dict]) -> list[int]:
        """Ids that `stream` starts from: text given to a chat model is one user's message."""
        if isinstance(prompt, str) and self.tokenizer.chat_template is None:
            return self.encode(prompt)
        return self.chat([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)

    def stream(self, prompt: str | list[dict], max_new_tokens: int = 256, *, stop=None, **options) -> "TextStream":
        """Answer a text or a conversation, piece by piece:

            answer = lm.stream("Why is the sky blue?")
            for piece in answer:
                print(piece, end="", flush=True)
            answer.generation.ttft

        The answer ends at one of the model's own stop tokens (`stop_ids=` overrides them), before one of the strings
        in `stop` (None: there are none), or after `max_new_tokens`. Other options are those of `generate`:
        temperature, top_k, top_p, seed, cache. Requests that cannot work raise `ValueError` here, not at the first
        piece.
        """
        ids = self.prompt_ids(prompt)
        if len(ids) > self.config.max_seq_len:
            raise ValueError(
                f"The prompt has {len(ids)} tokens, but {self.name} has a context of {self.config.max_seq_len} tokens: "
                "shorten the prompt."
            )
        options = {"stop_ids": self.tokenizer.stop_ids} | options
        decoder = StreamDecoder(self.tokenizer, () if stop is None else stop)
        return TextStream(Texts(self.model, ids, max_new_tokens, **options), decoder)


class TextStream:
    """An answer being written: iterate for its pieces of text. A token is computed when a piece is asked for.

    After the loop `generation` has the tokens and times; a slow reader's time counts in the gaps.
    """

    def __init__(self, texts: Texts, decoder: StreamDecoder):
        self.texts, self.decoder = texts, decoder
        self.pieces = self.run()

    @property
    def generation(self) -> Generation:
        return self.texts.rows[0].generation

    def __iter__(self):
        return self

    def __next__(self) -> str:
        return next(self.pieces)

    def run(self):
        for _ in decode(self.texts.model, self.texts):
            piece = self.decoder.push(self.generation.ids[-1])
            if piece:
                yield piece
            if self.decoder.stopped:
                self.generation.stop_reason = "stop"
                return
        rest = self.decoder.flush()
        if self.decoder.stopped:
            self.generation.stop_reason = "stop"
        if rest:
            yield rest


def load_model(name: str | os.PathLike, dtype: torch.dtype | str | None = None, device=None) -> LM:
    """Load a course model (`"smollm2-135m"`, fetched if need be) or a `.gguf` file; run it once, so that the first
    timing is not a first run. dtype and device default to those the course uses on this machine.

    Raises `ValueError` for an unknown name or a damaged or unsupported file, `FileNotFoundError` for a missing one.
    """
    device, dtype = resolve(device, dtype)
    path = find_model(name)
    config, state, metadata = read_gguf(path, dtype, device)
    tokenizer = Tokenizer(metadata)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(f"{path} has {tokenizer.vocab_size} tokens but embeddings for only {config.vocab_size}.")
    model = Transformer(config, device="meta", dtype=dtype)  # shapes without memory: the weights are put in place
    model.load_state_dict(state, assign=True)
    warm_up(model)
    return LM(model, tokenizer, path.stem if str(name) not in SOURCES else str(name))


def find_model(name: str | os.PathLike) -> Path:
    """The file of a model given by name or path."""
    text = os.fspath(name)
    if text in SOURCES:
        return model_file(text)
    path = Path(text).expanduser()
    if path.is_file():
        return path
    if path.suffix == ".gguf" or len(path.parts) > 1 or not isinstance(name, str):
        raise FileNotFoundError(f"There is no model file {path}: give the path of a .gguf file.")
    near = difflib.get_close_matches(text.lower(), SOURCES, n=3, cutoff=0.4)
    meant = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise ValueError(
        f"There is no model {text!r}.{meant} Give one of {', '.join(SOURCES)}, or the path of a .gguf file."
    )
