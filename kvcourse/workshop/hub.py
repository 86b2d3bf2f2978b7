"""What a learner takes on a shared server: the table of `notebooks/instructor/jupyterhub.md`, from recorded runs; and
the same times in the README's table of lessons, so that both pages say one thing."""

import math
import re
from pathlib import Path

from kvcourse.model_folder import write_whole
from kvcourse.notebooks.source import read_text
from kvcourse.workshop.minutes import read_record

PAGE = Path("notebooks", "instructor", "jupyterhub.md")
TABLE = re.compile(r"(?<=^\|---\|---\|---\|\n)(\| \d\d .*\n)*", re.MULTILINE)
README = Path("README.md")
LESSON = re.compile(r"^(\| \[(\d\d) [^|]*\| [^|]* \| )[^|]*(?= \|)", re.MULTILINE)  # up to the column "It runs"
LIMIT = re.compile(r"(?<=limits\.memory )\d+G")
SERVER_GB = 0.1  # JupyterLab 4's own process for one learner, measured with psutil: 99 MB
HEADROOM = 1.3  # the Littlest JupyterHub's documentation advises 20 to 40% above what was measured


def rows(course: Path) -> list[str]:
    """A row for each recorded notebook: its number, the most memory of its kernel, and how long its cells ran."""
    found = []
    for name, run in read_record(course).items():
        found.append(f"| {name[:2]} | {run['peak_gb']:.1f} GB | {_ran(run)} |")
    return found


def _ran(run: dict) -> str:
    return f"{sum(run['seconds'].values()):.0f} s" if run["seconds"] else "-"  # "-": on a busy machine, thrown away


def memory_limit(course: Path, notebooks=()) -> int:
    """Whole GB to allow each learner, who has one of these notebooks open at a time (any when none is named). Raises
    `ValueError` when none of them was recorded."""
    peaks = [run["peak_gb"] for name, run in read_record(course).items() if not notebooks or name[:2] in notebooks]
    if not peaks:
        raise ValueError("none of these notebooks was recorded: run `kvcourse workshop minutes --record`")
    return math.ceil(HEADROOM * (max(peaks) + SERVER_GB))


def refreshed(course: Path) -> str:
    """The text of the page with its table and its limit of memory made anew."""
    text = TABLE.sub(lambda _: "".join(f"{row}\n" for row in rows(course)), read_text(course / PAGE))
    return LIMIT.sub(f"{memory_limit(course)}G", text)


def refreshed_readme(course: Path) -> str:
    """The text of the README with the times of its lessons made anew; a lesson that was not recorded stays."""
    ran = {name[:2]: _ran(run) for name, run in read_record(course).items()}
    return LESSON.sub(lambda row: row[1] + ran[row[2]] if row[2] in ran else row[0], read_text(course / README))


def update(course: Path) -> Path:
    """Write the table into the page, and the times into the README where there is one."""
    write_whole(course / PAGE, refreshed(course).encode())
    if (course / README).is_file():
        write_whole(course / README, refreshed_readme(course).encode())
    return course / PAGE
