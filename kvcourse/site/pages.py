"""Which pages the site has, and their texts as Sphinx is to read them."""

import shutil
from pathlib import Path
from typing import NamedTuple

import nbformat
from nbformat import NotebookNode

from kvcourse.notebooks.build import has_been_run, pick, read
from kvcourse.notebooks.source import read_project, read_text, solution_blocks, tags, where

FIGURE = "image/png"
LESSONS = "Lessons"
KIT = "For instructors"
NO_SEARCH = "---\nnosearch: true\n---\n\n"  # Sphinx: learners search for the lesson, not for how it is taught
WORDS = {"glossary": "notebooks/glossary.ipynb", "bibliography": "notebooks/bibliography.ipynb"}
PACKAGE = {"package": "kvcourse/README.md", "data": "data/README.md"}


class Page(NamedTuple):
    """A page: its address without `.html`, the course's file that it shows, and where the navigation lists it."""

    name: str
    source: str
    section: str


class Site(NamedTuple):
    """All that a page may need to know of the others; `repository` is the address of the course's own files."""

    course: Path
    repository: str
    pages: list[Page]


def find_site(course: Path, names=()) -> Site:
    """The site of a course, with the named lessons (all when none is named) and whatever other pages there are.

    Raises `ValueError` for an unknown name and for a worked notebook that holds no outputs.
    """
    solutions = sorted((course / "notebooks" / "solutions").glob("*.ipynb"))
    lessons = pick(solutions, list(names))
    empty = [path.stem for path in lessons if not has_been_run(path)]
    if empty or not lessons:
        raise ValueError(f"No outputs to show of {', '.join(empty) or 'any notebook'}: run `kvcourse notebooks` first.")
    shown = {f"notebooks/{path.stem}": f"notebooks/solutions/{path.name}" for path in lessons}
    sections = {LESSONS: shown, "Words and sources": WORDS, KIT: _kit(course), "The package": PACKAGE}
    pages = [Page(*page, section) for section, files in sections.items() for page in files.items()]
    there = [page for page in pages if (course / page.source).is_file()]
    return Site(course, read_project(course).repository, [Page("index", "README.md", ""), *there])


def _kit(course: Path) -> dict[str, str]:
    """The pages of the instructor's kit and their files, its README first."""
    names = sorted(path.stem for path in (course / "notebooks" / "instructor").glob("*.md"))
    names.sort(key=lambda name: name != "README")
    return {f"instructor/{name}".replace("README", "index"): f"notebooks/instructor/{name}.md" for name in names}


def write_sources(site: Site, folder: Path) -> None:
    """Write what Sphinx reads: each page's text under the page's own name."""
    for page in site.pages:
        source = site.course / page.source
        target = folder / f"{page.name}{source.suffix}"
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".ipynb":
            nbformat.write(_notebook(site, page, read(source, 4)), target)
        elif page.name == "index":
            target.write_text(f"{read_text(source)}\n{_contents(site)}", encoding="utf-8")
        elif page.section == KIT:
            target.write_text(f"{NO_SEARCH}{read_text(source)}", encoding="utf-8")
        else:
            shutil.copyfile(source, target)


def _contents(site: Site) -> str:
    """The navigation, as Sphinx wants it: a table of contents for each section."""
    sections = dict.fromkeys(page.section for page in site.pages if page.section)
    tables = []
    for section in sections:
        names = [page.name for page in site.pages if page.section == section]
        tables.append("\n".join([f"```{{toctree}}\n:hidden:\n:caption: {section}\n", *names, "```"]))
    return "\n\n".join(tables) + "\n"


def _notebook(site: Site, page: Page, notebook: NotebookNode) -> NotebookNode:
    """The notebook with its figures described and, in a lesson, solutions folded and the way to the learner's one."""
    for number, cell in enumerate(notebook.cells, 1):
        figures = [output for output in cell.get("outputs", []) if FIGURE in output.get("data", {})]
        texts = {figure.metadata.get(FIGURE, {}).get("alt", "") for figure in figures}
        if len(texts) > 1:
            raise ValueError(
                f"{where(page.name, number, cell)} shows figures with different alt texts: keep one a cell"
            )
        if texts:  # MyST-NB reads it from the cell
            cell.metadata["mystnb"] = {"image": {"alt": texts.pop()}}
        if cell.cell_type == "code" and solution_blocks(cell.source):
            cell.metadata["tags"] = [*tags(cell), "hide-input"]
    if page.section == LESSONS:
        learner = f"{site.repository}/blob/main/{page.name}.ipynb"
        first = notebook.cells[0]
        first.source = first.source.replace(f"/{page.source})", f"/{page.name}.ipynb)")  # the badge: open to work in
        first.source += (
            "\n\nThis is the worked notebook, with the outputs of one run; solutions are folded. "
            f"In the [learner's notebook]({learner}) guesses and exercises are left to you."
        )
    return notebook
