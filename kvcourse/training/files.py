"""Files that are written whole or not at all: a full disk, or the end of the program, leaves the earlier one."""

import os
from contextlib import suppress
from pathlib import Path


def usable(folder: str | os.PathLike) -> Path:
    """`folder`, made if need be. Raises `ValueError` when it is none, or nothing can be written there."""
    path = Path(os.path.expanduser(folder))
    if os.path.lexists(path) and not path.is_dir():
        raise ValueError(f"{path} is a file, and a model is kept in a folder: give another.")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"The folder {path} cannot be made ({error.strerror}): give another.") from error
    if not os.access(path, os.W_OK):
        raise ValueError(f"Nothing can be written in {path}: give another folder.")
    return path


def write_whole(path: Path, data: bytes) -> None:
    """Write beside the file first, down to the disk, and then put it in its place.

    Raises `RuntimeError` when that fails; what was at `path` is still there then, and nothing else.
    """
    beside = path.with_name(f".{path.name}.tmp")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException as error:
        with suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError):
            raise RuntimeError(f"{path} could not be written ({error.strerror}): make room there.") from error
        raise
