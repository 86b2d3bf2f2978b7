"""The course as learners get it: notebooks to work in, the package and its data, and no worked solutions.

The checkers in `kvcourse/check` hold reference functions, since they compare answers with them. Whoever goes looking
for those finds them; they are not in the notebooks.
"""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from kvcourse.notebooks.build import has_been_run, lesson_paths
from kvcourse.notebooks.source import read_text

FILES = ("README.md", "LICENSE", "pyproject.toml", "constraints.txt", "environment.yml", "notebooks/*.ipynb")
FOLDERS = ("kvcourse", "data")
LOCAL_LINK = re.compile(r"(?<!!)\[(?P<words>[^\[\]]*)\]\((?!\w+:)(?P<path>[^)#]*)[^)]*\)")
LITTER = ("__pycache__", ".*", "*.pyc", "*.egg-info")


def copy(course: Path, folder: Path) -> Path:
    """Copy the learner's part of `course` into `folder`, which must be empty or absent; it appears there as a whole.

    Raises `ValueError` for another folder, and when somebody has worked in the notebooks that would be copied.
    """
    require_empty(folder)
    for name in FOLDERS:
        if folder.resolve().is_relative_to((course / name).resolve()):
            raise ValueError(f"{folder} lies in the folder {name}, which is copied itself: give one outside of it.")
    worked_in = [path.stem for path in learner_notebooks(course) if has_been_run(path)]
    if worked_in:
        raise ValueError(
            f"somebody has worked in {', '.join(worked_in)}: take a fresh checkout, or build them anew with "
            "`kvcourse notebooks --force` (which discards that work)"
        )
    half = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        for path in learner_files(course):
            target = half / path.relative_to(course)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        without_dead_links(half / "README.md")
        if folder.is_dir():
            folder.rmdir()  # empty; and a folder is not renamed over another everywhere
        half.rename(folder)
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return folder


def without_dead_links(page: Path) -> None:
    """Leave of each link in a Markdown page that leads to nothing beside it only the words."""
    if not page.is_file():
        return

    def kept(link: re.Match) -> str:
        return link[0] if (page.parent / link["path"]).exists() else link["words"]

    page.write_text(LOCAL_LINK.sub(kept, read_text(page)), encoding="utf-8", newline="\n")


def require_empty(folder: Path) -> None:
    """Raise `ValueError` unless `folder` is an empty folder, or nothing yet in a place where one can be made."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ValueError(f"{folder} is no folder: give the name of a new one.")
    for above in folder.parents:
        if above.exists() and not above.is_dir():
            raise ValueError(f"{folder} cannot be made, since {above} is no folder: give another name.")
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: give the name of a new folder.")


def learner_notebooks(course: Path) -> list[Path]:
    """The learner's notebooks. Raises `FileNotFoundError` when there is none."""
    paths = lesson_paths(course / "notebooks")
    if not paths:
        raise FileNotFoundError(f"no notebooks in {course / 'notebooks'}: run `kvcourse notebooks` to build them")
    return paths


def learner_files(course: Path) -> Iterator[Path]:
    """Every file that belongs to a learner's copy, in the order of their names."""
    for pattern in FILES:
        yield from sorted(course.glob(pattern))
    for name in FOLDERS:
        yield from sorted(path for path in (course / name).rglob("*") if path.is_file() and not _litter(path, course))


def _litter(path: Path, course: Path) -> bool:
    return any(Path(part).match(pattern) for part in path.relative_to(course).parts for pattern in LITTER)
