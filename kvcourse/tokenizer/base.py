"""One tokenizer for all checkpoints: what it can do, whatever it was made from.

A checkpoint describes its tokenizer in a GGUF file's metadata (`gguf_vocab`) or in a folder of JSON files
(`json_folder`). Both are read into the fields below; everything a user calls is written here once.
"""

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import index

import tokenizers

from kvcourse.tokenizer.chat import check_messages, render
from kvcourse.tokenizer.gguf_vocab import read_gguf_vocabulary
from kvcourse.tokenizer.json_folder import read_folder_vocabulary
from kvcourse.tokenizer.text import any_of, check_text, unused_character


@dataclass(repr=False, eq=False)
class Tokenizer:
    """The tokenizer of one model. Make it with `Tokenizer.from_gguf` or `Tokenizer.from_folder`.

    - `tokens`: the vocabulary as the file spells it; `token_bytes`: the bytes that each token stands for;
    - `control`: id of each control token ("<|im_end|>"), which no ordinary text may write;
    - `merge(text, first)`: ids of ordinary text; `first` says that nothing stands before it;
    - `library()`: a new tokenizer of the `tokenizers` library that does the same, for other programs;
    - `before`, `after`: ids that `encode` puts around every text, such as the beginning of text (BOS);
    - `bos_id`, `eos_id` (None when there is none); `stop_ids`: the set of ids that end an answer;
    - `chat_template`: the model's own Jinja template, or None; `named`: the tokens it may name, `{"bos_token": "<s>"}`;
    - `added_space`: SentencePiece puts a space before a text, so `decode` takes one away;
    - `strips_left`, `strips_right`: control tokens that swallow the white space beside them.
    """

    tokens: list[str]
    token_bytes: list[bytes]
    control: dict[str, int]
    merge: Callable[[str, bool], list[int]]
    library: Callable[[], tokenizers.Tokenizer]
    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    bos_id: int | None = None
    eos_id: int | None = None
    stop_ids: set[int] = field(default_factory=set)
    chat_template: str | None = None
    named: dict[str, str] = field(default_factory=dict)
    added_space: bool = False
    strips_left: frozenset[str] = frozenset()
    strips_right: frozenset[str] = frozenset()

    @classmethod
    def from_gguf(cls, metadata: dict) -> "Tokenizer | None":
        """The tokenizer in a GGUF file's metadata (as `read_gguf` returns it); None when the file has none.

        Raises `ValueError` for a kind of tokenizer that is not supported.
        """
        fields = read_gguf_vocabulary(metadata)
        return None if fields is None else cls(**fields)

    @classmethod
    def from_folder(cls, path: str | os.PathLike) -> "Tokenizer | None":
        """The tokenizer in a Hugging Face folder (`tokenizer.json` and the files beside it); None when it has none.

        Raises `ValueError` for a damaged file or a kind of tokenizer that is not supported.
        """
        fields = read_folder_vocabulary(path)
        return None if fields is None else cls(**fields)

    def __post_init__(self):
        self.control_ids = set(self.control.values())
        self.any_control: re.Pattern = any_of(self.control)

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    def extend(self, vocab_size: int) -> None:
        """Take the ids up to `vocab_size` for tokens without text: many models have more embeddings than their
        tokenizer has tokens, to make the matrix a round size, and may choose any of them."""
        missing = vocab_size - self.vocab_size
        self.tokens += [""] * missing
        self.token_bytes += [b""] * missing

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of `text`. Text that looks like a control token ("<|im_end|>") stays ordinary text, since it may
        come from anyone; `special=True` reads it as the control token.

        Raises `ValueError` for text that the vocabulary cannot write.
        """
        check_text(text)
        return self.before + (self.split(text) if special else self.ordinary(text, True)) + self.after

    def split(self, text: str, hidden: str = "") -> list[int]:
        """Ids of `text` with its control tokens read as such. The character `hidden` is taken out of the text between
        them, after they were found."""
        parts = self.any_control.split(text)  # the pattern has one group: between, token, between, ..., between
        for i in range(1, len(parts), 2):
            parts[i - 1] = parts[i - 1].rstrip() if parts[i] in self.strips_left else parts[i - 1]
            parts[i + 1] = parts[i + 1].lstrip() if parts[i] in self.strips_right else parts[i + 1]
        ids = []
        for i, part in enumerate(parts):
            ids += (
                [self.control[part]] if i % 2 else self.ordinary(part.replace(hidden, "") if hidden else part, i == 0)
            )
        return ids

    def ordinary(self, text: str, first: bool) -> list[int]:
        """Ids of text that has no control tokens in it, whatever it looks like."""
        return self.merge(text, first) if text else []

    def bytes_of(self, id: int, special: bool = False) -> bytes:
        """The UTF-8 bytes of one token (perhaps not a whole character); none for a control token unless `special`."""
        id = index(id)  # not int(): a float is an error, not cut off
        if not 0 <= id < self.vocab_size:
            raise ValueError(f"Token id {id} is outside the vocabulary: ids go from 0 to {self.vocab_size - 1}.")
        return b"" if not special and id in self.control_ids else self.token_bytes[id]

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Text of token ids. Control tokens are left out unless `special`; bytes that are not valid UTF-8 (an answer
        cut inside a character) become U+FFFD; the one space that SentencePiece puts before a text is taken away."""
        data = b"".join(self.bytes_of(id, special) for id in ids)
        return (data.removeprefix(b" ") if self.added_space else data).decode("utf-8", errors="replace")

    def chat(self, messages: list[dict], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation, `[{"role": "user", "content": "..."}, ...]`, laid out by the model's own template.

        The template writes everything, the beginning-of-text token too where the model wants one: nothing is added.
        Control tokens that the template writes are read as such; the same characters inside a message are not. To tell
        them apart, each look-alike in a message is split by a private-use character that occurs in no message before
        the template runs; the character is taken out after the real control tokens were found.
        """
        if self.chat_template is None:
            raise ValueError("This model has no chat template: give it plain text instead of messages.")
        check_messages(messages)
        said = "".join(text for message in messages for text in message.values())
        check_text(said)
        mark = unused_character(said)

        def guard(text: str) -> str:
            return self.any_control.sub(lambda match: match[0][0] + mark + match[0][1:], text)

        guarded = [{key: guard(text) for key, text in message.items()} for message in messages]
        text = render(self.chat_template, self.named, messages=guarded, add_generation_prompt=add_generation_prompt)
        return self.split(text, hidden=mark)
