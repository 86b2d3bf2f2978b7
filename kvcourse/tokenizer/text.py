"""Small things that all tokenizers share: which text can be written, and finding words in it."""

import re
from collections.abc import Iterable


def any_of(words: Iterable[str]) -> re.Pattern:
    """A pattern with one group that matches any of `words`, longer ones first; nothing when there are none."""
    choices = "|".join(re.escape(word) for word in sorted(filter(None, words), key=len, reverse=True))
    return re.compile(f"({choices})" if choices else "((?!))")


def check_text(text: str) -> None:
    if not isinstance(text, str):
        raise TypeError(f"encode takes a string, got {type(text).__name__}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"The text has half of a surrogate pair at character {error.start}: it is no Unicode."
        ) from error


def check_bytes(text: str, missing: set[int]) -> None:
    """Raise `ValueError` when `text` has a character that this vocabulary cannot write (rare control characters)."""
    lost = missing.intersection(text.encode())
    if lost:
        raise no_token_for(next(character for character in text if lost.intersection(character.encode())))


def no_token_for(text: str) -> ValueError:
    return ValueError(f"The vocabulary has no token for {text!r}: remove it from the text.")


def unused_character(text: str) -> str:
    """A private-use character that is not in `text`."""
    return next(chr(code) for code in range(0xE000, 0xF900) if chr(code) not in text)
