"""A small JSON file that several programs change at once, without losing anything or leaving half a file.

Where it cannot be written, this process keeps its content in memory, and says so once.
"""

import copy
import json
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

import filelock

PATIENCE = 30  # seconds to wait for another program that has the file open

_IN_MEMORY = {}  # path -> content, of files that could not be written


class Unusable(RuntimeError):
    """The file cannot be read or written where it is."""

    def __init__(self, path: Path, error: OSError):
        super().__init__(f"Results cannot be kept in {path.parent} ({error.strerror})")


@contextmanager
def open_store(path: Path, parse, write: bool = True):
    """The content of the JSON file, as a dict, under a lock; written back unless the block raised.

    `parse(content)` checks and converts what was read (`{}` when there is no file yet). When it or the JSON
    reader fails, the file is set aside under another name, one line says so, and a new one is begun.
    Without `write`, a file in a folder that nobody may write to is read all the same, without a lock. A file that
    cannot be written lives in memory from then on, as it was. Raises `RuntimeError` when another program keeps the
    file for 30 s, and for a damaged file that cannot be set aside.
    """
    if path not in _IN_MEMORY:
        content = None
        try:
            with _open_file(path, parse, write) as content:
                yield content
            return
        except Unusable as error:
            if not write:
                advice = "set KVCOURSE_RESULTS to a folder that you may read and write, and start again."
                raise RuntimeError(f"{error}: {advice}") from error
            print(
                f"{error}: they last until this notebook is closed. To keep them, set KVCOURSE_RESULTS to a folder "
                "that you may write to, and start again."
            )
            if content is not None:  # changed by now, but not saved
                _IN_MEMORY[path] = content
                return
            _IN_MEMORY[path] = _readable(path, parse)
    content = copy.deepcopy(_IN_MEMORY[path])
    yield content
    if write:
        _IN_MEMORY[path] = content


@contextmanager
def _open_file(path: Path, parse, write: bool):
    """The same, of a file that can be used; else raises `Unusable`."""
    lock = filelock.FileLock(f"{path}.lock", timeout=PATIENCE)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout:
        raise RuntimeError(
            f"{path} has been in use by another program for {PATIENCE} s; close it and try again."
        ) from None
    except OSError as error:
        if write:
            raise Unusable(path, error) from error
    try:
        content = _load(path, parse)
        yield content
        if write:
            _save(path, content)
    finally:
        lock.release()


def _load(path: Path, parse) -> dict:
    try:
        return parse(json.loads(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return parse({})
    except OSError as error:
        raise Unusable(path, error) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        kept = _set_aside(path)
        print(f"The file {path} is damaged. It is kept as {kept.name}, and a new one is begun.")
        return parse({})


def _readable(path: Path, parse) -> dict:
    """What can be read of a file that cannot be written; nothing where it cannot be read either."""
    try:
        return _load(path, parse)
    except Unusable:
        return parse({})


def _set_aside(path: Path) -> Path:
    number = 1
    while (kept := path.with_name(f"{path.stem}.damaged-{number}{path.suffix}")).exists():
        number += 1
    try:
        return path.rename(kept)
    except OSError as error:
        raise Unusable(path, error) from error


def _save(path: Path, content: dict) -> None:
    text = json.dumps(content, indent=1, allow_nan=False)  # before any file is touched
    try:
        file = tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False)
        with file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        raise Unusable(path, error) from error
