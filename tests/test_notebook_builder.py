"""The notebook builder, on small sources of its own: every transformation, every refusal, and --check going red."""

import json
import os
import shutil
import subprocess
import sys
from types import ModuleType

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

import kvcourse as kv
from kvcourse.notebooks import solution, stub
from kvcourse.notebooks.build import build, built_paths, clean_outputs, drift, pick
from kvcourse.notebooks.execute import execute, scratch_results
from kvcourse.notebooks.source import read_notebooks, read_project

NAME = "07_tiny"
SOURCE = '''\
# %% [markdown]
# # A tiny notebook
# {{colab_badge}}

# %% tags=["setup"]
# SETUP

# %%
import math

def half(x):
    return x / 2

print("half of six:", half(6))

# %%
my_guess = 20  # PREDICT

# %% tags=["exercise"]
def root(x):
    """The square root, and 0 below 0."""
    # SOLUTION
    positive = max(x, half(0))
    return math.sqrt(positive)
    # END SOLUTION
root(4)

# %% tags=["nbval-ignore-output"]
import sys
from tqdm.auto import tqdm
print("noise", file=sys.stderr)
for i in tqdm(range(2)):
    print(i)
'''
PYPROJECT = '[project]\nversion = "0.1.0"\n[project.urls]\nRepository = "https://github.com/owner/repo"\n'


@pytest.fixture
def course(tmp_path):
    (tmp_path / "notebooks" / "src").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    write(tmp_path, SOURCE)
    return tmp_path


def write(course, text, name=NAME):
    path = course / "notebooks" / "src" / f"{name}.py"
    path.write_text(text)
    return path


def read(course, text=SOURCE):
    return read_notebooks(write(course, text), read_project(course))


def code(notebook):
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def ids(notebook):
    return [cell.id for cell in notebook.cells]


# --- transformations ---------------------------------------------------------------------------------------


def test_learner_gets_a_stub_and_the_worked_notebook_the_solution(course):
    learner, worked = read(course)
    stub_cell = (
        'def root(x):\n    """The square root, and 0 below 0."""\n    raise NotImplementedError("your turn")\nroot(4)'
    )
    assert code(learner)[3] == stub_cell
    assert "return math.sqrt(positive)" in code(worked)[3]
    everything = "\n".join(cell.source for cell in learner.cells)
    assert not any(text in everything for text in ("SOLUTION", "positive", "sqrt", "PREDICT"))


def test_two_solutions_in_one_cell_give_two_stubs(course):
    method = "    def {}(self):\n        # SOLUTION\n        return {!r}\n        # END SOLUTION\n"
    two = '# %% tags=["exercise"]\nclass Pair:\n' + method.format("a", "left") + method.format("b", "right")
    learner, _ = read(course, SOURCE + "\n" + two)
    indented = " " * 8 + 'raise NotImplementedError("your turn")'
    assert code(learner)[-1].splitlines() == ["class Pair:", "    def a(self):", indented, "    def b(self):", indented]


@pytest.mark.parametrize(
    ("line", "blank"),
    [
        ("guess = 20  # PREDICT", "guess = None  # write your guess here"),
        ("guess = 2 ** 3 + f(1, 2) # PREDICT in ms", "guess = None  # write your guess here"),
        ('guess = "twice # as long"  # PREDICT', "guess = None  # write your guess here"),
        ("guess = 20", "guess = 20"),
    ],
)
def test_guesses_are_blank_for_the_learner(course, line, blank):
    learner, worked = read(course, SOURCE.replace("my_guess = 20  # PREDICT", line))
    assert code(learner)[2] == blank
    assert code(worked)[2] == line


def test_badge_opens_the_very_notebook(course):
    learner, worked = read(course)
    page = "https://colab.research.google.com/github/owner/repo/blob/main/notebooks/"
    assert learner.cells[0].source.endswith(f"({page}{NAME}.ipynb)")
    assert worked.cells[0].source.endswith(f"({page}solutions/{NAME}.ipynb)")
    (course / "pyproject.toml").write_text(PYPROJECT.replace("github.com", "example.org"))
    with pytest.raises(ValueError, match="Colab opens notebooks from https://github.com/"):
        read(course)


def test_tags_and_metadata(course):
    for notebook in read(course):
        assert [cell.metadata for cell in notebook.cells] == [
            {},
            {"tags": ["setup"]},
            {},
            {},
            {"tags": ["exercise"]},
            {"tags": ["nbval-ignore-output"]},
        ]
        assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
        assert notebook.metadata == {
            "kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"},
            "language_info": {"name": "python"},
        }


def test_a_notebook_tagged_gpu_asks_colab_for_one(course):
    for notebook in read(course, SOURCE.replace('tags=["setup"]', 'tags=["setup", "gpu"]')):
        assert notebook.metadata.accelerator == "GPU" and notebook.metadata.colab == {"gpuType": "T4"}
        assert notebook.metadata.kernelspec.name == "python3"
        clean_outputs(NAME, notebook)
        assert notebook.metadata.accelerator == "GPU"


def test_cell_ids_stay_when_another_cell_comes(course):
    learner, worked = read(course)
    assert ids(learner) == ids(worked)
    assert len(set(ids(learner))) == len(ids(learner))
    more = SOURCE.replace("# %%\nmy_guess", "# %%\nprint('new')\n\n# %%\nmy_guess")
    longer = ids(read(course, more).learner)
    assert longer[:3] + longer[4:] == ids(learner)
    changed = ids(read(course, SOURCE.replace("six:", "6:")).learner)
    assert [a == b for a, b in zip(changed, ids(learner), strict=True)] == [True, True, False, True, True, True]


def test_equal_cells_have_different_ids(course):
    learner, _ = read(course, SOURCE + "\n# %%\nprint(1)\n\n# %%\nprint(1)\n")
    assert len(set(ids(learner))) == len(ids(learner)) == 8


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    # END SOLUTION\n", "", r"07_tiny, cell 5 \(def root\(x\):\) has # SOLUTION without # END SOLUTION"),
        ("    # SOLUTION\n", "", "# END SOLUTION without # SOLUTION"),
        ("    # SOLUTION\n", "    # SOLUTION\n    # SOLUTION\n", "second # SOLUTION"),
        ('# %% tags=["exercise"]', "# %%", "has a # SOLUTION but no tag 'exercise'"),
        ("# %%\nimport math", '# %% tags=["exercise"]\nimport math', "tagged 'exercise' but has no # SOLUTION"),
        ("    positive = max(x, half(0))\n    return math.sqrt(positive)\n", "", "has an empty # SOLUTION"),
        ("my_guess = 20", "my_guess == 20", "is not `name = value"),
        ("my_guess = 20", "my_guess = (20,", "is not `name = value"),
        ("my_guess = 20", "a, b = 1, 2", "is not `name = value"),
        ("my_guess = 20", "my_guess[0] = 20", "is not `name = value"),
        ('# %% tags=["setup"]\n# SETUP\n', "", "first code cell, and no other, must be the set-up cell"),
        ('# %% tags=["setup"]', "# %%", "must be tagged 'setup'"),
        ("# SETUP", "import kvcourse", "hold only the line # SETUP"),
        ('# %% tags=["setup"]', '# %%\nprint(0)\n\n# %% tags=["setup"]', "first code cell"),
        ("my_guess = 20", "positive = max(3, 4)\nmy_guess = 20", None),
        ("root(4)", "print(math.sqrt(positive)); return math.sqrt(positive)", "gives away a solution"),
        (
            "# # A tiny notebook",
            "# Hint: `positive = max(x, half(0))\n# return math.sqrt(positive)`",
            r"07_tiny, cell 1 .* gives away a solution: positive = max",
        ),
    ],
)
def test_what_is_wrong_in_a_source_is_said(course, old, new, message):
    assert old in SOURCE
    text = SOURCE.replace(old, new, 1)
    if message is None:  # a partner: a change that is allowed
        read(course, text)
        return
    with pytest.raises(ValueError, match=message):
        read(course, text)


# --- set-up cell ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("on_colab", "installed"), [(False, True), (True, True), (True, False)])
def test_setup_installs_only_on_colab_and_only_when_needed(course, monkeypatch, capsys, on_colab, installed):
    asked = []

    class Shell:
        def run_line_magic(self, name, line, **_):
            asked.append((name, line))

    if on_colab:
        monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
    if not installed:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    cell = TransformerManager().transform_cell(code(read(course).learner)[0])
    exec(cell, {"get_ipython": Shell})
    wanted = [
        ("pip", "list --format=freeze > colab.txt"),
        ("pip", 'install -q -c colab.txt "kvcourse @ git+https://github.com/owner/repo"'),
    ]
    assert asked == (wanted if on_colab and not installed else [])
    assert capsys.readouterr().out == ""


def test_setup_refuses_another_series(course, monkeypatch):
    cell = TransformerManager().transform_cell(code(read(course).learner)[0])
    monkeypatch.setattr(kv, "__version__", "0.10.0")
    with pytest.raises(AssertionError, match="belongs to kvcourse 0.1, but kvcourse 0.10.0 is installed"):
        exec(cell, {})


# --- building, repeating, checking ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A course that has been built once; tests that change it take a copy."""
    course = tmp_path_factory.mktemp("built")
    (course / "notebooks" / "src").mkdir(parents=True)
    (course / "pyproject.toml").write_text(PYPROJECT)
    write(course, SOURCE)
    build(course)
    return course


@pytest.fixture
def copy(built, tmp_path):
    return shutil.copytree(built, tmp_path / "course")


def test_worked_notebook_has_clean_outputs(built):
    learner, worked = (nbformat.read(path, as_version=4) for path in built_paths(built, NAME))
    assert all(cell.outputs == [] and cell.execution_count is None for cell in learner.cells if "outputs" in cell)
    cells = [cell for cell in worked.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [1, 2, 3, 4, 5]
    assert cells[1].outputs == [{"name": "stdout", "output_type": "stream", "text": "half of six: 3.0\n"}]
    assert cells[3].outputs[0].data == {"text/plain": "2.0"}
    # neither the text on stderr nor tqdm's widget, only what was printed:
    assert cells[4].outputs == [{"name": "stdout", "output_type": "stream", "text": "0\n1\n"}]
    assert worked.metadata == learner.metadata
    assert not any("execution" in cell.metadata for cell in worked.cells)


def test_building_again_gives_the_same_bytes(copy):
    before = [path.read_bytes() for path in built_paths(copy, NAME)]
    assert build(copy) == list(built_paths(copy, NAME))
    assert [path.read_bytes() for path in built_paths(copy, NAME)] == before
    assert before[0].startswith(b'{\n "cells": [') and b"\r" not in before[0]


def test_check_is_green_and_ignores_outputs(copy):
    assert drift(copy) == []
    edit(copy, "solution", lambda notebook: notebook["cells"][2]["outputs"].clear())
    assert drift(copy) == []


def edit(course, kind, change):
    path = getattr(built_paths(course, NAME), kind)
    notebook = json.loads(path.read_text())
    change(notebook)
    path.write_text(json.dumps(notebook))


CHANGES = {
    "source": lambda notebook: notebook["cells"][2].update(source="print(1)"),
    "id": lambda notebook: notebook["cells"][2].update(id="another"),
    "metadata": lambda notebook: notebook["cells"][2]["metadata"].update(tags=["raises-exception"]),
    "has 5 cells": lambda notebook: notebook["cells"].pop(),
    "the notebook's metadata": lambda notebook: notebook["metadata"]["kernelspec"].update(name="py311"),
}


@pytest.mark.parametrize("kind", ["learner", "solution"])
@pytest.mark.parametrize("what", CHANGES)
def test_check_sees_an_edited_notebook(copy, kind, what):
    edit(copy, kind, CHANGES[what])
    [found] = drift(copy)
    file = built_paths(copy, NAME)._asdict()[kind].relative_to(copy)
    assert found.startswith(f"{file}: ") and what in found
    if what in ("source", "id", "metadata"):
        assert "07_tiny, cell 3 (import math)" in found


def test_check_sees_an_edited_source(copy):
    write(copy, SOURCE.replace("max(x, half(0))", "max(x, 0)"))
    assert len(drift(copy)) == 2  # the id of the exercise's cell tells, though its stub is the same
    write(copy, SOURCE.replace('tags=["nbval-ignore-output"]', 'tags=["nbval-ignore-output", "slow"]'))
    assert all("the metadata differs at 07_tiny, cell 6" in found for found in drift(copy))
    write(copy, SOURCE)
    assert drift(copy) == []


def test_check_sees_missing_damaged_unknown_and_unexecuted_files(copy):
    learner, worked = built_paths(copy, NAME)
    (copy / "notebooks" / "99_old.ipynb").write_text(learner.read_text())
    assert drift(copy) == ["notebooks/99_old.ipynb: has no source in notebooks/src".replace("/", os.sep, 1)]
    (copy / "notebooks" / "99_old.ipynb").unlink()
    learner.write_text('{"cells": [')
    assert "is not a valid notebook" in drift(copy)[0]
    learner.unlink()
    assert "is missing" in drift(copy)[0]
    build(copy, run=False)
    [found] = drift(copy)
    assert "was built without running it" in found and worked.name in found


def test_a_failing_cell_leaves_the_files_as_they_were(copy):
    before = sorted((path, path.read_bytes()) for path in copy.rglob("*.ipynb"))
    write(copy, SOURCE.replace("root(4)", "1 / 0"))
    with pytest.raises(RuntimeError, match=r"07_tiny, cell 5 \(def root\(x\):\): ZeroDivisionError: division by zero"):
        build(copy)
    assert sorted((path, path.read_bytes()) for path in copy.rglob("*.ipynb")) == before
    assert not [path for path in copy.rglob(".*") if path.is_file()]


@pytest.mark.parametrize(
    "output",
    [
        {"output_type": "stream", "name": "stderr", "text": "careful\n"},
        {"output_type": "display_data", "data": {"application/vnd.jupyter.widget-view+json": {}}, "metadata": {}},
    ],
)
def test_what_cannot_be_stored_must_be_tagged(course, output):
    worked = read(course).solution
    worked.cells[2].outputs = [nbformat.from_dict(output)]
    with pytest.raises(ValueError, match=r"07_tiny, cell 3 \(import math\) shows a widget or writes to stderr"):
        clean_outputs(NAME, worked)
    worked.cells[2].metadata["tags"] = ["nbval-ignore-output"]
    clean_outputs(NAME, worked)
    assert worked.cells[2].outputs == []


def test_pick_takes_numbers_names_and_files(tmp_path):
    paths = [tmp_path / f"{name}.py" for name in ("00_start_here", "01_naive", "02_kv_cache")]
    assert pick(paths, []) == paths
    assert pick(paths, ["02", "01_naive", "notebooks/02_kv_cache.ipynb"]) == [paths[2], paths[1]]
    with pytest.raises(ValueError, match="no notebook '3'; the notebooks are: 00_start_here, 01_naive, 02_kv_cache"):
        pick(paths, ["3"])


# --- running -------------------------------------------------------------------------------------------------


def run_cells(tmp_path, *cells, timeout=None):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    with scratch_results() as env:
        return execute(notebook, tmp_path, "tiny", env, timeout), notebook


def test_kernel_runs_in_this_python_in_the_folder_away_from_the_learners_results(tmp_path):
    done, notebook = run_cells(
        tmp_path, "import os, sys; print(sys.executable)\nprint(os.getcwd())\nprint(os.environ['KVCOURSE_RESULTS'])"
    )
    python, folder, results = notebook.cells[0].outputs[0].text.splitlines()
    assert (python, os.path.realpath(folder)) == (sys.executable, os.path.realpath(tmp_path))
    assert results != os.environ.get("KVCOURSE_RESULTS") and not os.path.exists(results)
    assert (done.name, done.cells, done.error) == ("tiny", 1, None)
    assert 20e6 < done.peak_bytes < 2e9  # a kernel without torch


def test_peak_memory_counts_what_is_gone_at_the_end(tmp_path):
    small, _ = run_cells(tmp_path, "import time")
    large, _ = run_cells(tmp_path, "import time\nx = b'1' * 200_000_000\ntime.sleep(0.5)\ndel x")
    assert 150e6 < large.peak_bytes - small.peak_bytes < 300e6


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("int('x')", "tiny, cell 2 (int('x')): ValueError: invalid literal for int() with base 10: 'x'"),
        ("import os\nos._exit(1)", "tiny, cell 2 (import os): the kernel died, most often for want of memory"),
        ("while True: pass", "tiny, cell 2 (while True: pass): not done after 2 s"),
    ],
)
def test_how_a_run_can_end(tmp_path, cell, message):
    done, _ = run_cells(tmp_path, "ok = 1", cell, timeout=2)
    assert done.error == message


# --- exercises for tests -------------------------------------------------------------------------------------


def test_solution_and_stub_come_from_the_source(course):
    path = course / "notebooks" / "src" / f"{NAME}.py"
    assert solution(path, "root")(16) == 4 and solution(path, "root")(-1) == 0
    with pytest.raises(NotImplementedError, match="your turn"):
        stub(path, "root")(16)
    with pytest.raises(ValueError, match="07_tiny has no exercise 'half'; its exercises are: root"):
        solution(path, "half")
    with pytest.raises(ValueError, match="no notebook source"):
        solution("07_not_there", "root")


# --- nbval ---------------------------------------------------------------------------------------------------


def test_nbval_accepts_what_is_built_and_sees_a_changed_output(copy):
    learner, worked = built_paths(copy, NAME)
    changed = worked.with_name("changed.ipynb")
    assert "half of six: 3.0" in worked.read_text()
    changed.write_text(worked.read_text().replace("half of six: 3.0", "half of six: 4.0"))
    command = [sys.executable, "-m", "pytest", "-rf", "-p", "no:xdist", "-p", "no:cacheprovider", "--nbval"]
    command += ["--nbval-current-env", str(worked), str(changed)]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "1 failed, 9 passed" in done.stdout, done.stdout
    failures = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert len(failures) == 1 and "changed.ipynb::Cell 1" in failures[0], done.stdout


def test_a_notebook_that_somebody_worked_in_is_not_replaced(course):
    """Building would discard a learner's answers; only --force does."""
    build(course, run=False)
    path = course / "notebooks" / f"{NAME}.ipynb"
    build(course, run=False)  # nobody ran it: replaced without a question
    notebook = nbformat.read(path, as_version=4)
    cell = next(cell for cell in notebook.cells if cell.cell_type == "code")
    cell.source, cell.execution_count = "MY WORK", 3
    nbformat.write(notebook, path)
    with pytest.raises(ValueError, match="somebody has worked in 07_tiny.*--force"):
        build(course, run=False)
    assert "MY WORK" in path.read_text()
    build(course, run=False, force=True)
    assert "MY WORK" not in path.read_text()
