"""The models that travel with the course, in `data/models`: four, trained by one recipe, apart in attention alone."""

import hashlib
from pathlib import Path

from kvcourse.paths import data_folder
from kvcourse.text_files import read_object

SHIPPED = ("tiny-mha", "tiny-gqa", "tiny-mqa", "tiny-window")
STAND_IN = "tiny-gqa"  # runs the course where the chat model cannot be had


def shipped_folder(name: str) -> Path:
    """Folder of a model of the course's own. Quick: it is `altered` that looks whether the files are as shipped."""
    folder = data_folder() / "models" / name
    if not folder.is_dir():
        raise FileNotFoundError(f"The model {name} should be in {folder}, but is not: install the course again.")
    return folder


def altered(name: str) -> list[Path]:
    """Files of a shipped model that are missing or not as they were shipped, by the checksums in provenance.json."""
    return altered_in(shipped_folder(name))


def altered_in(folder: Path) -> list[Path]:
    """The same for any folder of a model that was trained by `kvcourse train`."""
    provenance = folder / "provenance.json"
    try:
        sums = read_object(provenance)["sha256"]
        wrong = [folder / file for file, wanted in sums.items() if not same(folder / file, wanted)]
    except (OSError, ValueError, KeyError, AttributeError):
        return [provenance]
    return wrong if sums else [provenance]


def same(path: Path, wanted: str) -> bool:
    return path.is_file() and sha256(path) == wanted


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
