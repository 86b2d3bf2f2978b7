"""The command line: every command, every way it can say no, and nothing that touches the user's own folders."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections import namedtuple
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import nbformat
import psutil
import pytest
import torch

from kvcourse import paths
from kvcourse.cli import doctor, lab, main
from kvcourse.cli.main import main as kvcourse
from kvcourse.device import device_class
from kvcourse.expected import records
from kvcourse.weights import fetch as weights

PYPROJECT = '[project]\nversion = "0.1.0"\n[project.urls]\nRepository = "https://github.com/owner/repo"\n'


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCOURSE_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("KVCOURSE_OFFLINE", "1")
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path / "models"
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course with two notebooks, one of which fails; the current folder is below it."""
    (tmp_path / "course" / "notebooks" / "src").mkdir(parents=True)
    (tmp_path / "course" / "pyproject.toml").write_text(PYPROJECT)
    for name, cells in {"00_start_here": ["print('hi')"], "01_broken": ["x = 1", "int('smollm2-135m')", "x"]}.items():
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        nbformat.write(notebook, tmp_path / "course" / "notebooks" / f"{name}.ipynb")
    monkeypatch.chdir(tmp_path / "course" / "notebooks" / "src")
    return tmp_path / "course"


def command(*arguments, **options):
    whole = [sys.executable, "-m", "kvcourse.cli.main", *arguments]
    return subprocess.run(whole, capture_output=True, text=True, **options)


# --- the command itself --------------------------------------------------------------------------------------


def test_installed_command_and_help_without_torch():
    [script] = metadata.entry_points(group="console_scripts", name="kvcourse")
    assert script.load() is kvcourse
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "kvcourse.cli.main", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("doctor", "fetch", "lab", "run", "bench", "notebooks"))
    imported = [line.rsplit("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert "kvcourse.cli.doctor" in imported
    assert not {"torch", "numpy", "jupytext", "nbclient", "matplotlib"} & set(imported)


def test_python_m_kvcourse_is_the_command():
    done = subprocess.run([sys.executable, "-m", "kvcourse", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"kvcourse {metadata.version('kvcourse')}\n")
    done = subprocess.run([sys.executable, "-m", "kvcourse", "dance"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("usage: kvcourse ")


def test_no_command_prints_help_and_version_is_the_packages(capsys):
    assert kvcourse([]) == 0
    assert capsys.readouterr().out.startswith("usage: kvcourse")
    with pytest.raises(SystemExit) as end:
        kvcourse(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"kvcourse {metadata.version('kvcourse')}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dance"], "invalid choice: 'dance'"),
        (["run", "--fast"], "unknown argument: --fast"),
        (["--fast"], "unknown argument: --fast"),
        (["run", "--timeout", "soon"], "invalid int value: 'soon'"),
    ],
)
def test_wrong_usage_exits_with_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as end:
        kvcourse(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_an_error_is_one_line_without_traceback(course):
    done = command("run", "99", cwd=course)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "kvcourse: there is no notebook '99'; the notebooks are: 00_start_here, 01_broken\n"


class Command:
    """A stand-in for a command's module, whose `main` does as told."""

    HELP = "test"

    def __init__(self, action):
        self.main = lambda arguments: action()

    def add_arguments(self, parser):
        pass


@pytest.mark.skipif(os.name == "nt", reason="Windows reports a closed pipe in another way")
def test_a_reader_that_has_gone_is_no_error():
    """What `kvcourse doctor | head -1` may do: nobody reads any more when the text is written."""
    reading, writing = os.pipe()
    os.close(reading)
    whole = [sys.executable, "-m", "kvcourse.cli.main", "doctor"]
    done = subprocess.run(whole, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_errors_of_the_package_are_shown_and_errors_of_libraries_are_raised(monkeypatch, capsys):
    def stop():
        raise KeyboardInterrupt

    monkeypatch.setitem(main.COMMANDS, "test", Command(lambda: weights.find_source("gpt-5")))
    assert kvcourse(["test"]) == 1
    names = "tiny-mha, tiny-gqa, tiny-mqa, tiny-window, smollm2-135m"
    assert capsys.readouterr().err == f"kvcourse: There is no model 'gpt-5' to fetch. There are: {names}.\n"
    monkeypatch.setitem(main.COMMANDS, "test", Command(lambda: open("/no/such/file")))
    assert kvcourse(["test"]) == 1
    assert "/no/such/file" in capsys.readouterr().err
    monkeypatch.setitem(main.COMMANDS, "test", Command(lambda: nbformat.reads("{", as_version=4)))
    with pytest.raises(ValueError):  # not ours: a bug, whose traceback is wanted
        kvcourse(["test"])
    monkeypatch.setitem(main.COMMANDS, "test", Command(stop))
    assert kvcourse(["test"]) == 130
    assert capsys.readouterr().err == ""


# --- doctor --------------------------------------------------------------------------------------------------


@pytest.fixture
def model_here(models):
    models.mkdir()
    with open(models / "SmolLM2-135M-Instruct.Q4_1.gguf", "wb") as file:
        file.truncate(weights.SOURCES["smollm2-135m"].size)


def status(topic):
    [line] = [line for line in doctor.examine() if line.topic == topic]
    return line


def test_doctor_on_a_computer_with_everything(model_here, capsys):
    assert kvcourse(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    topics = ["python", "packages", "device", "threads", "memory", "data", "model", "disk", "kernel"]
    assert [line.split()[1] for line in lines] == topics
    assert all(line.split()[0] in ("ok", "look") for line in lines)
    assert f"torch {torch.__version__}" in lines[1]


def test_doctor_as_a_command_without_the_model(tmp_path):
    done = command("doctor", env=os.environ | {"KVCOURSE_OFFLINE": "0"})
    assert done.returncode == 1 and done.stderr == ""
    assert "fix   model     smollm2-135m is not on this computer: run `kvcourse fetch`" in done.stdout
    done = command("doctor")
    assert done.returncode == 0 and done.stderr == ""
    assert "look  model     smollm2-135m is not on this computer, and KVCOURSE_OFFLINE is set" in done.stdout


def test_doctor_sees_a_half_model(model_here, models):
    os.truncate(models / "SmolLM2-135M-Instruct.Q4_1.gguf", 1000)
    assert status("model").status == "fix" and "damaged" in status("model").text


def test_doctor_sees_a_folder_in_place_of_the_model(models):
    (models / "SmolLM2-135M-Instruct.Q4_1.gguf").mkdir(parents=True)
    assert status("model").status == "fix" and "is a folder" in status("model").text


@pytest.mark.parametrize("variable", ["KVCOURSE_MODELS", "KVCOURSE_RESULTS"])
def test_folders_are_whole_paths(monkeypatch, tmp_path, variable):
    folder = {"KVCOURSE_MODELS": paths.models_folder, "KVCOURSE_RESULTS": paths.results_folder}[variable]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))  # HOME on Windows
    monkeypatch.setenv(variable, "~/here")
    assert folder() == tmp_path / "here"
    monkeypatch.setenv(variable, "here")
    with pytest.raises(ValueError, match=f"{variable}='here' must be a whole path"):
        folder()


def test_doctor_without_a_home_folder(monkeypatch, capsys):
    def no_home(*_):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("KVCOURSE_MODELS")
    monkeypatch.setattr(paths.platformdirs, "user_cache_path", no_home)
    assert kvcourse(["doctor"]) == 1
    assert capsys.readouterr().err == (
        "kvcourse: No home folder was found: set HOME, or KVCOURSE_MODELS, to a folder that you may write to.\n"
    )


def test_doctor_sees_an_old_python(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 4, "final", 0))
    [line] = [line for line in doctor.examine() if line.status == "fix"]
    assert line == ("fix", "python", "3.10.4 is too old: the course needs 3.11 or later")


def test_doctor_sees_missing_and_old_packages(monkeypatch):
    real = metadata.version

    def version(name):
        if name == "gguf":
            raise metadata.PackageNotFoundError(name)
        return "2.4.1" if name == "torch" else real(name)

    monkeypatch.setattr(metadata, "version", version)
    assert [line for line in doctor.examine() if line.topic == "packages"] == [
        ("fix", "packages", f'gguf is missing: pip install "{requirement("gguf")}"'),
        ("fix", "packages", f'torch 2.4.1 does not fit >=2.5: pip install "{requirement("torch")}"'),
    ]


def requirement(name):
    [found] = [text for text in metadata.requires("kvcourse") if text.startswith(name + ">")]
    return found


def test_doctor_leaves_extras_out():
    assert "pytest" not in status("packages").text
    assert any(text.startswith("pytest") for text in metadata.requires("kvcourse"))


def test_doctor_gives_the_reason_for_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert status("device").text.startswith("cpu in float32: no CUDA device found")


def test_doctor_sees_fewer_threads_than_cores(monkeypatch):
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert status("threads").status == "look" and "1 of 8 cores" in status("threads").text
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert status("threads") == ("ok", "threads", "8 on 8 cores")


def test_doctor_sees_little_memory(monkeypatch):
    Memory = namedtuple("Memory", "available")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(3.4e9))
    assert status("memory").status == "look" and "3.4 GB free" in status("memory").text
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(3.6e9))
    assert status("memory").status == "ok"


def test_doctor_sees_a_full_disk(monkeypatch, models):
    monkeypatch.delenv("KVCOURSE_OFFLINE")
    Disk = namedtuple("Disk", "free")
    source = weights.SOURCES["smollm2-135m"]
    needed = 2 * source.wheel_size + source.size
    monkeypatch.setattr(psutil, "disk_usage", lambda path: Disk(needed - 1))
    assert status("disk").status == "fix" and str(models) in status("disk").text
    monkeypatch.setattr(psutil, "disk_usage", lambda path: Disk(needed))
    assert status("disk").status == "ok"


def test_doctor_needs_no_disk_once_the_model_is_here(monkeypatch, model_here):
    monkeypatch.setattr(psutil, "disk_usage", lambda path: namedtuple("Disk", "free")(0))
    assert status("disk").status == "ok"


def test_doctor_sees_a_missing_or_foreign_kernel(monkeypatch):
    from jupyter_client import kernelspec

    def missing(self, name):
        raise kernelspec.NoSuchKernel(name)

    def no_home(self, name):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(kernelspec.KernelSpecManager, "get_kernel_spec", no_home)
    assert status("kernel").status == "fix" and "set HOME" in status("kernel").text
    monkeypatch.setattr(kernelspec.KernelSpecManager, "get_kernel_spec", missing)
    assert status("kernel").status == "fix" and "pip install ipykernel" in status("kernel").text
    for python, wanted in {"/other/env/bin/python": "fix", sys.executable: "ok", "python": "ok"}.items():
        spec = kernelspec.KernelSpec(argv=[python, "-m", "ipykernel_launcher"])
        monkeypatch.setattr(kernelspec.KernelSpecManager, "get_kernel_spec", lambda self, name, spec=spec: spec)
        assert status("kernel").status == wanted


# --- fetch ---------------------------------------------------------------------------------------------------


def test_fetch_says_where_the_model_lies(monkeypatch, capsys, tmp_path):
    (tmp_path / "model.gguf").write_bytes(bytes(1_500_000))
    monkeypatch.setattr(weights, "fetch", lambda name: tmp_path / "model.gguf")
    assert kvcourse(["fetch"]) == 0
    assert capsys.readouterr().out == f"smollm2-135m is at {tmp_path / 'model.gguf'} (1.5 MB)\n"


def test_fetch_of_a_model_that_comes_with_the_course(capsys):
    assert kvcourse(["fetch", "tiny-mqa"]) == 0
    folder = paths.data_folder() / "models" / "tiny-mqa"
    assert capsys.readouterr().out == f"tiny-mqa comes with the course: it is at {folder}\n"
    assert kvcourse(["fetch", "tiny-mka"]) == 1
    assert "no model 'tiny-mka' to fetch. Did you mean 'tiny-mqa'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["fetch", "bench"])
def test_help_lists_every_course_model(name, capsys):
    with pytest.raises(SystemExit):
        kvcourse([name, "--help"])
    shown = "".join(capsys.readouterr().out.split())  # however the lines were broken
    assert all(model in shown for model in weights.COURSE_MODELS)


def test_fetch_offline_is_one_line():
    done = command("fetch")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("kvcourse: The model smollm2-135m is not on this computer")
    assert done.stderr.count("\n") == 1


STALL = """
import subprocess, sys
from pathlib import Path
from kvcourse.cli import lab, main
from kvcourse.weights import fetch

def stall(command, **options):
    process = popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(process.pid, flush=True)
    return process

popen, subprocess.Popen = subprocess.Popen, stall
if sys.argv[1] == "lab":
    fetch.fetch = lambda name: None
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows ends a process without a signal")
@pytest.mark.parametrize("name", ["fetch", "lab"])
def test_a_command_that_is_ended_ends_what_it_started(course, monkeypatch, models, name):
    monkeypatch.delenv("KVCOURSE_OFFLINE")
    whole = subprocess.Popen([sys.executable, "-c", STALL, name], stdout=subprocess.PIPE, text=True)
    line = next(line for line in whole.stdout if line.strip().isdigit())
    started = psutil.Process(int(line))
    whole.terminate()
    assert whole.wait(timeout=60) == 128 + signal.SIGTERM
    assert started.wait(timeout=60) is None or not started.is_running()
    assert not models.exists() or [path.suffix for path in models.iterdir()] == [".lock"]


# --- lab -----------------------------------------------------------------------------------------------------


def test_lab_dry_run_prints_the_command_and_what_is_not_ok(course, monkeypatch, capsys):
    found = [doctor.Line("ok", "python", "fine"), doctor.Line("look", "memory", "little")]
    monkeypatch.setattr(doctor, "examine", lambda: [*found, doctor.Line("fix", "model", "absent")])
    assert kvcourse(["lab", "--dry-run", "--no-browser", "--port", "8890"]) == 0
    look, jupyter = capsys.readouterr().out.splitlines()
    assert look == "look  memory    little"  # the model is about to be fetched, so its absence needs no word
    folder = course / "notebooks"
    wanted = ["-m", "jupyterlab", str(folder / "00_start_here.ipynb"), f"--ServerApp.root_dir={folder}"]
    assert shlex.split(jupyter) == [sys.executable, *wanted, "--no-browser", "--port", "8890"]


def refuse(name):
    raise weights.cannot(name, "there is no network")


def test_lab_fetches_first_and_opens_all_the_same_when_it_cannot(course, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", list)
    started = []
    monkeypatch.setattr(lab, "_run", lambda command: started.append(command) or 5)
    assert kvcourse(["lab"]) == 5  # JupyterLab's own exit code
    assert capsys.readouterr() == (
        "KVCOURSE_OFFLINE is set: the notebooks run on tiny-gqa, which comes with the course.\n",
        "",
    )
    monkeypatch.delenv("KVCOURSE_OFFLINE")
    monkeypatch.setattr(weights, "check_possible", lambda name, source: refuse(name))
    kvcourse(["lab"])
    captured = capsys.readouterr()
    assert captured.err.startswith("kvcourse: The model smollm2-135m is not on this computer")
    assert captured.out == (
        "Opening the course all the same. These notebooks will not run: 01_broken\n"
        "KVCOURSE_OFFLINE=1 kvcourse lab runs them on a small model that comes with the course.\n"
    )
    monkeypatch.setattr(weights, "fetch", lambda name: Path("model.gguf"))
    kvcourse(["lab"])
    assert capsys.readouterr() == ("", "")
    assert len(started) == 3


def test_lab_hands_its_childs_exit_code_on():
    assert lab._run([sys.executable, "-c", "raise SystemExit(3)"]) == 3


def test_lab_without_notebooks(course, capsys):
    (course / "notebooks" / "00_start_here.ipynb").unlink()
    assert kvcourse(["lab", "--dry-run"]) == 1
    assert "00_start_here.ipynb is missing: run `kvcourse notebooks`" in capsys.readouterr().err


# --- run -----------------------------------------------------------------------------------------------------


def test_run_prints_a_table_and_fails_when_a_notebook_does(course, tmp_path, capsys):
    before = {path: path.read_bytes() for path in course.rglob("*.ipynb")}
    assert kvcourse(["run", "--output", str(tmp_path / "done")]) == 1
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["notebook", "cells", "seconds", "peak", "memory"]
    name, cells, seconds, gigabytes, unit, verdict = first.split()
    assert (name, cells, unit, verdict) == ("00_start_here", "1", "GB", "ok")
    assert float(seconds) > 0 and 0.02 < float(gigabytes) < 2
    assert second.split()[:2] == ["01_broken", "3"]
    assert "01_broken, cell 2 (int('smollm2-135m')): ValueError: invalid literal" in second
    assert {path: path.read_bytes() for path in course.rglob("*.ipynb")} == before
    saved = nbformat.read(tmp_path / "done" / "00_start_here.ipynb", as_version=4)
    assert saved.cells[0].outputs[0].text == "hi\n"


def test_run_takes_names_and_is_content_when_all_is_well(course, capsys):
    assert kvcourse(["run", "00"]) == 0
    assert "01_broken" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["07"], "there is no notebook '07'; the notebooks are: 00_start_here, 01_broken"),
        (["--solutions"], "run `kvcourse notebooks` to build them"),
        (["--timeout", "0"], "--timeout must be above 0 seconds, not 0"),
        (["--output", ".."], "would replace the notebooks themselves"),
        (["--output", "../00_start_here.ipynb/a"], "here.ipynb is a file, and executed notebooks are saved in a"),
    ],
)
def test_run_says_what_is_wrong_before_it_starts(course, capsys, arguments, message):
    assert kvcourse(["run", *arguments]) == 1
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


def test_run_records_what_was_measured_by_the_notebooks_that_ran_to_the_end(course, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(records, "data_folder", lambda: tmp_path)
    for name in ("02_counts", "03_fails"):
        cells = [f"from kvcourse import results; _ = results.measure('{name[:2]}.rows', 12, unit='rows')", "x"]
        cells = cells[:1] if name == "02_counts" else cells
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        nbformat.write(notebook, course / "notebooks" / f"{name}.ipynb")
    assert kvcourse(["run", "02", "03", "--record"]) == 1
    path = tmp_path / "expected" / f"{device_class()}.json"
    said = f"Figures recorded in {path}: 1; not those of 03_fails, which failed."
    assert capsys.readouterr().out.splitlines()[-1] == said
    [run] = records.read_runs(device_class())
    assert run.figures == {"02.rows": (12, "rows", True)} and run.model == "tiny-gqa"
    assert kvcourse(["run", "00", "--record"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Nothing was measured, so nothing is recorded."
    path.write_text("{")
    assert kvcourse(["run", "02", "--record"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and str(path) in captured.err  # said before anything is run


@pytest.mark.parametrize(
    "text", ["{", '{"cells": 5}', "[]", '{"nbformat": 4, "nbformat_minor": 5, "cells": [1]}', "\xff"]
)
def test_run_names_a_damaged_notebook_before_it_runs_any(course, capsys, text):
    path = course / "notebooks" / "01_broken.ipynb"
    path.write_text(text, encoding="latin-1")
    assert kvcourse(["run"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(f"kvcourse: {path} is not a valid notebook (")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signal for one process alone")
def test_ctrl_c_ends_run_and_its_kernel_quietly(course, tmp_path):
    mark = tmp_path / "pid"
    cell = f"import os, time\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    nbformat.write(notebook, course / "notebooks" / "02_long.ipynb")
    run = subprocess.Popen([sys.executable, "-m", "kvcourse.cli.main", "run", "02"], stderr=subprocess.PIPE, text=True)
    while run.poll() is None and not (mark.exists() and mark.read_text()):
        time.sleep(0.1)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "Traceback" not in err and "Error" not in err
    with suppress(psutil.NoSuchProcess):
        kernel = psutil.Process(int(mark.read_text()))
        assert kernel.status() == psutil.STATUS_ZOMBIE or kernel.wait(timeout=30) is None


# --- notebooks -----------------------------------------------------------------------------------------------

SOURCE = '# %% tags=["setup"]\n# SETUP\n\n# %%\nprint("built")\n'


def test_notebooks_builds_and_checks(course, capsys):
    for path in (course / "notebooks").glob("*.ipynb"):
        path.unlink()
    (course / "notebooks" / "src" / "03_new.py").write_text(SOURCE)
    assert kvcourse(["notebooks", "--check"]) == 1
    assert "03_new.ipynb: is missing" in capsys.readouterr().err
    assert kvcourse(["notebooks", "03"]) == 0
    learner, worked = (str(Path("notebooks", *parts)) for parts in (["03_new.ipynb"], ["solutions", "03_new.ipynb"]))
    assert capsys.readouterr().out.splitlines() == [learner, worked]
    assert kvcourse(["notebooks", "--check"]) == 0
    assert kvcourse(["notebooks", "--no-execute"]) == 0
    assert kvcourse(["notebooks", "--check"]) == 1
    assert f"{worked}: was built without running it" in capsys.readouterr().err


def test_notebooks_refuses_what_makes_no_sense(course, capsys):
    assert kvcourse(["notebooks", "--check", "--no-execute"]) == 1
    assert "--no-execute has no meaning" in capsys.readouterr().err
    assert kvcourse(["notebooks", "09"]) == 1
    assert "there is no notebook '09'; the notebooks are: none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("notebooks/src/03_new.py", b"# \xff", "is not text in UTF-8 (byte 2)"),
        ("pyproject.toml", b"\xff", "is not text in UTF-8"),
        ("pyproject.toml", b"[project", "is damaged: "),
        ("pyproject.toml", b"[tool]", "must have a [project] with a version"),
        ("pyproject.toml", b"project = 5", "must have a [project] with a version"),
        ("pyproject.toml", b'[project]\nversion = "0.1.0"', "must have a [project] with a version"),
    ],
)
def test_notebooks_names_a_damaged_file(course, capsys, file, content, message):
    (course / file).write_bytes(content)
    for arguments in ([], ["--check"]):
        assert kvcourse(["notebooks", *arguments]) == 1
        err = capsys.readouterr().err
        assert err.startswith(f"kvcourse: {course / file} {message}") and err.count("\n") == 1


def test_check_lists_a_file_that_is_no_notebook(course, capsys):
    (course / "notebooks" / "src" / "03_new.py").write_text(SOURCE)
    (course / "notebooks" / "03_new.ipynb").write_text("[]")
    assert kvcourse(["notebooks", "--check", "03"]) == 1
    name = str(Path("notebooks", "03_new.ipynb"))
    assert f"kvcourse: {name}: is not a valid notebook (" in capsys.readouterr().err
