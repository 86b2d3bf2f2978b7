"""The two files that keep a report: `bench.json` for programs, `bench.png` to look at."""

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from kvcourse.plots import bench_rows, png

CONTENTS = {
    "bench.json": lambda report: (json.dumps(report, indent=1) + "\n").encode(),
    "bench.png": lambda report: png(bench_rows(report)),
}


def writable(folder: Path, names: Iterable[str] = CONTENTS) -> Path:
    """`folder`, made if need be, if the files `names` can be written there, else `ValueError`. To be asked before the
    work whose results would be lost."""
    try:
        folder = folder.expanduser()
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file, and results are saved in a folder: give another.")
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError) as error:  # RuntimeError: the home (~name) of nobody
        cause = str(getattr(error, "strerror", None) or error).rstrip(".")
        raise ValueError(f"No results can be saved in {folder} ({cause}): give another folder.") from error
    for file in (folder / name for name in names):
        if os.path.lexists(file) and not (file.is_file() and os.access(file, os.W_OK)):
            raise ValueError(f"{file} is there and cannot be replaced: move it, or give another folder.")
    return folder


def save(report: dict, folder: Path, names: Iterable[str] = CONTENTS) -> list[str]:
    """Write the files `names`. For each a line that says so, or that an earlier one was replaced."""
    lines = []
    for name in names:
        file = folder / name
        done = "Replaced" if file.exists() else "Written"
        file.write_bytes(CONTENTS[name](report))
        lines.append(f"{done}: {file}")
    return lines
