"""The small text files of a checkpoint, read strictly: UTF-8, and JSON in which nothing is said twice."""

import json
import os
from collections import Counter
from pathlib import Path


def given_object(source, name: str) -> tuple[dict, str]:
    """The object that a learner gives as JSON text, as a dictionary, or as the path of a file or of a folder with the
    file `name`; and what to call it in an error.

    Raises `ValueError` when it is damaged, says a thing twice or is nothing of these, `FileNotFoundError` when there is
    no such file.
    """
    if isinstance(source, dict):
        return source, f"The {name} given"
    if isinstance(source, str) and ("{" in source or "\n" in source):
        return parse_object(source, f"The {name} given"), f"The {name} given"
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"Give the text or the path of a {name}, or its dictionary, not {type(source).__name__}.")
    path = Path(source) / name if os.path.isdir(source) else Path(source)
    if not os.path.isfile(path):  # Path.is_file fails on a name that is too long
        raise FileNotFoundError(f"There is no file {path}: give the path of a {name}, of its folder, or its text.")
    return read_object(path), str(path)


def read_object(path: Path) -> dict:
    """The object in a JSON file. Raises `ValueError` naming the file when it is damaged or says a thing twice."""
    return parse_object(read_text(path), str(path))


def parse_object(text: str, where: str) -> dict:
    """The object in JSON text. Raises `ValueError` naming `where` when it is damaged or says a thing twice."""
    twice = []  # names of members that an object has more than once: readers differ in which of them counts

    def members(pairs: list[tuple]) -> dict:
        content = dict(pairs)
        if len(content) < len(pairs):
            twice.append(Counter(name for name, _ in pairs).most_common(1)[0][0])
        return content

    try:
        content = json.loads(text, object_pairs_hook=members)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: it is damaged or was cut short; fetch it again. ({error})") from error
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply to be read, so it is damaged: fetch it again.") from error
    if twice:
        raise ValueError(f"{where} has the field {twice[0]!r} twice: take out the wrong one.")
    if not isinstance(content, dict):
        raise ValueError(f"{where} must hold a JSON object, but holds a {type(content).__name__}.")
    return content


def read_text(path: Path) -> str:
    """A text file. Raises `ValueError` naming the file when it is not in UTF-8."""
    refuse_pointer(path)
    data = path.read_bytes()
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ValueError(f"{path} is in UTF-16: save it as UTF-8.")
    try:
        return data.decode("utf-8-sig")  # some editors begin a file with a mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8, so it is damaged: fetch it again. ({error})") from error


def refuse_pointer(path: Path) -> None:
    """git keeps large files elsewhere and leaves a few lines of text in their place (git-lfs)."""
    with open(path, "rb") as file:
        if file.read(40).startswith(b"version https://git-lfs"):
            raise ValueError(
                f"{path} is only a pointer to the real file (git-lfs): run `git lfs pull` in that folder, or download "
                "the file itself."
            )
