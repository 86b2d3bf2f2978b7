"""A folder that a model is written into, by one program at a time if it is trained there. Files in it are written whole
or not at all: a full disk, or the end of the program, leaves the earlier ones."""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from errno import EDQUOT, ENOSPC
from pathlib import Path

from filelock import FileLock, Timeout

APART = ".kvcourse-new"  # the folder in which files are written before they are moved


def usable(folder: str | os.PathLike, contents: str = "a model is kept") -> Path:
    """`folder`, made if need be. Raises `ValueError` when it is none, or nothing can be written there; `contents` says
    in it what would be."""
    if not isinstance(folder, str | os.PathLike):
        raise ValueError(f"folder must be the name of a folder, got {folder!r}.")
    if not os.fspath(folder):
        raise ValueError("folder is an empty name: give the name of a folder, or '.' for the current one.")
    path = Path(os.path.expanduser(folder))
    for place in (path, *path.parents):
        if os.path.lexists(place) and not os.path.isdir(place):
            what = "a file" if os.path.exists(place) else "a link that leads nowhere"
            raise ValueError(f"{place} is {what}, and {contents} in a folder: give another.")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"The folder {path} cannot be made ({error.strerror}): give another.") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"Nothing can be written in {path}: give another folder.")
    return path


def hold(folder: Path) -> AbstractContextManager:
    """A lock that no two programs have at once, to be left with `with`. Raises `RuntimeError` when another has it.

    Its file stays beside the folder: it is the system that locks it, until its holder ends, in whatever way.
    """
    folder = folder.resolve()
    path = folder.with_name(f".{folder.name}.lock")
    try:
        return FileLock(path).acquire(timeout=0)
    except Timeout:
        raise RuntimeError(
            f"Another program is training in {folder}: wait until it has ended, or give another folder."
        ) from None
    except OSError as error:
        raise cannot_write(path, error) from error


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
            raise cannot_write(path, error) from error
        raise


def place(files: dict[str, bytes | Callable[[Path], None]], folder: Path) -> Path:
    """Write the files apart, in a folder within `folder`, then move them to their places in their order. A file is
    given by its content, or by a function that writes it where it is told: one that would be large in memory."""
    apart = folder / APART
    shutil.rmtree(apart, ignore_errors=True)  # a program that was killed has left it
    try:
        apart.mkdir()
        for name, data in files.items():
            if callable(data):
                data(apart / name)
                with open(apart / name, "rb+") as file:
                    os.fsync(file.fileno())
            else:
                write_whole(apart / name, data)
        for name in files:
            os.replace(apart / name, folder / name)
    except OSError as error:
        raise cannot_write(folder, error) from error
    finally:
        shutil.rmtree(apart, ignore_errors=True)
    return folder


def as_text(content) -> bytes:
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()


def cannot_write(path: Path, error: OSError) -> RuntimeError:
    what = "make room there" if error.errno in (ENOSPC, EDQUOT) else "put that right"
    return RuntimeError(f"{path} could not be written ({error.strerror}): {what}, and try again.")
