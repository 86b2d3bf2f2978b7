"""All exercises of the course together: none lacks anything, and how many there are.

`python tests/test_exercises.py` prints the figures of `counts()`.
"""

import ast
import functools
import importlib
import inspect
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

import kvcourse as kv
from kvcourse.check.catalog import CATALOG, exercises
from kvcourse.notebooks.exercises import read_exercises
from kvcourse.notebooks.source import read_cells, solution_blocks, tags

TESTS = Path(__file__).resolve().parent
SOURCES = sorted((TESTS.parent / "notebooks" / "src").glob("*.py"))
NAMES = [name for part in CATALOG.values() for name in part]


class Counts(NamedTuple):
    """`right_ways` are those besides the notebooks' own answers."""

    exercises: int
    minutes: int
    right_ways: int
    wrong_answers: int


@functools.cache
def tables() -> dict:
    """The test file of each notebook, which holds its tables of right and wrong answers."""
    found = [importlib.import_module(path.stem) for path in sorted(TESTS.glob("test_exercises_*.py"))]
    return {module.NOTEBOOK: module for module in found}


@functools.cache
def texts() -> dict:
    return {text.name: text for source in SOURCES for text in read_exercises(source.stem)}


def table(kind: str) -> dict[str, list]:
    """The RIGHT or the MISTAKES of all notebooks."""
    return {name: rows for module in tables().values() for name, rows in getattr(module, kind).items()}


@functools.cache
def notebook_answers() -> set[str]:
    """The bodies of all worked answers, without what does not count: comments, spaces, names of parts."""
    cells = [cell for source in SOURCES for cell in read_cells(source) if "exercise" in tags(cell)]
    return {body(textwrap.dedent("\n".join(block))) for cell in cells for block in solution_blocks(cell.source)}


def body(code: str) -> str:
    """The statements of a function without its head and docstring, or those of a piece of code; names are numbered, so
    that other names for the same thing make no other way."""
    tree = ast.parse(textwrap.dedent(code))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    statements = functions[-1].body if functions else tree.body
    numbers = {}
    for node in ast.walk(ast.Module(statements, [])):
        if isinstance(node, ast.Name):
            node.id = f"name{numbers.setdefault(node.id, len(numbers))}"
    return "\n".join(map(ast.unparse, statements))


def other_ways(name: str) -> list[str]:
    """The right ways of the table that are not the notebook's own, each once."""
    return sorted({body(code) for code in table("RIGHT")[name]} - notebook_answers())


def counts() -> Counts:
    minutes = sum(effort.minutes for part in CATALOG.values() for effort in part.values())
    ways = sum(len(other_ways(name)) for name in NAMES)
    return Counts(len(NAMES), minutes, ways, sum(map(len, table("MISTAKES").values())))


def test_there_are_enough_exercises_and_wrong_answers():
    assert counts().exercises == len(set(NAMES)) >= 40
    assert counts().wrong_answers >= 120


def test_the_catalog_is_what_the_notebooks_say():
    assert list(CATALOG) == [source.stem for source in SOURCES]
    for source in SOURCES:
        printed = {text.name: (text.difficulty, text.minutes) for text in read_exercises(source.stem)}
        assert list(printed.items()) == list(CATALOG[source.stem].items())


def test_every_notebook_has_a_table_and_every_exercise_a_checker():
    assert list(tables()) and set(tables()) == set(CATALOG)
    assert set(NAMES) == set(dir(kv.check)) - {"progress", "reset"}


@pytest.mark.parametrize("name", NAMES)
def test_an_exercise_lacks_nothing(name):
    text = texts()[name]
    assert text.difficulty in (1, 2, 3) and 1 <= text.minutes <= 30
    assert len(text.statement) > 60 and len(text.why) > 30
    assert len(text.hints) >= 2 and all(len(hint) > 10 for hint in text.hints)
    assert len(table("MISTAKES")[name]) >= 3
    assert len(other_ways(name)) >= 2


@pytest.mark.parametrize("name", NAMES)
def test_no_wrong_answer_stands_twice(name):
    changes = [str(change) for change, _ in table("MISTAKES")[name]]
    assert len(set(changes)) == len(changes)


def test_what_is_another_way_and_what_is_not():
    one = "def f(x):\n    y = x + 1  # so\n    return y"
    assert body(one) == body("def g(a):\n    b = a + 1\n    return b") != body("def f(x):\n    return x + 1")


def test_part_of_the_catalog_is_found_by_number_or_name():
    assert list(exercises("02")) == list(exercises("02_kv_cache")) == ["02_kv_cache"] and exercises() == CATALOG
    for wrong in ("99", "0", 2, None):
        with pytest.raises(ValueError, match='must be a number such as "02", or one of: 00_start_here, '):
            exercises(wrong)


def test_a_text_that_lacks_its_heading_is_refused(tmp_path):
    source = tmp_path / "03_x.py"
    good = (
        "# %% [markdown]\n# ### Exercise: twice\n#\n# ●○○ · 2 minutes\n#\n# Double it.\n#\n# Why it matters: so.\n#\n"
        "# <details><summary>Hint 1</summary>Add\n# it.</details>\n\n"
        '# %% tags=["exercise"]\ndef twice(x):\n    return 2 * x\n'
    )
    source.write_text(good, encoding="utf-8")
    assert read_exercises(source) == [("twice", 1, 2, "Double it.", "so.", ("Add\nit.",))]
    for old, new in (("Exercise: twice", "Exercise: once"), ("●○○ · 2 minutes", "2 minutes"), ("### Exercise", "##")):
        source.write_text(good.replace(old, new), encoding="utf-8")
        with pytest.raises(ValueError, match=r"03_x: before 'def twice\(x\):' there must be `### Exercise: twice`"):
            read_exercises(source)


def test_checkers_say_what_is_asked_for():
    for name in NAMES:
        checker = getattr(kv.check, name)
        assert inspect.getdoc(checker).replace("`", "").startswith(f"{name}("), name


if __name__ == "__main__":
    print(counts())
