"""The routes through the course in `notebooks/instructor/routes.md`: their minutes are worked out, not written down.

A route is a `##` heading that says how many minutes there are, and a table below it with the columns notebook, sections
(`;` between them), what is done there, minutes. What is done is `read` (read together, cells run), `run` (cells run,
nothing read), or the names of exercises in backticks (read, and these done). Rows `break` and `lunch` have minutes of
their own; lunch is not counted in the time of the route. After the table stand a line with the sum, the room that is
left and the longest time without a rest, and a line with the exit questions that the route has answered.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvcourse.model_folder import write_whole
from kvcourse.notebooks.source import read_text
from kvcourse.workshop.minutes import Section, sections

PAGE = Path("notebooks", "instructor", "routes.md")
HEADING = re.compile(r"^## .*?(\d+) minutes", re.MULTILINE)
ROW = re.compile(r"^\| (break|lunch|\d\d) \| (.*?) \| (.*?) \| (.*?) \|$")
SUM = re.compile(r"^\*\*Sum .*\*\*$")
QUESTIONS = re.compile(r"^\*\*Exit questions:\*\* .*$")
QUESTION = re.compile(r"^(\d)\. [^\n]*(?:\n(?!\d\. ).*)*?\(Section\s\*([^*]+)\*\.\)", re.MULTILINE)  # on a page
RESTS = ("break", "lunch")
SHARE = 2 / 3  # of the time without breaks that a route may fill; see `routes.md`


class Row(NamedTuple):
    """A line of a route's table; `minutes` is not rounded."""

    notebook: str
    titles: list[str]
    does: str
    minutes: float


class Route(NamedTuple):
    """One way through the course."""

    title: str
    time: int
    rows: list[Row]

    @property
    def breaks(self) -> float:
        return sum(row.minutes for row in self.rows if row.notebook == "break")

    @property
    def sum(self) -> float:
        """Minutes of all rows but the rests."""
        return sum(row.minutes for row in self.rows if row.notebook not in RESTS)

    @property
    def fits(self) -> bool:
        return self.sum <= SHARE * (self.time - self.breaks)

    @property
    def longest_stretch(self) -> float:
        """Minutes by the clock between two rests, at most, when the room that is left goes to all rows alike."""
        stretches = [0.0]
        for row in self.rows:
            if row.notebook in RESTS:
                stretches.append(0.0)
            else:
                stretches[-1] += row.minutes
        return max(stretches) * (self.time - self.breaks) / self.sum

    def reads(self, notebook: str, title: str) -> bool:
        """Whether the section is read together, not only run or left out."""
        return any(row.notebook == notebook and title in row.titles and row.does != "run" for row in self.rows)


def routes(course: Path) -> list[Route]:
    """The routes as they stand in `routes.md`. Raises `ValueError` for a section or an exercise that does not exist,
    and for a section before which one is left out, since its cells need those above."""
    text, known = read_text(course / PAGE), sections(course)
    found = [Route(title, time, [_row(line, known) for line in lines]) for title, time, lines in _tables(text)]
    for route in found:
        _refuse_gaps(route, known)
    return found


def refreshed(course: Path) -> str:
    """The text of `routes.md` with all minutes worked out anew."""
    text, found, asked = read_text(course / PAGE), routes(course), exit_questions(course)
    lines, rows, route = [], iter(()), None
    for line in text.splitlines():
        if HEADING.match(line):
            route = found.pop(0)
            rows = iter(route.rows)
        elif ROW.match(line):
            notebook, titles, does, _ = ROW.match(line).groups()
            minutes = next(rows).minutes
            line = f"| {notebook} | {titles} | {does} | {'<1' if minutes < 0.5 else round(minutes)} |"
        elif SUM.match(line):
            line = _sum_line(route)
        elif QUESTIONS.match(line):
            line = _questions_line(route, asked)
        lines.append(line)
    return "\n".join(lines) + "\n"


def update(course: Path) -> Path:
    """Write the minutes into `routes.md`."""
    write_whole(course / PAGE, refreshed(course).encode())
    return course / PAGE


def exit_questions(course: Path) -> list[tuple[str, str, str]]:
    """Notebook, number and section of each exit question on the instructor's pages."""
    found = []
    for page in sorted((course / PAGE).parent.glob("[0-9][0-9]_*.md")):
        _, _, text = read_text(page).partition("## Exit questions")
        found += [(page.stem[:2], number, " ".join(title.split())) for number, title in QUESTION.findall(text)]
    return found


def rounded(minutes: float) -> int:
    """To the nearest five."""
    return 5 * round(minutes / 5)


def _sum_line(route: Route) -> str:
    room = route.time - rounded(route.sum) - route.breaks
    said = f"Sum {rounded(route.sum)} minutes, breaks {route.breaks:.0f}, room {room:.0f}."
    return f"**{said} Longest without a rest: {rounded(route.longest_stretch)} minutes by the clock.**"


def _questions_line(route: Route, asked: list[tuple[str, str, str]]) -> str:
    numbers = {}
    for notebook, number, title in asked:
        if route.reads(notebook, title):
            numbers.setdefault(notebook, []).append(number)
    pages = [f"{notebook}: {', '.join(some)}" for notebook, some in numbers.items()]
    return f"**Exit questions:** {'; '.join(pages)}."


def _tables(text: str) -> Iterator[tuple[str, int, list[str]]]:
    """Title, minutes and rows of each route."""
    begins = [*HEADING.finditer(text)]
    for here, after in zip(begins, [*begins[1:], None], strict=True):
        part = text[here.start() : after.start() if after else None].splitlines()
        yield part[0].removeprefix("## "), int(here[1]), [line for line in part if ROW.match(line)]


def _refuse_gaps(route: Route, known: list[Section]) -> None:
    for notebook in dict.fromkeys(row.notebook for row in route.rows if row.notebook not in RESTS):
        listed = [title for row in route.rows if row.notebook == notebook for title in row.titles]
        wanted = [section.title for section in known if section.notebook[:2] == notebook][: len(listed)]
        if listed != wanted:
            gap = next(title for title, other in zip(wanted, listed, strict=True) if title != other)
            raise ValueError(
                f"{PAGE}, {route.title}: notebook {notebook} needs the cells of its section {gap!r} before what comes "
                "later; name it in its place, with `run` if it is not read"
            )


def _row(line: str, known: list[Section]) -> Row:
    notebook, titles, does, stated = ROW.match(line).groups()
    if notebook in RESTS:
        return Row(notebook, [titles], does, float(stated))
    own = {section.title: section for section in known if section.notebook[:2] == notebook}
    titles = [title.strip() for title in titles.split(";")]
    if missing := [title for title in titles if title not in own]:
        raise ValueError(f"{PAGE}: notebook {notebook} has no section {missing[0]!r}; its sections: {'; '.join(own)}")
    chosen = [own[title] for title in titles]
    if does == "run":
        return Row(notebook, titles, does, sum(section.running for section in chosen))
    names = re.findall(r"`(\w+)`", does)
    if lost := [name for name in names if not any(name in section.exercises for section in chosen)]:
        raise ValueError(f"{PAGE}: the exercise {lost[0]!r} is not in {'; '.join(titles)} of notebook {notebook}")
    return Row(notebook, titles, does, sum(s.minutes([n for n in names if n in s.exercises]) for s in chosen))
