"""Slides from the notebooks, through nbconvert and reveal.js; they open without a network.

No slide is marked in a source. The structure decides:

- each `##` section is a column of slides, its steps stand below each other; the title is a column of its own;
- code, and below it the text and figures that the worked notebook stores, on one slide if it has room for both;
- of a cell that does nothing but show a figure, the figure;
- an exercise is its statement and the stub that learners have, never the solution; its hints are in the speaker's notes
  (key S), and so is nothing else;
- left out: set-up and imports before the first section, calls of checkers, and what a guess printed.
"""

import ast
import re
import shutil
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from kvcourse.model_folder import write_whole
from kvcourse.notebooks.build import built_paths, pick, read

TEMPLATES = Path(__file__).parent / "templates"
REVEAL = "reveal.js"  # the folder beside the slides
LINES = 31  # of code on one slide
OUTPUTS = "outputs-of-the-cell-before"
PLOTS = re.compile(r"kv\.plots\.show\(|(figure|alt) = ")
HINTS = re.compile(r"<details>.*?</details>", re.S)
BADGES = re.compile(r"\[!\[[^\]]*\]\([^)]*\)\]\([^)]*\)")
LOCAL_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?!https?:)[^)]*\)")  # leads nowhere beside the slides


def slides(course: Path, folder: Path, names=()) -> list[Path]:
    """Write the slides of the named notebooks (all when none is named) into `folder`, and reveal.js beside them.

    Raises `RuntimeError` where reveal.js or the converter of formulas is not installed, `ValueError` for an unknown
    name, and for a notebook that was not built from the source that learners have.
    """
    reveal, exporter = find_reveal(), make_exporter()
    worked = sorted((course / "notebooks" / "solutions").glob("*.ipynb"))
    if not worked:
        raise FileNotFoundError(f"no worked notebooks in {course}: slides are made where the course is written")
    decks = {path.stem: deck(course, path.stem) for path in pick(worked, list(names))}
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(
        reveal / "dist", folder / REVEAL / "dist", dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.map")
    )
    shutil.copytree(reveal / "plugin" / "notes", folder / REVEAL / "plugin" / "notes", dirs_exist_ok=True)
    shutil.copyfile(reveal / "LICENSE", folder / REVEAL / "LICENSE")
    written = []
    for name, notebook in decks.items():
        html, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": name}})
        path = folder / f"{name}.slides.html"
        write_whole(path, html.encode())
        written.append(path)
    return written


def find_reveal() -> Path:
    """The folder of reveal.js, which a package brings. Raises `RuntimeError` when it is not installed."""
    for package in ("sphinx_revealjs", "latex2mathml"):
        if find_spec(package) is None:
            raise RuntimeError(
                f'Slides need {package}, which is not installed: pip install -c constraints.txt -e ".[workshop]".'
            )
    return Path(find_spec("sphinx_revealjs").origin).parent / "_static" / "revealjs"


def make_exporter():
    """nbconvert's slides with our template, and formulas as MathML, which browsers draw by themselves."""
    from latex2mathml.converter import convert
    from nbconvert import SlidesExporter
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
    from traitlets.config import Config

    class Renderer(IPythonRenderer):
        def block_math(self, body):
            return convert(body, display="block")

        def inline_math(self, body):
            return convert(body)

    settings = Config({"TagRemovePreprocessor": {"enabled": True, "remove_input_tags": {OUTPUTS}}})
    exporter = SlidesExporter(
        config=settings,
        extra_template_basedirs=[str(TEMPLATES)],
        template_name="kvcourse_slides",
        reveal_url_prefix=REVEAL,
        reveal_theme="white",
    )
    markdown = MarkdownWithMath(renderer=Renderer(escape=False, exclude_anchor_links=True))
    exporter.register_filter("markdown2html", markdown.render)
    return exporter


# --- from a notebook to slides --------------------------------------------------------------------------------------


def deck(course: Path, name: str) -> NotebookNode:
    """The notebook as nbconvert wants it: cells that say of themselves whether they begin a slide."""
    learner, worked = (read(path, as_version=4).cells for path in built_paths(course, name))
    if [cell.id for cell in learner] != [cell.id for cell in worked]:
        raise ValueError(f"{name}: the worked notebook has other cells than the learner's: run `kvcourse notebooks`")
    cells = list(paged(parts(learner, worked)))
    return nbformat.v4.new_notebook(cells=cells, metadata={"language_info": {"name": "python"}})


def paged(cells: Iterable[NotebookNode]) -> Iterator[NotebookNode]:
    """The cells, each of which says whether it begins a slide: at a heading, and where the last one has no room."""
    filled, room = False, 0
    for cell in cells:
        heading = re.match(r"(#+) ", cell.source) if cell.cell_type == "markdown" else None
        kind = "-"
        if heading and len(heading[1]) <= 2:
            kind = "slide"
        elif cell.metadata.get("notes"):
            kind = "notes"
        elif heading or lines_of(cell) > room:
            kind = "subslide" if filled else "-"
        room = LINES - lines_of(cell) if kind in ("slide", "subslide") else room - lines_of(cell)
        filled = True
        cell.metadata["slideshow"] = {"slide_type": kind}
        yield cell


def parts(learner: list[NotebookNode], worked: list[NotebookNode]) -> Iterator[NotebookNode]:
    """What the slides show, in order: text cut at its headings, hints as notes, code with its outputs."""
    in_section = False
    for mine, full in zip(learner, worked, strict=True):
        if mine.cell_type == "markdown":
            for text in re.split(r"(?m)^(?=##+ )", mine.source):
                in_section = in_section or text.startswith("## ")
                yield from text_parts(text)
        elif in_section and "kv.check." not in mine.source:
            outputs = full.outputs if mine.source == full.source else []  # else those of the solution or the guess
            yield from code_parts(mine.source, outputs)


def code_parts(code: str, outputs: list[NotebookNode]) -> Iterator[NotebookNode]:
    """A cell with code and outputs as one if a slide has room for it, else as two, and as one without code that only
    plots."""
    both = nbformat.v4.new_code_cell(code, outputs=outputs)
    apart = nbformat.v4.new_code_cell("", outputs=outputs, metadata={"tags": [OUTPUTS]})
    if outputs and only_plots(code):
        yield apart
    elif outputs and lines_of(both) > LINES:
        yield from (nbformat.v4.new_code_cell(code), apart)
    elif code.strip():
        yield both


def only_plots(code: str) -> bool:
    """Whether the code does nothing but call `kv.plots.show`, for which it may name a figure and a text."""
    try:
        return all(PLOTS.match(ast.unparse(statement)) for statement in ast.parse(code).body)
    except SyntaxError:  # a magic command
        return False


def text_parts(text: str) -> Iterator[NotebookNode]:
    shown = LOCAL_LINK.sub(r"\1", BADGES.sub("", HINTS.sub("", text))).strip()
    if shown:
        yield nbformat.v4.new_markdown_cell(shown)
    hints = "\n\n".join(re.sub(r"</?details>", "", hint) for hint in HINTS.findall(text))
    if hints:
        yield nbformat.v4.new_markdown_cell(hints, metadata={"notes": True})


def lines_of(cell: NotebookNode) -> int:
    """About how many lines of a slide a cell takes; a figure counts for the height that the template gives it."""
    if cell.metadata.get("notes"):
        return 0
    if cell.cell_type == "markdown":
        lines = [
            max(1, -(-len(line) // 110)) for line in re.sub(r"(?<=\S)\n(?=[^\W\d])", " ", cell.source).splitlines()
        ]
        return round(1.35 * sum(lines))
    return 1 + len(cell.source.splitlines()) + sum(map(output_lines, cell.outputs))


def output_lines(output: NotebookNode) -> int:
    if output.output_type == "stream":
        return len(output.text.splitlines())
    data = output.get("data", {})
    text = data.get("text/markdown") or data.get("text/plain", "")
    return 22 if "image/png" in data else -(-len(text) // 110)
