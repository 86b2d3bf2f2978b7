"""`tokenizer.json` in the hands of the `tokenizers` library, and the two things the library does not do: give the bytes
of a single token, and say when it cannot write a text."""

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from kvcourse.tokenizer.spelling import SPACE, byte_level, byte_named, missing_bytes, spaced
from kvcourse.tokenizer.text import check_bytes, no_token_for


def build(control: list[str], file: Path) -> tokenizers.Tokenizer:
    """The library's tokenizer, where every control token, also of the list `control`, is known as such and matched
    nowhere in ordinary text."""
    try:
        library = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"{file} cannot be read by the tokenizers library: {error}.") from error
    known = {token.content for token in library.get_added_tokens_decoder().values() if token.special}
    control = [token for token in control if token not in known and library.token_to_id(token) is not None]
    vocabulary = [AddedToken(token, special=True, normalized=False) for token in control]
    if vocabulary:
        library.add_special_tokens(vocabulary)
    library.encode_special_tokens = True  # "encode" here means: as the ordinary text it looks like
    library.no_truncation()  # a setting left in some files, which would cut texts silently
    library.no_padding()
    return library


class Spelling:
    """How the vocabulary is spelled, as the file's decoder says.

    `byte_level` or else SentencePiece; `byte_fallback`: entries like "<0x0A>" are bytes; `added_space`: a space was put
    before the text. Where the reference decoder treats broken UTF-8 or several leading spaces in a way of its own, here
    bytes are bytes and one space is taken away.
    """

    def __init__(self, decoder: dict | None, file: Path):
        steps = (decoder or {}).get("decoders", [decoder]) if decoder else []
        self.byte_level = self.byte_fallback = self.added_space = False
        spaces = False
        for step in steps:
            match step:
                case {"type": "ByteLevel"}:
                    self.byte_level = True
                case {"type": "ByteFallback"}:
                    self.byte_fallback = True
                case {"type": "Fuse"}:
                    pass
                case {"type": "Replace", "pattern": {"String": str(mark)}, "content": " "} if mark == SPACE:
                    spaces = True
                case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                    self.added_space |= start == 1
                case {"type": "Metaspace", "replacement": str(mark)} if mark == SPACE:
                    spaces = True
                    scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
                    self.added_space |= scheme != "never"
                case _:
                    raise ValueError(f"{file}: a decoder of type {(step or {}).get('type')!r} is not supported.")
        if self.byte_level == spaces:
            raise ValueError(
                f"{file}: its decoder must be byte-level (ByteLevel) or SentencePiece's (Metaspace, or Replace of "
                f"{SPACE!r} by a space); others are not supported."
            )

    def bytes_of(self, token: str, whole: bool) -> bytes:
        """The bytes of an entry; `whole`: it is a control token and stands for itself."""
        if whole:
            return token.encode()
        if self.byte_level:
            return byte_level(token)
        return (byte_named(token) if self.byte_fallback else None) or spaced(token)


def merge_with(library: tokenizers.Tokenizer, data: dict, token_bytes: list[bytes], spelling: Spelling, file: Path):
    """The `merge(text, first)` of a tokenizer: ids of ordinary text, or `ValueError` where the library would drop a
    character, put "unknown" in its place, or (a Unigram model may) write a control token."""
    later = after_a_token(library, data)
    unknown = unknown_id(data["model"], library)
    refused = {unknown, *(id for id, token in library.get_added_tokens_decoder().items() if token.special)}
    missing = missing_bytes(token_bytes) if spelling.byte_level else set()
    bytes_there = all(library.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    if not spelling.byte_level and unknown is None and not (spelling.byte_fallback and bytes_there):
        raise ValueError(f"{file} has no unknown token and no byte fallback: it would drop characters silently.")

    def merge(text: str, first: bool) -> list[int]:
        if missing:
            check_bytes(library.normalizer.normalize_str(text) if library.normalizer else text, missing)
        encoding = (library if first else later).encode(text, add_special_tokens=False)
        if not refused.isdisjoint(encoding.ids):
            start, end = next(span for id, span in zip(encoding.ids, encoding.offsets, strict=True) if id in refused)
            raise no_token_for(text[start:end])
        return encoding.ids

    return merge


def unknown_id(model: dict, library: tokenizers.Tokenizer) -> int | None:
    """The id the library puts where it knows no token."""
    token = model.get("unk_token")
    return model.get("unk_id") if token is None else library.token_to_id(token)


def after_a_token(library: tokenizers.Tokenizer, data: dict) -> tokenizers.Tokenizer:
    """The same tokenizer for text that does not begin the whole: Metaspace's scheme "first" adds no space there. The
    library knows what comes first only inside one call."""
    pre_tokenizer = never_first(data.get("pre_tokenizer"))
    if pre_tokenizer == data.get("pre_tokenizer"):
        return library
    later = tokenizers.Tokenizer.from_str(library.to_str())
    later.pre_tokenizer = tokenizers.Tokenizer.from_str(
        json.dumps({"version": "1.0", "added_tokens": [], "model": EMPTY, "pre_tokenizer": pre_tokenizer})
    ).pre_tokenizer
    later.encode_special_tokens = True
    return later


EMPTY = {"type": "BPE", "vocab": {}, "merges": []}


def never_first(node):
    """The pre-tokenizer's description with the scheme "first" replaced by "never", wherever it stands."""
    if isinstance(node, list):
        return [never_first(part) for part in node]
    if not isinstance(node, dict):
        return node
    return {
        key: "never" if (key, value) == ("prepend_scheme", "first") else never_first(value)
        for key, value in node.items()
    }
