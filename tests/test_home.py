"""A home folder that nobody may write to, and a damaged file of results in it: the course says so once and goes on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import close, ordinary_python

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the folders in a home have other names")

LESSON = """
import kvcourse as kv
kv.results.predict("01.gap", 2)
kv.results.measure("01.gap", 3)
kv.check.progress()
kv.results.summary("01")
lm = kv.load_model("smollm2-135m")
print("loaded", lm.name, kv.results.get("01.gap").measured)
"""


@pytest.fixture
def home(tmp_path):
    """A home folder with a file of results, which holds no JSON; whoever tests with it closes it."""
    folder = tmp_path / "home"
    results = folder / ".local" / "share" / "kvcourse"
    results.mkdir(parents=True)
    (results / "results.json").write_text("{ this is no JSON")
    yield folder
    close(folder, writable=True)


def run(home: Path, tmp_path: Path, **variables: str) -> subprocess.CompletedProcess:
    """A lesson of a learner who has this home folder, and has set nothing but `variables`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVCOURSE_", "XDG_"))}
    env = kept | {"HOME": str(home), "PYTHONPATH": str(ROOT)} | variables
    command = [ordinary_python(tmp_path), "-c", LESSON]
    return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=240)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_in_a_closed_home_results_last_until_the_end_and_the_small_model_runs(home, tmp_path):
    close(home)
    done = run(home, tmp_path, KVCOURSE_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Results cannot be kept in") == 1 and "set KVCOURSE_RESULTS to a folder" in done.stdout
    assert "loaded tiny-gqa 3" in done.stdout
    assert files(home) == ["results.json"]


def test_in_a_closed_home_the_download_is_refused_with_what_to_do(home, tmp_path):
    close(home)
    done = run(home, tmp_path)
    assert done.returncode != 0 and "loaded" not in done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: The model smollm2-135m is not on this computer and could not be downloaded")
    assert "cannot be written to (Permission denied); set KVCOURSE_MODELS to another folder" in last
    assert "KVCOURSE_OFFLINE=1" in last


def test_in_an_open_home_the_damaged_file_is_set_aside(home, tmp_path):
    """The partner: nothing is said of a place where results cannot be kept, and they are."""
    done = run(home, tmp_path, KVCOURSE_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is damaged. It is kept as results.damaged-1.json") == 1
    assert "cannot be kept" not in done.stdout and "loaded tiny-gqa 3" in done.stdout
    kept = home / ".local" / "share" / "kvcourse"
    assert (kept / "results.damaged-1.json").read_text() == "{ this is no JSON"
    assert '"measured": 3' in (kept / "results.json").read_text()
