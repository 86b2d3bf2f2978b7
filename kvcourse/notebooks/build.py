"""Write the two notebooks of each source, and tell when they are no longer what the source gives."""

from pathlib import Path

import nbformat
from nbformat import NotebookNode

from kvcourse.model_folder import write_whole
from kvcourse.notebooks.execute import execute, scratch_results
from kvcourse.notebooks.pages import PAGES, read_pages
from kvcourse.notebooks.source import METADATA, Notebooks, metadata_for, read_notebooks, read_project, tags, where
from kvcourse.notebooks.verdicts import printed_verdicts, put

WIDGET = "application/vnd.jupyter.widget-view+json"
IGNORE = "nbval-ignore-output"


def source_paths(course: Path) -> list[Path]:
    return sorted((course / "notebooks" / "src").glob("*.py"))


def built_paths(course: Path, name: str) -> Notebooks:
    """Where the learner's and the worked notebook of this name lie."""
    folder = course / "notebooks"
    return Notebooks(folder / f"{name}.ipynb", folder / "solutions" / f"{name}.ipynb")


def lesson_paths(folder: Path) -> list[Path]:
    """The notebooks in a folder that have something to run: all but glossary and bibliography."""
    return sorted(path for path in folder.glob("*.ipynb") if path.stem not in PAGES)


def pick(paths: list[Path], names: list[str]) -> list[Path]:
    """The files meant by `names`: whole names or numbers ("02_kv_cache", "02"); all files when none is given."""
    if not names:
        return paths
    chosen = []
    for name in names:
        stem = Path(name).stem
        found = [path for path in paths if stem in (path.stem, path.stem.split("_")[0])]
        if not found:
            known = ", ".join(path.stem for path in paths) or "none"
            raise ValueError(f"there is no notebook {name!r}; the notebooks are: {known}")
        chosen += [path for path in found if path not in chosen]
    return chosen


def build(course: Path, names=(), run: bool = True, force: bool = False) -> list[Path]:
    """Build the named notebooks (all when none is named) and return the files written.

    A learner's notebook that somebody has run holds their work: it is not replaced unless `force`. A notebook's files
    are replaced only after its solution ran to the end; a failing cell raises `RuntimeError`. With `run=False` the
    solutions are left without outputs, which `drift` reports. Glossary and bibliography are written where they are not
    up to date, whichever notebooks are named.
    """
    project, pages = read_project(course), stale_pages(course)
    every = [(path, read_notebooks(path, project)) for path in pick(source_paths(course), list(names))]
    worked_in = [path.stem for path, _ in every if has_been_run(built_paths(course, path.stem).learner)]
    if worked_in and not force:
        raise ValueError(
            f"somebody has worked in {', '.join(worked_in)}, and building would discard that: "
            "copy what you want to keep, then give --force"
        )
    written = []
    others = [path.stem for path in source_paths(course) if path.stem not in {path.stem for path, _ in every}]
    with scratch_results() as env:
        put(printed_verdicts([built_paths(course, name).solution for name in others]), env)
        for path, (learner, solution) in every:
            targets = built_paths(course, path.stem)
            if run:
                targets.solution.parent.mkdir(parents=True, exist_ok=True)
                done = execute(solution, targets.solution.parent, path.stem, env)
                if done.error:
                    raise RuntimeError(f"{done.error} (nothing was written for this notebook)")
                clean_outputs(path.stem, solution)
            written += [write(learner, targets.learner), write(solution, targets.solution)]
    return written + [write(page, path) for path, page, _ in pages]


def stale_pages(course: Path) -> list[tuple[Path, NotebookNode, str]]:
    """Glossary and bibliography where they are not what the course's files give, and how they differ."""
    pages = {course / "notebooks" / f"{name}.ipynb": page for name, page in read_pages(course, METADATA).items()}
    return [(path, page, found) for path, page in pages.items() if (found := _difference(path, page, executed=False))]


def has_been_run(path: Path) -> bool:
    """Whether any cell of the notebook at `path` was executed; False when there is no such file."""
    cells = read(path).cells if path.is_file() else []
    return any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


def clean_outputs(name: str, notebook: NotebookNode) -> None:
    """Take out what must not be stored: stderr, widget views, and metadata that the kernel added.

    nbval compares every output of a cell, so such a cell has to be tagged `nbval-ignore-output`;
    raises `ValueError` where it is not.
    """
    notebook.metadata = nbformat.from_dict(metadata_for(notebook.cells))
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type != "code":
            continue
        kept = [out for out in cell.outputs if out.get("name") != "stderr" and WIDGET not in out.get("data", {})]
        if len(kept) < len(cell.outputs) and IGNORE not in tags(cell):
            raise ValueError(
                f"{where(name, number, cell)} shows a widget or writes to stderr, which cannot be stored "
                f"and compared: add the tag {IGNORE!r}, or keep the cell quiet"
            )
        cell.outputs = kept


def write(notebook: NotebookNode, path: Path) -> Path:
    """Replace `path` in one step, so that nobody ever sees half a notebook."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (nbformat.writes(notebook, indent=1) + "\n").encode())
    return path


def read(path: Path, as_version=nbformat.NO_CONVERT) -> NotebookNode:
    """The notebook in a file. Raises `ValueError` naming the file when it holds something else."""
    try:
        notebook = nbformat.read(path, as_version)
        nbformat.validate(notebook)
    except (ValueError, TypeError, KeyError, AttributeError, nbformat.ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{path} is not a valid notebook ({reason}): build it again with `kvcourse notebooks`"
        ) from None
    return notebook


def drift(course: Path, names=()) -> list[str]:
    """One sentence for each built file that is not what its source gives. Outputs are not compared."""
    project = read_project(course)
    paths = pick(source_paths(course), list(names))
    found = []
    for path in paths:
        targets = built_paths(course, path.stem)
        for target, expected in zip(targets, read_notebooks(path, project), strict=True):
            difference = _difference(target, expected, executed=target == targets.solution)
            if difference:
                found.append(f"{target.relative_to(course)}: {difference}")
    pages = [f"{path.relative_to(course)}: {difference}" for path, _, difference in stale_pages(course)]
    return found if names else found + pages + _orphans(course, paths)


def _difference(target: Path, expected: NotebookNode, executed: bool) -> str | None:
    if not target.is_file():
        return "is missing"
    try:
        built = read(target)
    except ValueError as error:
        return str(error).removeprefix(f"{target} ")
    for number, (cell, wanted) in enumerate(zip(built.cells, expected.cells, strict=False), 1):
        for field in ("cell_type", "source", "metadata", "id"):
            if cell.get(field) != wanted.get(field):
                return f"the {field} differs at {where(target.stem, number, wanted)}"
        if executed and cell.cell_type == "code" and cell.source.strip() and cell.execution_count is None:
            return f"was built without running it: {where(target.stem, number, wanted)} has no outputs"
    if len(built.cells) != len(expected.cells):
        return f"has {len(built.cells)} cells, but the source gives {len(expected.cells)}"
    rest = ("metadata", "nbformat", "nbformat_minor")
    changed = [field for field in rest if built.get(field) != expected.get(field)]
    return f"the notebook's {changed[0]} differs" if changed else None


def _orphans(course: Path, sources: list[Path]) -> list[str]:
    known = {path.stem for path in sources}
    folder = course / "notebooks"
    built = sorted([*lesson_paths(folder), *folder.glob("solutions/*.ipynb")])
    return [f"{path.relative_to(course)}: has no source in notebooks/src" for path in built if path.stem not in known]
