"""An exercise straight from the notebook source, its text and its function, so that tests check what is taught."""

import ast
import re
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from nbformat import NotebookNode

from kvcourse.notebooks.source import _without_solutions, read_cells, tags
from kvcourse.paths import course_folder

DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
HEADER = re.compile(r"### Exercise: (\w+)\n\n([●○]{3}) · (?:optional, )?(\d+) minutes\n\n(.*)\Z", re.DOTALL)
HINT = re.compile(r"<details><summary>Hint \d</summary>(.*?)</details>", re.DOTALL)


class ExerciseText(NamedTuple):
    """What a learner reads before an exercise. `difficulty` is 1 to 3."""

    name: str
    difficulty: int
    minutes: int
    statement: str
    why: str
    hints: tuple[str, ...]


def read_exercises(notebook: str | Path) -> list[ExerciseText]:
    """The texts of a notebook's exercises, in its order: `read_exercises("02_kv_cache")`.

    Raises `ValueError` where an exercise is not headed by its name, the one of the function below, and its difficulty
    and minutes.
    """
    path = _source_path(notebook)
    cells = read_cells(path)
    return [_exercise_text(path.stem, *pair) for pair in pairwise(cells) if "exercise" in tags(pair[1])]


def _exercise_text(notebook: str, text: NotebookNode, code: NotebookNode) -> ExerciseText:
    found = HEADER.search(text.source)
    if not found or found[1] not in _defined(code.source):
        wanted = f"`### Exercise: {' or '.join(_defined(code.source))}` and a line such as `●●○ · 6 minutes`"
        raise ValueError(f"{notebook}: before {code.source.splitlines()[0]!r} there must be {wanted}")
    name, circles, minutes, body = found.groups()
    statement, _, rest = body.partition("Why it matters")
    why = rest.partition("<details>")[0]
    hints = tuple(hint.strip() for hint in HINT.findall(body))
    return ExerciseText(name, circles.count("●"), int(minutes), statement.strip(" *\n"), why.strip(" *:\n"), hints)


def solution(notebook: str | Path, function: str) -> Callable:
    """The worked function (or class) of an exercise: `solution("02_kv_cache", "append")`.

    Everything that the notebook imports, and every function and class it defines before the exercise, is
    there for it; the rest of the notebook is not run, nor is a call such as `kv.check...` beside the
    function. Raises `ValueError` when there is no such exercise.
    """
    return _define(notebook, function, lambda text: text)


def stub(notebook: str | Path, function: str) -> Callable:
    """The same function as the learner finds it, which raises `NotImplementedError`."""
    return _define(notebook, function, _without_solutions)


def _define(notebook: str | Path, function: str, change: Callable[[str], str]) -> Callable:
    path = _source_path(notebook)
    code = [cell for cell in read_cells(path) if cell.cell_type == "code"]
    names = [_defined(cell.source) if "exercise" in tags(cell) else [] for cell in code]
    if not any(function in defined for defined in names):
        known = ", ".join(name for defined in names for name in defined) or "none"
        raise ValueError(f"{path.stem} has no exercise {function!r}; its exercises are: {known}")
    place = next(i for i, defined in enumerate(names) if function in defined)

    namespace = {"__name__": path.stem}
    exec("import kvcourse as kv", namespace)
    for cell in code[:place]:
        for node in _parse(cell.source).body:
            if isinstance(node, DEFINITIONS):
                with suppress(NameError):  # a default or decorator that needs a variable of the notebook
                    _run([node], path, namespace)
    exercise = _parse(change(code[place].source)).body
    _run([node for node in exercise if not isinstance(node, ast.Expr)], path, namespace)
    return namespace[function]


def _source_path(notebook: str | Path) -> Path:
    path = Path(notebook)
    if path.suffix != ".py":
        path = course_folder() / "notebooks" / "src" / f"{notebook}.py"
    if not path.is_file():
        raise ValueError(f"there is no notebook source {path}")
    return path


def _defined(text: str) -> list[str]:
    return [node.name for node in _parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]


def _parse(text: str) -> ast.Module:
    """The cell as Python, with `pass` for the lines that only a notebook understands (`%pip`)."""
    return ast.parse(re.sub(r"(?m)^(\s*)%.*$", r"\1pass", text))


def _run(nodes: list[ast.stmt], path: Path, namespace: dict) -> None:
    exec(compile(ast.Module(nodes, type_ignores=[]), f"<{path.stem}>", "exec"), namespace)
