"""Every notebook on Colab: its badge, its set-up cell, and a run on a machine like Colab's (`pytest -m slow`)."""

import re
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
from colab import make_colab, pins, working_tree
from packaging.requirements import Requirement

from kvcourse.notebooks.build import built_paths

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
OWNER_AND_NAME = REPOSITORY.removeprefix("https://github.com/")
NAMES = sorted(path.stem for path in (ROOT / "notebooks" / "src").glob("*.py"))
LEARNER = [built_paths(ROOT, name).learner for name in NAMES]
SOLUTIONS = [built_paths(ROOT, name).solution for name in NAMES]


# --- badge and set-up cell -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", LEARNER + SOLUTIONS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_badge_and_setup_cell_name_this_file_of_this_repository(path):
    cells = nbformat.read(path, as_version=4).cells
    links = re.findall(r"\((https://colab[^)]*\.ipynb)\)", cells[0].source)
    here = path.relative_to(ROOT).as_posix()
    assert links == [f"https://colab.research.google.com/github/{OWNER_AND_NAME}/blob/main/{here}"]
    setup = next(cell.source for cell in cells if cell.cell_type == "code")
    assert f'    %pip install -q -c colab.txt "kvcourse @ git+{REPOSITORY}"\n' in setup
    assert f'assert kv.__version__.startswith("{PROJECT["version"].rpartition(".")[0]}.")' in setup


LINK = re.compile(
    r"(?:github\.com|githubusercontent\.com|colab\.research\.google\.com/github|mybinder\.org/v2/gh)/"
    r"([\w.-]+/[\w.-]*\w)|(?<![\w-])([\w-]+)\.github\.io/([\w-]+)"
)
TEXTS = {".py", ".md", ".toml", ".yml", ".yaml", ".ipynb", ".html", ".txt", ""}


def misspelled(text: str, owner_and_name: str = OWNER_AND_NAME) -> list[str]:
    """Links to a repository that shares owner or name with the course's, but not both."""
    found = {either or f"{owner}/{name}" for either, owner, name in LINK.findall(text)}
    found = {link.removesuffix(".git") for link in found}
    owner, name = owner_and_name.split("/")
    return sorted(link for link in found if link != owner_and_name and {owner, name} & set(link.split("/")))


def test_no_file_spells_the_repository_in_another_way():
    read = [path for path in working_tree() if path.suffix in TEXTS and path != Path(__file__)]
    assert ROOT / "README.md" in read and LEARNER[0] in read and ROOT / ".github/workflows/tests.yml" in read
    wrong = {path.name: misspelled(path.read_text(encoding="utf-8", errors="replace")) for path in read}
    assert {name: links for name, links in wrong.items() if links} == {}


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("https://github.com/ada/course and https://github.com/ada/course.git", []),
        ("https://github.com/ada/lessons/issues", ["ada/lessons"]),
        ("https://mybinder.org/v2/gh/bob/course/main", ["bob/course"]),
        ("https://colab.research.google.com/github/bob/course/blob/main/x.ipynb", ["bob/course"]),
        ("https://ada.github.io/lessons/, https://ada.github.io/course/", ["ada/lessons"]),
        ("https://github.com/vllm-project/vllm", []),
    ],
)
def test_another_spelling_is_seen(text, links):
    assert misspelled(text, "ada/course") == links


# --- what pip would change -----------------------------------------------------------------------------------


def too_old_on_colab(dependencies: list[str]) -> list[str]:
    have = {name.lower().replace("_", "-"): version for name, version in pins().items()}
    found = map(Requirement, dependencies)
    return [str(each) for each in found if not each.specifier.contains(have.get(each.name.replace("_", "-"), "999"))]


def test_what_colab_has_is_new_enough_for_the_course():
    assert too_old_on_colab(PROJECT["dependencies"]) == []
    assert too_old_on_colab(["jupyter_client>=8.0", "ipywidgets>=8", "numpy>=1.26"]) == [
        "jupyter_client>=8.0",
        "ipywidgets>=8",
    ]


# --- a machine like Colab's ----------------------------------------------------------------------------------

colab_like = [
    pytest.mark.slow,
    pytest.mark.smollm2,
    pytest.mark.skipif(sys.platform != "linux", reason="Colab is Linux"),
    pytest.mark.skipif(sys.version_info >= (3, 13), reason="Colab's NumPy is for Python up to 3.12"),
]


def change(before: dict[str, str], after: dict[str, str]) -> dict[str, tuple]:
    """Of the packages there before: those with another version now, or none."""
    return {name: (version, after.get(name)) for name, version in before.items() if after.get(name) != version}


@pytest.fixture(scope="class")
def colab(request, tmp_path_factory):
    """A fresh machine on which the set-up cell has run, for real, in a kernel that then uses what it installed."""
    colab = make_colab(tmp_path_factory.mktemp("colab"), request.cls.torch_version, REPOSITORY)
    before = colab.versions()
    assert "kvcourse" not in before and before["torch"] == request.cls.torch_version
    assert before["ipywidgets"] == "7.7.1" and before["ipykernel"] == "6.17.1" and before["jupyter_client"] == "7.4.9"
    unprotected = colab.pip("install", "--dry-run", f"kvcourse @ git+{REPOSITORY}")
    assert "jupyter_server-" in unprotected.splitlines()[-1]  # so the list in the set-up cell does something
    run_setup_cell(colab, tmp_path_factory.mktemp("content"))
    after = colab.versions()
    assert change(before, after) == {}
    assert after["kvcourse"] == PROJECT["version"] and (colab.site / "kvcourse" / "__init__.py").is_file()
    return colab


def run_setup_cell(colab, folder: Path) -> None:
    notebook = nbformat.read(LEARNER[0], as_version=4)
    setup = next(cell for cell in notebook.cells if "setup" in cell.metadata.get("tags", []))
    use = nbformat.v4.new_code_cell('print(kv.load_model("tiny-gqa").name)')
    notebook.cells = [setup, use]
    colab.execute(notebook, folder)
    printed = "".join(output.get("text", "") for output in setup.outputs)
    assert "ERROR" not in printed, printed
    assert use.outputs[0].text == "tiny-gqa\n"


def run_alone(colab, path: Path, folder: Path) -> None:
    """Run one notebook in a folder with nothing else in it. (The set-up cell, the same in all, has run before.)"""
    (folder / path.name).write_bytes(path.read_bytes())
    colab.execute(nbformat.read(folder / path.name, as_version=4), folder)


class TestColabWithAnOlderTorch:
    """Learner's notebooks, beside the version that Colab had in June 2026."""

    pytestmark = colab_like
    torch_version = "2.11.0+cu128"

    @pytest.mark.parametrize("path", LEARNER, ids=lambda path: path.stem)
    def test_a_learners_notebook_runs_to_the_end(self, colab, tmp_path, path):
        run_alone(colab, path, tmp_path)


class TestColabWithANewerTorch:
    """Worked notebooks, beside a version later than the one in constraints.txt."""

    pytestmark = colab_like
    torch_version = "2.14.0"

    @pytest.mark.parametrize("path", SOLUTIONS, ids=lambda path: path.stem)
    def test_a_worked_notebook_runs_to_the_end(self, colab, tmp_path, path):
        run_alone(colab, path, tmp_path)
