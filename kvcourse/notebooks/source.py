"""From one source in jupytext's py:percent format to the learner's notebook and the worked one.

What a source may hold beside plain cells:

- a cell tagged `setup` with the body `# SETUP`, the first code cell: filled in from one template; tagged `gpu` too, the
  notebook asks Colab for a GPU;
- cells tagged `exercise`: the lines from `# SOLUTION` to `# END SOLUTION` become a stub for the learner;
- `name = value  # PREDICT`: the learner writes the value;
- `{{colab_badge}}` in the first cell: the link that opens this very notebook on Colab.

Where a term of the glossary first occurs in the prose, the built notebooks link to it.
"""

import ast
import hashlib
import re
import textwrap
import tomllib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import jupytext
import nbformat
from nbformat import NotebookNode

from kvcourse.notebooks.links import link_terms
from kvcourse.notebooks.terms import Term, read_terms

STUB = 'raise NotImplementedError("your turn")'
BADGE = "{{colab_badge}}"
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
GPU = {"accelerator": "GPU", "colab": {"gpuType": "T4"}}  # Colab reads it; where there is none, the CPU does
SETUP = """\
import importlib.util
import sys

if "google.colab" in sys.modules and importlib.util.find_spec("kvcourse") is None:
    # Colab comes with a running kernel and a PyTorch for its GPU: pip may add packages, but change none of those.
    %pip list --format=freeze > colab.txt
    %pip install -q -c colab.txt "kvcourse @ git+{repository}"

import kvcourse as kv

assert kv.__version__.startswith("{series}."), (
    f"this notebook belongs to kvcourse {series}, but kvcourse {{kv.__version__}} is installed"
)
kv.announce_stand_in()  # only in a room without wifi"""


class Project(NamedTuple):
    """What the builder needs to know from `pyproject.toml`, and the words of `data/glossary.toml`."""

    repository: str
    version: str
    terms: tuple[Term, ...] = ()


class Notebooks(NamedTuple):
    """The two notebooks that one source gives, neither of them executed."""

    learner: NotebookNode
    solution: NotebookNode


def read_project(course: Path) -> Project:
    """The repository address and the version, each written down once, in `pyproject.toml`. Raises `ValueError`
    where they are not found there."""
    path, words = course / "pyproject.toml", course / "data" / "glossary.toml"
    terms = tuple(read_terms(words)) if words.is_file() else ()  # a course may have no glossary
    try:
        project = tomllib.loads(read_text(path))["project"]
        return Project(project["urls"]["Repository"], project["version"], terms)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    except (KeyError, TypeError):
        raise ValueError(f"{path} must have a [project] with a version, and [project.urls] with a Repository") from None


def read_text(path: Path) -> str:
    """A file's text. Raises `ValueError` naming the file when it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 (byte {error.start}): save it as UTF-8") from None


def read_cells(source: Path) -> list[NotebookNode]:
    """The cells of a source as they stand there, each with an id that stays when other cells come and go.

    The id is a hash of notebook name, kind and text; only a text that occurs twice is told apart by a count.
    """
    seen = Counter()
    cells = jupytext.reads(read_text(source), fmt="py:percent").cells
    for cell in cells:
        cell.metadata.pop("lines_to_next_cell", None)
        key = (source.stem, cell.cell_type, cell.source)
        cell.id = hashlib.sha256("\0".join([*key, str(seen[key])]).encode()).hexdigest()[:12]
        seen[key] += 1
    return cells


def read_notebooks(source: Path, project: Project) -> Notebooks:
    """Both notebooks of a source. Raises `ValueError` naming notebook and cell where the source is wrong."""
    cells = read_cells(source)
    _require_setup(source.stem, cells)
    name = source.stem
    learner = [_learner_cell(name, i, cell) for i, cell in enumerate(cells, 1)]
    _refuse_leaks(name, cells, learner)
    return Notebooks(
        _notebook(learner, project, f"notebooks/{name}.ipynb"),
        _notebook(cells, project, f"notebooks/solutions/{name}.ipynb"),
    )


def where(name: str, number: int, cell: NotebookNode) -> str:
    """How every message points at a cell: notebook, number (from 1, text cells counted), first line."""
    first = next((line.strip() for line in cell.source.splitlines() if line.strip()), "empty")
    return f"{name}, cell {number} ({textwrap.shorten(first, 60, placeholder=' ...')})"


def tags(cell: NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


def solution_blocks(text: str) -> list[list[str]]:
    """The lines between each `# SOLUTION` and `# END SOLUTION`. Raises `ValueError` when they do not pair up."""
    blocks, block = [], None
    for line in text.splitlines():
        mark = line.strip()
        if mark == "# SOLUTION":
            if block is not None:
                raise ValueError("has a second # SOLUTION before # END SOLUTION")
            block = []
        elif mark == "# END SOLUTION":
            if block is None:
                raise ValueError("has # END SOLUTION without # SOLUTION")
            blocks.append(block)
            block = None
        elif block is not None:
            block.append(line)
    if block is not None:
        raise ValueError("has # SOLUTION without # END SOLUTION")
    return blocks


def _require_setup(name: str, cells: list[NotebookNode]) -> None:
    marked = [cell for cell in cells if "setup" in tags(cell) or cell.source.strip() == "# SETUP"]
    code = [cell for cell in cells if cell.cell_type == "code"]
    if len(marked) != 1 or marked[0] is not code[0]:
        raise ValueError(f"{name}: the first code cell, and no other, must be the set-up cell, tagged 'setup'")
    if marked[0].source.strip() != "# SETUP" or "setup" not in tags(marked[0]):
        raise ValueError(f"{name}: the set-up cell must be tagged 'setup' and hold only the line # SETUP")


def _learner_cell(name: str, number: int, cell: NotebookNode) -> NotebookNode:
    """The learner's version of a cell: stub for solution, a blank for each guess."""
    if cell.cell_type != "code":
        return cell
    try:
        blocks = solution_blocks(cell.source)
        if bool(blocks) != ("exercise" in tags(cell)):
            raise ValueError(
                "is tagged 'exercise' but has no # SOLUTION" if not blocks else "has a # SOLUTION but no tag 'exercise'"
            )
        if any(not "".join(block).strip() for block in blocks):
            raise ValueError("has an empty # SOLUTION")
        text = _without_guesses(_without_solutions(cell.source))
    except ValueError as error:
        raise ValueError(f"{where(name, number, cell)} {error}") from None
    return NotebookNode({**cell, "source": text})


def _without_solutions(text: str) -> str:
    lines, inside = [], False
    for line in text.splitlines():
        mark = line.strip()
        if mark == "# SOLUTION":
            lines.append(line.replace(mark, STUB))
        if mark in ("# SOLUTION", "# END SOLUTION"):
            inside = mark == "# SOLUTION"
        elif not inside:
            lines.append(line)
    return "\n".join(lines)


def _without_guesses(text: str) -> str:
    return "\n".join(_blank_guess(line) for line in text.splitlines())


def _blank_guess(line: str) -> str:
    if not re.search(r"#\s*PREDICT\b", line):
        return line
    try:
        [statement] = ast.parse(line.strip()).body
        [target] = statement.targets
        guess = target.id
    except (SyntaxError, ValueError, AttributeError):
        raise ValueError(f"marks a line that is not `name = value  # PREDICT`: {line.strip()}") from None
    indent = line[: len(line) - len(line.lstrip())]
    return f"{indent}{guess} = None  # write your guess here"


def _refuse_leaks(name: str, cells: list[NotebookNode], learner: list[NotebookNode]) -> None:
    """A solution must not stand a second time where the learner sees it: whole in any cell, nor a telling
    line of it in its own cell."""
    shown = [(number, cell, _squeeze(cell.source)) for number, cell in enumerate(learner, 1)]
    for cell, (own_number, own, own_text) in zip(cells, shown, strict=True):
        for block in solution_blocks(cell.source) if cell.cell_type == "code" else []:
            whole = _squeeze("\n".join(block))
            for number, other, text in shown:
                if len(whole) >= 20 and whole in text:
                    raise ValueError(f"{where(name, number, other)} gives away a solution: {whole}")
            for line in map(_squeeze, block):
                if len(line) >= 20 and line in own_text:
                    raise ValueError(f"{where(name, own_number, own)} gives away a solution: {line}")


def _squeeze(text: str) -> str:
    return " ".join(text.split())


def _notebook(cells: list[NotebookNode], project: Project, path: str) -> NotebookNode:
    filled = [_fill(cell, project, path) for cell in cells]
    glossary = "../glossary.ipynb" if "/solutions/" in path else "glossary.ipynb"
    filled = link_terms(filled, project.terms, Path(path).stem[:2], glossary)
    metadata = metadata_for(cells)
    notebook = nbformat.from_dict({"cells": filled, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5})
    nbformat.validate(notebook)
    return notebook


def metadata_for(cells: list[NotebookNode]) -> dict:
    """The metadata of a notebook of these cells, the same for all but the wish for a GPU."""
    return METADATA | GPU if any("gpu" in tags(cell) for cell in cells) else METADATA


def _fill(cell: NotebookNode, project: Project, path: str) -> NotebookNode:
    cell = NotebookNode({**cell})
    if "setup" in tags(cell):
        series = ".".join(project.version.split(".")[:2])
        cell.source = SETUP.format(repository=project.repository, series=series)
    elif cell.cell_type == "markdown":
        cell.source = cell.source.replace(BADGE, colab_badge(project.repository, path))
    return cell


def colab_badge(repository: str, path: str) -> str:
    """Markdown of the badge that opens the notebook at `path` (from the top of the repository) on Colab."""
    github = "https://github.com/"
    if not repository.startswith(github):
        raise ValueError(f"Colab opens notebooks from {github}, but pyproject.toml says Repository = {repository!r}")
    page = f"https://colab.research.google.com/github/{repository.removeprefix(github)}/blob/main/{path}"
    return f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({page})"
