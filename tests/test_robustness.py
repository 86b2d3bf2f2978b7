"""Every notebook where all is against it: run twice in one kernel, first in a course folder that nobody may write to,
then in an empty folder elsewhere, with no network, no GPU and no chat model, its exercises solved or not.

Plain `pytest` runs a few; `pytest -m slow` all.
"""

import json
import re
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell
from refusals import close, ordinary_python, python_path, without_network

from kvcourse.notebooks.execute import execute, scratch_results
from kvcourse.notebooks.source import read_notebooks, read_project

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "notebooks" / "src").glob("*.py"))
COPIED = ("kvcourse", "data", "notebooks", "pyproject.toml")
QUICK = [("00_start_here", "learner"), ("06_paged_attention", "worked")]  # tools, a stream; the engine
ALL = [(source, kind) for source in SOURCES for kind in ("learner", "worked")]
SLOW = [[] if (source.stem, kind) in QUICK else pytest.mark.slow for source, kind in ALL]
MATRIX = [
    pytest.param(*each, marks=marks, id=f"{each[0].stem}-{each[1]}") for each, marks in zip(ALL, SLOW, strict=True)
]


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A copy of the course that nobody may write to."""
    folder = tmp_path_factory.mktemp("closed") / "course"
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        else:
            shutil.copy(ROOT / name, folder / name)
    close(folder)
    yield folder
    close(folder, writable=True)


@pytest.fixture
def hard_place(course, tmp_path, monkeypatch):
    """(environment, elsewhere, log of attempts to use the network) for kernels that `execute` starts in this test."""
    monkeypatch.setattr(sys, "executable", ordinary_python(tmp_path))
    guard, log = without_network(tmp_path)
    (tmp_path / "models").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o555)
    with scratch_results() as env:
        env |= guard | {"KVCOURSE_OFFLINE": "1", "KVCOURSE_MODELS": str(tmp_path / "models")}
        yield env | {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": python_path(tmp_path, course)}, elsewhere, log


def twice(notebook, elsewhere: Path):
    """The code of a notebook, and once more in the folder `elsewhere`."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    move = f"import os; os.chdir({str(elsewhere)!r})"
    return nbformat.v4.new_notebook(cells=[new_code_cell(each) for each in (*code, move, *code)])


@pytest.mark.parametrize("source, kind", MATRIX)
def test_a_notebook_runs_where_all_is_against_it(source, kind, course, hard_place):
    env, elsewhere, log = hard_place
    learner, worked = read_notebooks(source, read_project(ROOT))
    notebook, folder = (worked, "notebooks/solutions") if kind == "worked" else (learner, "notebooks")
    done = execute(twice(notebook, elsewhere), course / folder, f"{source.stem}, {kind}", env, timeout=900)
    assert done.error is None
    assert not log.exists(), log.read_text()
    store = json.loads((Path(env["KVCOURSE_RESULTS"]) / "results.json").read_text())
    assert set(store["exercises"].values()) == {"right" if kind == "worked" else "not attempted"}
    assert all(entry["device"].startswith("CPU") for entry in store["entries"].values() if entry["measured"])


WRONG = {
    "writes beside itself": ("open('kept.txt', 'w')", "cell 1.*Permission denied"),
    "reads beside itself": ("open('../pyproject.toml')", "cell 3.*No such file"),
    "is for one time only": ("assert 'x' not in globals(); x = 1", "cell 3.*AssertionError"),
    "uses the network": ("import urllib.request as u; u.urlopen('http://192.0.2.1', timeout=1)", "cell 1.*no network"),
}


@pytest.mark.parametrize("code, said", WRONG.values(), ids=WRONG)
def test_a_notebook_is_refused_that(code, said, course, hard_place):
    env, elsewhere, log = hard_place
    notebook = nbformat.v4.new_notebook(cells=[new_code_cell(code)])
    done = execute(twice(notebook, elsewhere), course / "notebooks", "made up", env, timeout=60)
    assert done.error is not None
    assert re.search(said, done.error), done.error
    assert log.exists() == ("network" in said)
