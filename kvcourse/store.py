"""A small JSON file that several programs change at once, without losing anything or leaving half a file."""

import json
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

import filelock

PATIENCE = 30  # seconds to wait for another program that has the file open


@contextmanager
def open_store(path: Path, parse, write: bool = True):
    """The content of the JSON file, as a dict, under a lock; written back unless the block raised.

    `parse(content)` checks and converts what was read (`{}` when there is no file yet). When it or the JSON
    reader fails, the file is set aside under another name, one line says so, and a new one is begun.
    Raises `RuntimeError` when the folder cannot be used or another program keeps the file for 30 s.
    """
    lock = filelock.FileLock(f"{path}.lock", timeout=PATIENCE)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout:
        raise RuntimeError(
            f"{path} has been in use by another program for {PATIENCE} s; close it and try again."
        ) from None
    except OSError as error:
        raise _unusable(path, error) from error
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
    except FileNotFoundError:
        return parse({})
    except OSError as error:
        raise _unusable(path, error) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        kept = _set_aside(path)
        print(f"The file {path} is damaged. It is kept as {kept.name}, and a new one is begun.")
        return parse({})


def _set_aside(path: Path) -> Path:
    number = 1
    while (kept := path.with_name(f"{path.stem}.damaged-{number}{path.suffix}")).exists():
        number += 1
    return path.rename(kept)


def _save(path: Path, content: dict) -> None:
    text = json.dumps(content, indent=1, allow_nan=False)  # before any file is touched
    try:
        file = tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False)
        with file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: OSError) -> RuntimeError:
    return RuntimeError(
        f"Results cannot be kept in {path.parent} ({error.strerror}); "
        "set KVCOURSE_RESULTS to a folder that you may write to."
    )
