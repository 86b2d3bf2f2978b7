"""The two folders outside the course that the package writes to, and the course folder itself."""

import os
from pathlib import Path

import platformdirs


def models_folder() -> Path:
    """Where fetched models are kept. `KVCOURSE_MODELS` overrides the user's cache folder."""
    return Path(os.environ.get("KVCOURSE_MODELS") or platformdirs.user_cache_path("kvcourse") / "models")


def results_folder() -> Path:
    """Where guesses, measurements and progress are kept. `KVCOURSE_RESULTS` overrides the user's data folder."""
    return Path(os.environ.get("KVCOURSE_RESULTS") or platformdirs.user_data_path("kvcourse"))


def course_folder() -> Path:
    """The checkout that holds `notebooks/`: the current folder or one above it, else the package's parent.

    Raises `FileNotFoundError` when there is none (the package alone does not carry the notebooks).
    """
    here = Path.cwd()
    for folder in (here, *here.parents, Path(__file__).resolve().parent.parent):
        if (folder / "notebooks" / "src").is_dir() and (folder / "pyproject.toml").is_file():
            return folder
    raise FileNotFoundError(
        f"No course found from {here} upwards: go to the folder of the course (the one with notebooks/) and try again."
    )
