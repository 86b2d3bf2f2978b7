"""Text to token ids and back, as a GGUF file's own metadata describes it.

Byte-level BPE: text is cut into word-like pieces, each piece becomes UTF-8 bytes, and pairs of tokens are merged in the
order in which they were learned. The merging is done by the `tokenizers` library; this file adds what a chat with a
model needs: control tokens, the chat template, and decoding one token at a time.
"""

import codecs
import re
from collections.abc import Iterable
from operator import index

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import models, pre_tokenizers

# How text is cut before merging, by the name GGUF files give it (`tokenizer.ggml.pre`). "smollm" cuts out every digit
# first, so 123 is always three tokens.
PRE_TOKENIZERS = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
}
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # kinds of token in `tokenizer.ggml.token_type`
STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # end of text, of turn, of message


class Tokenizer:
    """The tokenizer of one model, from the metadata that `read_gguf` returns.

    - `vocab_size`, `bos_id`, `eos_id` (None when the file names none);
    - `stop_ids`: the set of ids that end an answer;
    - `chat_template`: the model's own Jinja template, or None.

    Raises `ValueError` for a kind of tokenizer this class cannot build.
    """

    def __init__(self, metadata: dict):
        def field(name, default=None):
            return metadata.get(f"tokenizer.ggml.{name}", default)

        check_kind(field("model"), field("pre"))
        self.tokens: list[str] = required(field("tokens"), "tokens")
        self.ids = {token: id for id, token in enumerate(self.tokens)}
        kinds = field("token_type") or [NORMAL] * len(self.tokens)
        self.control = {t: i for i, (t, kind) in enumerate(zip(self.tokens, kinds, strict=True)) if kind == CONTROL}
        user_defined = {
            t: i for i, (t, kind) in enumerate(zip(self.tokens, kinds, strict=True)) if kind == USER_DEFINED
        }
        self.always = any_of(user_defined)  # tokens that are whole words of the vocabulary wherever they stand
        self.always_or_control = any_of(user_defined | self.control)
        self.only_control = any_of(self.control)
        self.token_bytes = [to_bytes(t, kind) for t, kind in zip(self.tokens, kinds, strict=True)]
        self.missing_bytes = set(range(256)) - {byte for token in self.token_bytes if len(token) == 1 for byte in token}
        merges = [tuple(merge.split(" ")) for merge in required(field("merges"), "merges")]
        self.bpe = models.BPE(vocab=self.ids, merges=merges)
        self.cut = pre_tokenizers.Sequence(PRE_TOKENIZERS[field("pre")])

        self.bos_id, self.eos_id = field("bos_token_id"), field("eos_token_id")
        self.add_bos = bool(field("add_bos_token", False))
        self.stop_ids = {field(key) for key in STOP_KEYS} - {None}
        self.chat_template: str | None = metadata.get("tokenizer.chat_template")

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of `text`. Text that looks like a control token ("<|im_end|>") stays ordinary text, since it may
        come from anyone; `special=True` reads it as the control token.

        Raises `ValueError` for text that the vocabulary has no bytes for.
        """
        if not isinstance(text, str):
            raise TypeError(f"encode takes a string, got {type(text).__name__}.")
        start = [self.bos_id] if self.add_bos and self.bos_id is not None else []
        return start + self.split(text, self.always_or_control if special else self.always)

    def split(self, text: str, whole: re.Pattern) -> list[int]:
        """Ids of `text`, where whatever `whole` matches is one token, and the text between is merged from bytes."""
        parts = whole.split(text)  # one group in the pattern: between, match, between, match, ..., between
        return [id for i, part in enumerate(parts) for id in ([self.ids[part]] if i % 2 else self.merge(part))]

    def merge(self, text: str) -> list[int]:
        """Ids of `text` by byte-level BPE, with no special tokens at all."""
        check_bytes(text, self.missing_bytes)
        return [token.id for word, _ in self.cut.pre_tokenize_str(text) for token in self.bpe.tokenize(word)]

    def bytes_of(self, id: int, special: bool = False) -> bytes:
        """The UTF-8 bytes of one token (perhaps not a whole character); none for a control token unless `special`."""
        id = index(id)  # not int(): a float is an error, not cut off
        if not 0 <= id < self.vocab_size:
            raise ValueError(f"Token id {id} is outside the vocabulary: ids go from 0 to {self.vocab_size - 1}.")
        return b"" if not special and self.tokens[id] in self.control else self.token_bytes[id]

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Text of token ids. Control tokens are left out unless `special`; bytes that are not valid UTF-8 (an answer
        cut inside a character) become U+FFFD."""
        return b"".join(self.bytes_of(id, special) for id in ids).decode("utf-8", errors="replace")

    def chat(self, messages: list[dict], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation, `[{"role": "user", "content": "..."}, ...]`, laid out by the model's own template.

        Control tokens that the template writes are read as such; the same characters inside a message are not. To tell
        them apart, each look-alike in a message is split by a private-use character that occurs in no message before
        the template runs; the character is taken out after the real control tokens were found.
        """
        if self.chat_template is None:
            raise ValueError("This model has no chat template: give it plain text instead of messages.")
        check_messages(messages)
        said = "".join(text for message in messages for text in message.values())
        mark = next(chr(code) for code in range(0xE000, 0xF900) if chr(code) not in said)

        def guard(text: str) -> str:
            return self.only_control.sub(lambda match: match[0][0] + mark + match[0][1:], text)

        guarded = [{key: guard(text) for key, text in message.items()} for message in messages]
        text = self.render(messages=guarded, add_generation_prompt=add_generation_prompt)
        parts = self.only_control.split(text)
        pieces = [
            [self.ids[part]] if i % 2 else self.split(part.replace(mark, ""), self.always)
            for i, part in enumerate(parts)
        ]
        return [id for piece in pieces for id in piece]

    def render(self, **variables) -> str:
        """The chat template's text. It comes from a downloaded file, so it runs in Jinja's sandbox."""

        def refuse(message):
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = refuse  # templates call it to reject a conversation
        bos, eos = ("" if id is None else self.tokens[id] for id in (self.bos_id, self.eos_id))
        try:
            return environment.from_string(self.chat_template).render(bos_token=bos, eos_token=eos, **variables)
        except jinja2.TemplateError as error:
            raise ValueError(f"The model's chat template does not accept these messages: {error}") from error


class StreamDecoder:
    """Text of tokens that come one at a time: `push(id)` gives what can be shown now, `flush()` the rest.

    The pieces joined are `decode(all ids)`. Bytes of an unfinished character are held back, and so is text that may be
    the beginning of a stop string. Once a stop string is complete, `stopped` is True and no more text is given; if
    several could match, the one completed first counts. Each token is looked at once, so n tokens cost n steps.
    """

    def __init__(self, tokenizer: Tokenizer, stop: str | Iterable[str] = (), special: bool = False):
        self.tokenizer, self.special = tokenizer, special
        self.stop = [stop] if isinstance(stop, str) else list(stop)
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop={stop!r}: a stop string must be a string with at least one character.")
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.held, self.stopped = "", False

    def push(self, id: int) -> str:
        """Take one token, return the text that is now certain (may be empty)."""
        return self.release(self.utf8.decode(self.tokenizer.bytes_of(id, self.special)))

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


def any_of(words: Iterable[str]) -> re.Pattern:
    """A pattern with one group that matches any of `words`, longer ones first; nothing when there are none."""
    choices = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    return re.compile(f"({choices})" if choices else "((?!))")


def byte_alphabet() -> dict[str, int]:
    """The visible character that stands for each byte in a byte-level vocabulary (GPT-2's table): printable Latin-1
    characters stand for themselves, the other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = byte_alphabet()


def to_bytes(token: str, kind: int) -> bytes:
    """The bytes a vocabulary entry stands for. Only normal tokens are written in the byte alphabet."""
    if kind != NORMAL:
        return token.encode()
    try:
        return bytes(BYTE_OF[character] for character in token)
    except KeyError as error:
        raise ValueError(f"Token {token!r} has the character {error}, which stands for no byte.") from error


def required(value, name: str):
    if not value:
        raise ValueError(f"The file's metadata has no tokenizer.ggml.{name}: it carries no usable tokenizer.")
    return value


def check_kind(model: str | None, pre: str | None) -> None:
    required(model, "model")
    if model != "gpt2":
        raise ValueError(f"Tokenizer model {model!r} is not supported: this package reads byte-level BPE ('gpt2').")
    if pre not in PRE_TOKENIZERS:
        raise ValueError(f"Pre-tokenizer {pre!r} is not supported: this package knows {', '.join(PRE_TOKENIZERS)}.")


def check_bytes(text: str, missing: set[int]) -> None:
    """Raise `ValueError` when `text` has a character that this vocabulary cannot write (rare control characters)."""
    try:
        lost = missing.intersection(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(
            f"The text has half of a surrogate pair at character {error.start}: it is no Unicode."
        ) from error
    if lost:
        bad = next(character for character in text if lost.intersection(character.encode()))
        raise ValueError(f"The vocabulary has no token for the character {bad!r}: remove it from the text.")


def check_messages(messages) -> None:
    good = isinstance(messages, (list, tuple)) and all(isinstance(message, dict) for message in messages)
    good = good and all({"role", "content"} <= message.keys() for message in messages)
    if not good or not messages or not all(isinstance(text, str) for m in messages for text in m.values()):
        raise ValueError(
            'messages must be a list with at least one {"role": "user", "content": "..."} in it, all strings; '
            f"got {repr(messages)[:200]}."
        )
