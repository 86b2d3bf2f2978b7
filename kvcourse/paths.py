"""Where things lie: the two folders outside the course that the package writes to, its data, the course itself."""

import os
from pathlib import Path

import platformdirs


def models_folder() -> Path:
    """Where fetched models are kept. `KVCOURSE_MODELS` overrides the user's cache folder."""
    return _folder("KVCOURSE_MODELS", lambda: platformdirs.user_cache_path("kvcourse") / "models")


def results_folder() -> Path:
    """Where guesses, measurements and progress are kept. `KVCOURSE_RESULTS` overrides the user's data folder."""
    return _folder("KVCOURSE_RESULTS", lambda: platformdirs.user_data_path("kvcourse"))


def _folder(variable: str, default) -> Path:
    """The folder that the environment variable names, else `default()`. Raises `ValueError` for a relative path,
    `RuntimeError` where there is no home folder to put it in."""
    try:
        folder = Path(os.environ.get(variable) or default()).expanduser()
    except RuntimeError:
        message = f"No home folder was found: set HOME, or {variable}, to a folder that you may write to."
        raise RuntimeError(message) from None
    if not folder.is_absolute():  # each notebook runs in its own folder, where it would be another place
        raise ValueError(f"{variable}={str(folder)!r} must be a whole path, from the root (or ~) on.")
    return folder


def data_folder() -> Path:
    """`data/`, which holds the models that the course trained itself: inside an installed package, and beside the
    package in a checkout. Raises `FileNotFoundError` where it is in neither place."""
    package = Path(__file__).resolve().parent
    places = (package / "data", package.parent / "data")  # beside an installed package it may be anybody's
    for folder in places:
        if (folder / "models").is_dir():
            return folder
    raise FileNotFoundError(f"The course's data is in neither {places[0]} nor {places[1]}: install the course again.")


def course_folder() -> Path:
    """The checkout, or the learner's copy of one, that holds `notebooks/`: the current folder or one above it, else the
    package's parent.

    Raises `FileNotFoundError` when there is none (the package alone does not carry the notebooks).
    """
    here = Path.cwd()
    for folder in (here, *here.parents, Path(__file__).resolve().parent.parent):
        marks = (folder / "notebooks" / "src", folder / "notebooks" / "00_start_here.ipynb")  # a copy has no sources
        if any(mark.exists() for mark in marks) and (folder / "pyproject.toml").is_file():
            return folder
    raise FileNotFoundError(
        f"No course found from {here} upwards: go to the folder of the course (the one with notebooks/) and try again."
    )
