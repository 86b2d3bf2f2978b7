"""How long each section of a notebook takes a class: words to read, minutes of its exercises, seconds of its cells.

Words and minutes come from the source, seconds from a run that `record` made and stored. What is not in these figures:
the time to think about a guess, to read code, to talk. A plan has to leave room for that.

The speed of reading is 175 words a minute, the lower end of the range in which most adults read English non-fiction
(175 to 300, mean 238: Brysbaert 2019, Journal of Memory and Language 109, 104047). The text is technical, and many who
read it have another first language. Reading aloud is about as fast (183 in the mean, the same review), so the figure
also stands for an instructor who tells what the text says.
"""

import json
import platform
import re
from collections.abc import Iterator
from datetime import date, datetime
from pathlib import Path
from typing import NamedTuple

from nbformat import NotebookNode

from kvcourse.model_folder import write_whole
from kvcourse.notebooks.build import pick, source_paths
from kvcourse.notebooks.exercises import read_exercises
from kvcourse.notebooks.source import read_cells, read_notebooks, read_project, read_text

WORDS_PER_MINUTE = 175
OPENING = "Opening"  # what stands before the first section: title, aims, set-up
RECORD = Path("notebooks", "instructor", "runs.json")
HEADER = re.compile(r"^### Exercise: (\w+)$", re.MULTILINE)


class Section(NamedTuple):
    """One `##` section of a notebook; `exercises` are minutes by the name of the exercise, `seconds` None where no run
    was recorded."""

    notebook: str
    title: str
    words: int
    exercises: dict[str, int]
    seconds: float | None

    @property
    def running(self) -> float:
        """Minutes that its cells run; 0 where no run was recorded."""
        return (self.seconds or 0) / 60

    def minutes(self, exercises=None) -> float:
        """Minutes to read it, to run its cells and to do these of its exercises (all when None)."""
        chosen = self.exercises if exercises is None else exercises
        return self.words / WORDS_PER_MINUTE + self.running + sum(self.exercises[name] for name in chosen)


def sections(course: Path, names=()) -> list[Section]:
    """The sections of the named notebooks (all when none is named), in their order. Raises `ValueError` for a name that
    no notebook has, for an exercise without minutes, and for a record that is damaged."""
    recorded = read_record(course)
    found = []
    for path in pick(source_paths(course), list(names)):
        seconds = recorded.get(path.stem, {}).get("seconds", {})
        efforts = {exercise.name: exercise.minutes for exercise in read_exercises(path)}
        for title, cells in _by_section(read_cells(path)):
            texts = [cell.source for cell in cells if cell.cell_type == "markdown"]
            exercises = {name: efforts[name] for text in texts for name in HEADER.findall(text)}
            found.append(Section(path.stem, title, sum(map(_words, texts)), exercises, seconds.get(title)))
    return found


def table(course: Path, names=()) -> str:
    """One line a section: words, minutes to read them, exercises, seconds, and the sum in minutes."""
    found = sections(course, names)
    width = max(len(section.title) for section in found)
    lines = [f"{'':4}{'section':<{width}}  words  reading  exercises  running  minutes"]
    for name in dict.fromkeys(section.notebook for section in found):
        own = [section for section in found if section.notebook == name]
        lines.append(f"{name}: {sum(section.minutes() for section in own):.0f} minutes")
        lines += [_line(section, width) for section in own]
    total = sum(section.minutes() for section in found)
    speed = f"Reading at {WORDS_PER_MINUTE} words a minute; thinking, code and talk are not counted."
    return "\n".join([*lines, f"in all: {total:.0f} minutes. {speed}", *_machines(course, names)])


def record(course: Path, names=()) -> Path:
    """Run the named worked notebooks (all when none is named), store how long each section ran and how much memory that
    took, and bring the instructor's pages up to date. What was recorded before of other notebooks stays.

    Raises `RuntimeError` for a failing cell."""
    from kvcourse.notebooks.execute import execute, scratch_results
    from kvcourse.workshop import hub, quotes, routes  # their pages are made from what is recorded here

    paths, project, recorded = pick(source_paths(course), list(names)), read_project(course), read_record(course)
    with scratch_results() as env:
        for path in paths:
            notebook = read_notebooks(path, project).solution
            done = execute(notebook, course / "notebooks", path.stem, env, record_timing=True)
            if done.error:
                raise RuntimeError(f"{done.error} (nothing was recorded)")
            seconds = {title: round(sum(map(_ran, cells)), 1) for title, cells in _by_section(notebook.cells)}
            recorded[path.stem] = {
                "on": _machine(),
                "date": date.today().isoformat(),
                "peak_gb": round(done.peak_bytes / 1e9, 2),
                "seconds": seconds,
            }
    path = course / RECORD
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(dict(sorted(recorded.items())), indent=1) + "\n").encode())
    for pages in (hub, quotes, routes):
        pages.update(course)
    return path


def _by_section(cells: list[NotebookNode]) -> Iterator[tuple[str, list[NotebookNode]]]:
    """The title of each section and its cells; a text cell in which one begins is cut there."""
    title, own = OPENING, []
    for cell in cells:
        if cell.cell_type != "markdown":
            own.append(cell)
            continue
        begun = re.split(r"^## (.+)$", cell.source, flags=re.MULTILINE)
        own.append(NotebookNode({**cell, "source": begun[0]}))
        for heading, text in zip(begun[1::2], begun[2::2], strict=True):
            yield title, own
            title, own = heading.strip(), [NotebookNode({**cell, "source": text})]
    yield title, own


def _words(text: str) -> int:
    """Words of prose in a text cell: no exercise, whose minutes include its reading, no code, formulas, links, tags."""
    text = re.sub(r"^### Exercise.*?(?=^#|\Z)", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"```.*?```|\$\$.*?\$\$|\]\([^)]*\)|<[^>]+>|\{\{.*?\}\}", " ", text, flags=re.DOTALL)
    return len(re.findall(r"\w[\w.,'’-]*", text))


def _line(section: Section, width: int) -> str:
    running = "-" if section.seconds is None else f"{section.seconds:.0f} s"
    reading, exercises = section.words / WORDS_PER_MINUTE, sum(section.exercises.values())
    numbers = f"{section.words:>5}  {reading:>7.1f}  {exercises or '-':>9}  {running:>7}  {section.minutes():>7.1f}"
    return f"{'':4}{section.title:<{width}}  {numbers}  {', '.join(section.exercises)}".rstrip()


def _machines(course: Path, names) -> list[str]:
    recorded = {name: run for name, run in read_record(course).items() if run["seconds"]}
    chosen = [path.stem for path in pick(source_paths(course), list(names))]
    said = dict.fromkeys(f"Run on {recorded[n]['on']}, {recorded[n]['date']}." for n in chosen if n in recorded)
    missing = [name for name in chosen if name not in recorded]
    return [*said, *([f"Not run yet: {', '.join(missing)} (`kvcourse workshop minutes --record`)."] if missing else [])]


def _ran(cell: NotebookNode) -> float:
    """Seconds that an executed cell ran, from the moments that nbclient noted."""
    moments = cell.metadata.get("execution", {})
    ends = [moments.get(name) for name in ("iopub.execute_input", "shell.execute_reply")]
    if None in ends:
        return 0.0
    begun, done = (datetime.fromisoformat(moment.replace("Z", "+00:00")) for moment in ends)
    return (done - begun).total_seconds()


def _machine() -> str:
    from kvcourse.device import device_class

    return f"{device_class()}, {platform.machine()}"


def read_record(course: Path) -> dict[str, dict]:
    """By the name of each notebook that was run: `on` (the machine), `date`, `peak_gb` (memory of its kernel) and
    `seconds` of each section. Empty where nothing was recorded; raises `ValueError` for a damaged file."""
    path = course / RECORD
    try:
        return json.loads(read_text(path)) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): `kvcourse workshop minutes --record` writes it anew") from None
