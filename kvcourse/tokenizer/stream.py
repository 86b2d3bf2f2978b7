"""Text of tokens that come one at a time."""

import codecs
from collections.abc import Iterable

from kvcourse.tokenizer.base import Tokenizer


class StreamDecoder:
    """Text of tokens that come one at a time: `push(id)` gives what can be shown now, `flush()` the rest.

    The pieces joined are `decode(all ids)`; the space that SentencePiece puts before a text is left out here too. Bytes
    of an unfinished character are held back, and so is text that may be the beginning of a stop string. Once a stop
    string is complete, `stopped` is True and no more text is given; if several could match, the one completed first
    counts. Each token is looked at once, so n tokens cost n steps.
    """

    def __init__(self, tokenizer: Tokenizer, stop: str | Iterable[str] = (), special: bool = False):
        self.tokenizer, self.special = tokenizer, special
        self.stop = [stop] if isinstance(stop, str) else list(stop)
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop={stop!r}: a stop string must be a string with at least one character.")
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.held, self.stopped = "", False
        self.skips_space = tokenizer.added_space

    def push(self, id: int) -> str:
        """Take one token, return the text that is now certain (may be empty)."""
        data = self.tokenizer.bytes_of(id, self.special)
        if self.skips_space and data:
            data, self.skips_space = data.removeprefix(b" "), False
        return self.release(self.utf8.decode(data))

    def flush(self) -> str:
        """No token follows: return what was held back."""
        text = self.release(self.utf8.decode(b"", final=True)) + self.held
        self.held = ""
        return text

    def release(self, new: str) -> str:
        if self.stopped:
            return ""
        text, self.held = self.held + new, ""
        found = [(start + len(stop), start) for stop in self.stop if (start := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)[1]]
        keep = max((overlap(text, stop) for stop in self.stop), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
