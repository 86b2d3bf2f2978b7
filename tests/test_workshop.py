"""`kvcourse workshop check`, `copy` and what one learner takes: the seats of a room before the class begins."""

import json
import os
import re
import time
from collections import namedtuple
from pathlib import Path

import nbformat
import psutil
import pytest

from kvcourse import __version__, paths
from kvcourse.cli.doctor import Line
from kvcourse.cli.main import main as kvcourse
from kvcourse.workshop import check as seat
from kvcourse.workshop import footprint, learner_copy

ROOT = Path(__file__).parent.parent
FINE = [Line("ok", "python", "3.11"), Line("ok", "kernel", "python3"), Line("ok", "model", "here")]


def notebook(path: Path, *cells: str, run: bool = False) -> Path:
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    if run:
        made.cells[0].execution_count = 1
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(made, path)
    return path


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A small checkout, with everything that learners should not get, and the current folder in it."""
    root = tmp_path / "course"
    for name in ("00_start_here", "01_next"):
        notebook(root / "notebooks" / f"{name}.ipynb", "print(1)")
        notebook(root / "notebooks" / "solutions" / f"{name}.ipynb", "print('worked')")
    texts = ["notebooks/src/00_start_here.py", "notebooks/instructor/README.md", "tests/test_a.py", "kvcourse/a.py"]
    texts += ["kvcourse/__pycache__/a.pyc", "data/models/tiny.bin", "data/.cache/x", "pyproject.toml", "README.md"]
    texts += [".git/config", "notebooks/.ipynb_checkpoints/00_start_here-checkpoint.ipynb"]
    for text in texts:
        (root / text).parent.mkdir(parents=True, exist_ok=True)
        (root / text).write_text(text)
    monkeypatch.chdir(root)
    monkeypatch.setenv("KVCOURSE_RESULTS", str(tmp_path / "results"))
    return root


def files_below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


# --- copy -----------------------------------------------------------------------------------------------------


def test_a_copy_has_what_learners_need_and_nothing_else(course, tmp_path, monkeypatch):
    assert kvcourse(["workshop", "copy", "../class/copy"]) == 0
    assert files_below(tmp_path / "class") == [
        "copy/README.md",
        "copy/data/models/tiny.bin",
        "copy/kvcourse/a.py",
        "copy/notebooks/00_start_here.ipynb",
        "copy/notebooks/01_next.ipynb",
        "copy/pyproject.toml",
    ]
    monkeypatch.chdir(tmp_path / "class" / "copy" / "notebooks")
    assert paths.course_folder() == tmp_path / "class" / "copy"


def test_a_folder_that_is_in_use_is_refused(course, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    assert kvcourse(["workshop", "copy", "../full"]) == 1
    assert "../full is not empty: give the name of a new folder" in capsys.readouterr().err
    assert kvcourse(["workshop", "copy", "../file"]) == 1
    assert "../file is no folder" in capsys.readouterr().err
    for inside in ("kvcourse/inside", "data/inside", "data/models/a/b"):
        assert kvcourse(["workshop", "copy", inside]) == 1
        assert f"lies in the folder {inside.split('/')[0]}, which is copied itself" in capsys.readouterr().err
    for below in ("a", "a/b"):
        assert kvcourse(["workshop", "copy", f"../file/{below}"]) == 1
        assert f"../file/{below} cannot be made, since ../file is no folder" in capsys.readouterr().err
    assert files_below(tmp_path / "full") == ["mine.txt"]
    assert kvcourse(["workshop", "copy", "../empty"]) == 0


def test_somebodys_answers_are_not_handed_out(course, tmp_path, capsys):
    notebook(course / "notebooks" / "01_next.ipynb", "answer = 42", run=True)
    assert kvcourse(["workshop", "copy", "../copy"]) == 1
    assert "somebody has worked in 01_next" in capsys.readouterr().err
    assert not (tmp_path / "copy").exists()


def test_a_full_disk_leaves_no_half_copy(course, tmp_path, monkeypatch, capsys):
    def full(source, target):
        if Path(source).name == "01_next.ipynb":
            raise OSError(28, "No space left on device")
        Path(target).write_bytes(b"")

    monkeypatch.setattr(learner_copy.shutil, "copyfile", full)
    before = sorted(tmp_path.iterdir())
    assert kvcourse(["workshop", "copy", "../copy"]) == 1
    assert "No space left" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_links_to_what_learners_do_not_get_become_words(course, tmp_path):
    text = "[a](data/models) [b](data/models/tiny.bin#x) [c](notebooks/instructor/README.md#y), [d](https://e.org/d),"
    (course / "README.md").write_text(f"{text} ![e](missing.png) [f](#g) [h](notebooks/solutions)")
    assert kvcourse(["workshop", "copy", "../copy"]) == 0
    text = text.replace("[c](notebooks/instructor/README.md#y)", "c")
    assert (tmp_path / "copy" / "README.md").read_text() == f"{text} ![e](missing.png) [f](#g) h"
    assert "instructor/README.md" in (course / "README.md").read_text()


def test_what_only_authors_can_do_is_refused_in_a_copy(course, tmp_path, monkeypatch, capsys):
    assert kvcourse(["workshop", "copy", "../copy"]) == 0
    monkeypatch.chdir(tmp_path / "copy")
    for command in (["notebooks", "--check"], ["notebooks"], ["workshop", "slides", "00"]):
        assert kvcourse(command) == 1
        assert "where the course is written" in capsys.readouterr().err


def test_the_real_course_without_its_solutions(tmp_path):
    copy = learner_copy.copy(ROOT, tmp_path / "copy")
    for page in (copy / "README.md", copy / "data" / "README.md", copy / "kvcourse" / "README.md"):
        links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8"))
        assert [link for link in links if not (page.parent / link).exists()] == [], page
    names = files_below(copy)
    assert not [name for name in names if name.split("/")[0] in ("tests", ".git") or "/solutions/" in name]
    assert not [name for name in names if name.startswith(("notebooks/src/", "notebooks/instructor/"))]
    lessons = [path.stem for path in sorted((ROOT / "notebooks" / "src").glob("*.py"))]
    assert {f"notebooks/{name}.ipynb" for name in lessons} <= set(names)
    text = "".join(path.read_text(encoding="utf-8") for path in copy.glob("notebooks/*.ipynb"))
    assert "# SOLUTION" not in text and "NotImplementedError" in text
    assert "data/models/tiny-gqa/model.safetensors" in names and "kvcourse/cli/main.py" in names


# --- check ----------------------------------------------------------------------------------------------------


def test_a_seat_for_real(course, monkeypatch, capsys):
    """A kernel is started, and the small model writes in it."""
    monkeypatch.setattr(seat, "examine", lambda: FINE)
    monkeypatch.setenv("KVCOURSE_OFFLINE", "1")
    monkeypatch.setenv("KVCOURSE_MODELS", str(course / "no models"))
    assert kvcourse(["workshop", "check"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[len(FINE) :]] == ["notebooks", "results", "computes", "tokens"]
    assert all(line.startswith("ok ") for line in lines)
    assert "2 in" in lines[3] and "none worked in" in lines[3]
    assert "tiny-gqa wrote its first tokens" in lines[-1]
    assert last == "ready"


def fake_kernel(monkeypatch, answers: dict):
    """In place of a kernel: what each piece of code prints, or raises."""
    Manager, Client = namedtuple("Manager", "shutdown_kernel"), namedtuple("Client", "stop_channels")
    ended = []
    made = Manager(lambda now: ended.append(now)), Client(lambda: None)
    monkeypatch.setattr("jupyter_client.manager.start_new_kernel", lambda *a, **k: made)
    monkeypatch.setattr(seat, "run", lambda client, code, patience=0: answers[code])
    return ended


def test_what_is_wrong_is_said_and_is_the_exit_code(course, monkeypatch, capsys):
    monkeypatch.setattr(seat, "examine", lambda: FINE)
    ended = fake_kernel(
        monkeypatch, {seat.COMPUTES: (f"21 {__version__}", ""), seat.TOKENS: ("", "ValueError: damaged")}
    )
    notebook(course / "notebooks" / "01_next.ipynb", "answer = 42", run=True)
    assert kvcourse(["workshop", "check"]) == 1
    *_, notebooks, results, computes, tokens, last = capsys.readouterr().out.splitlines()
    assert notebooks.startswith(f"look  notebooks somebody has worked in 01_next of {course / 'notebooks'}")
    assert computes.startswith("ok ")
    assert tokens == "fix   tokens    the model wrote nothing: ValueError: damaged"
    assert last == "not ready: do what the lines say that begin with fix (tokens), and check again"
    assert ended == [True]  # the kernel


def test_a_check_from_elsewhere_says_which_folder_it_looked_at(course, tmp_path, monkeypatch):
    """A hub's learner who is not in their folder: the package's own notebooks are found, which nobody works in."""
    monkeypatch.chdir(course / "notebooks")
    assert seat.notebooks(course).status == "ok"
    (tmp_path / "learner").mkdir()
    monkeypatch.chdir(tmp_path / "learner")
    line = seat.notebooks(course)
    assert line.status == "look" and f"looked at {course / 'notebooks'}: " in line.text


@pytest.mark.parametrize(
    ("computes", "words"),
    [(("21 0.0.9", ""), "the kernel says '21 0.0.9'"), (("", "no answer within 120 s"), "the kernel says no answer")],
)
def test_a_kernel_with_another_course_in_it(course, monkeypatch, computes, words):
    monkeypatch.setattr(seat, "examine", lambda: FINE)
    fake_kernel(monkeypatch, {seat.COMPUTES: computes})
    last = seat.check(course)[-1]
    assert (last.status, last.topic) == ("fix", "computes") and words in last.text


def test_no_model_is_downloaded_by_a_check(course, monkeypatch):
    monkeypatch.setattr(seat, "examine", lambda: [*FINE[:2], Line("fix", "model", "run `kvcourse fetch`")])
    fake_kernel(monkeypatch, {seat.COMPUTES: (f"21 {__version__}", "")})  # asked for tokens, it would fail
    lines = seat.check(course)
    assert [line.topic for line in lines if line.status == "fix"] == ["model"]
    assert "tokens" not in [line.topic for line in lines]


def test_without_packages_no_kernel_is_tried(course, monkeypatch):
    monkeypatch.setattr(seat, "examine", lambda: [Line("fix", "packages", "torch is missing")])
    monkeypatch.setattr("jupyter_client.manager.start_new_kernel", None)
    assert [line.topic for line in seat.check(course)] == ["packages", "notebooks", "results"]


def test_a_kernel_that_does_not_start(course, monkeypatch):
    def dies(*args, **options):
        raise RuntimeError("Kernel died before replying to kernel_info")

    monkeypatch.setattr("jupyter_client.manager.start_new_kernel", dies)
    [line] = seat.kernel_and_tokens()
    assert line.status == "fix" and "Kernel died" in line.text


def test_little_disk_and_no_place_for_results(course, tmp_path, monkeypatch):
    assert seat.disk_for_work().status == "ok"
    Usage = namedtuple("Usage", "free")
    monkeypatch.setattr(seat.shutil, "disk_usage", lambda place: Usage(0.9e9))
    assert seat.disk_for_work().status == "fix" and "less than 1 GB is free" in seat.disk_for_work().text
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVCOURSE_RESULTS", str(tmp_path / "file"))
    assert seat.disk_for_work().status == "fix" and "set KVCOURSE_RESULTS" in seat.disk_for_work().text


def test_json_for_thirty_computers(course, monkeypatch, capsys):
    monkeypatch.setattr(seat, "check", lambda course: [*FINE, Line("fix", "disk", "make room")])
    assert kvcourse(["workshop", "check", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["kind"], said["ready"], said["kvcourse"]) == ("kvcourse seat", False, __version__)
    assert said["lines"][-1] == {"status": "fix", "topic": "disk", "text": "make room"}


# --- the command ----------------------------------------------------------------------------------------------


def test_an_action_is_needed(capsys):
    for arguments in (["workshop"], ["workshop", "dance"]):
        with pytest.raises(SystemExit) as end:
            kvcourse(arguments)
        assert end.value.code == 2
    assert "invalid choice: 'dance'" in capsys.readouterr().err


def test_minutes_of_one_notebook(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert kvcourse(["workshop", "minutes", "00"]) == 0
    assert "00_start_here" in capsys.readouterr().out


# --- what one learner takes -----------------------------------------------------------------------------------


def test_memory_and_processor_of_a_tree_of_processes():
    """100 MB held, and a tenth of a second of work, are seen; the same without them is not."""
    with footprint.Watch(os.getpid()) as before:
        pass
    with footprint.Watch(os.getpid()) as watch:
        held = bytearray(os.urandom(1 << 20) * 100)
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass
        time.sleep(0.8)
        del held
    assert 90e6 < watch.private - before.private < 200e6
    assert watch.resident >= watch.private
    assert 0.15 < watch.cpu_seconds < 3 and before.cpu_seconds < 0.15


@pytest.mark.slow
def test_one_learner_for_real(tmp_path):
    path = notebook(tmp_path / "00_small.ipynb", "import torch", "x = torch.ones(50_000_000)", "print(y)", "0 / 0")
    found = footprint.footprint(path)
    assert found.error == "NameError: name 'y' is not defined"  # the first that fails ends it
    assert 30e6 < found.server < found.private < found.resident
    assert found.private - found.server > 200e6  # the tensor
    assert str(found).startswith("00_small") and found.cpu_seconds > 0
    assert not [
        child for child in psutil.Process().children(recursive=True) if "jupyterlab" in " ".join(child.cmdline())
    ]
