"""The bytes that a vocabulary entry stands for. Vocabularies are stored as readable text, in one of two spellings:

- byte-level (GPT-2): one visible character for each byte, "Ġhi" for " hi";
- SentencePiece: text with "▁" for a space, and entries "<0x0A>" for single bytes.
"""

import re

SPACE = "\u2581"  # ▁
BYTE_NAME = re.compile("<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The visible character that stands for each byte in a byte-level vocabulary (GPT-2's table): printable Latin-1
    characters stand for themselves, the other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = byte_alphabet()
# For str.translate: a character of the alphabet becomes the Latin-1 character of its byte; Latin-1 characters that are
# not in the alphabet (the space) become one that Latin-1 cannot write.
TO_LATIN_1 = {code: "\uffff" for code in range(256)} | {ord(character): byte for character, byte in BYTE_OF.items()}


def byte_level(token: str) -> bytes:
    """An entry with a character outside the alphabet stands for itself, as in the `tokenizers` library."""
    try:
        return token.translate(TO_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def spaced(token: str) -> bytes:
    return token.replace(SPACE, " ").encode()


def byte_named(token: str) -> bytes | None:
    """The byte of an entry such as "<0x0A>"; None for other entries."""
    match = BYTE_NAME.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else None


def missing_bytes(token_bytes: list[bytes]) -> set[int]:
    """Bytes that no token stands for alone: text with them cannot be written in a byte-level vocabulary."""
    return set(range(256)) - {token[0] for token in token_bytes if len(token) == 1}
