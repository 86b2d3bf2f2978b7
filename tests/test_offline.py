"""The course in a room without wifi: with `KVCOURSE_OFFLINE=1` and nothing fetched, every notebook runs to its end."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import without_network

import kvcourse as kv
from kvcourse.entry import PRINTED
from kvcourse.notebooks.execute import execute, scratch_results
from kvcourse.notebooks.source import read_notebooks, read_project
from kvcourse.weights.fetch import find_source

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "notebooks" / "src").glob("*.py"))


@pytest.fixture
def room(tmp_path):
    """(environment, log): a place with no model fetched and no way out; the log has the attempts to leave it."""
    guard, log = without_network(tmp_path)
    models = tmp_path / "models"
    models.mkdir()
    with scratch_results() as env:
        yield env | guard | {"KVCOURSE_OFFLINE": "1", "KVCOURSE_MODELS": str(models)}, log


def printed(notebook) -> list[str]:
    """What each code cell printed."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return ["".join(out.get("text", "") for out in cell.outputs if out.get("name") == "stdout") for cell in code]


def results_of(notebook) -> tuple[set, set]:
    """The keys measured and the statements judged by the calls that stand in the notebook, as far as they are plain."""
    keys, statements = set(), set()
    for cell in notebook.cells:
        if cell.cell_type != "code" or "%pip" in cell.source:
            continue
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                first = node.args[0]
                if node.func.attr == "measure" and isinstance(first, ast.Constant):
                    keys.add(first.value)
                if node.func.attr == "verdict":
                    statements.add(str(first.value))
    return keys, statements


QUICK = ("00_start_here", "02_kv_cache", "06_paged_attention")  # of the chat model alone; caches; the engine
MARKED = [pytest.param(p, marks=[] if p.stem in QUICK else [pytest.mark.slow], id=p.stem) for p in SOURCES]


@pytest.mark.parametrize("source", MARKED)
def test_a_notebook_runs_without_network_and_says_on_what(source, room):
    env, log = room
    notebook = read_notebooks(source, read_project(ROOT)).solution
    done = execute(notebook, ROOT / "notebooks" / "solutions", source.stem, env, timeout=300)
    assert done.error is None
    assert not log.exists(), log.read_text()
    assert not any((Path(env["KVCOURSE_MODELS"])).iterdir())

    outputs = printed(notebook)
    said = " ".join(outputs[0].split())
    assert "smollm2-135m is not on this computer, so this notebook runs on tiny-gqa" in said
    assert "It is no chat model" in said and "at most 512 tokens" in said

    store = json.loads((Path(env["KVCOURSE_RESULTS"]) / "results.json").read_text())
    keys, statements = results_of(notebook)
    assert keys <= {key for key, entry in store["entries"].items() if entry["measured"] is not None}
    assert statements <= set(store["verdicts"])
    everything = "\n".join(outputs)
    numbers = PRINTED.findall(everything)
    verdicts = re.findall(r"(?m)^statement (\d+), .*$", everything)
    assert keys <= {key for key, _ in numbers} and statements <= set(verdicts) and keys | statements
    said = [value for _, value in numbers] + re.findall(r"(?m)^statement \d+, .*$", everything)
    assert not [words for words in said if re.search(r"(?i)\b(nan|inf|none)\b", words)]
    right, of = re.search(r"(\d+) of (\d+) right", everything).groups()
    assert right == of


def test_the_guard_refuses_and_writes_down(room):
    env, log = room
    for code in ("import urllib.request as u; u.urlopen('http://192.0.2.1', timeout=1)", "import kvcourse as kv"):
        result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert (result.returncode != 0) == ("urllib" in code), result.stderr
    assert log.read_text().strip() and "192.0.2.1" in log.read_text()


@pytest.mark.parametrize("variable", [None, "", "0"])
def test_nothing_is_said_with_a_network(monkeypatch, tmp_path, capsys, variable):
    monkeypatch.setenv("KVCOURSE_MODELS", str(tmp_path))
    monkeypatch.delenv("KVCOURSE_OFFLINE", raising=False)
    if variable is not None:
        monkeypatch.setenv("KVCOURSE_OFFLINE", variable)
    kv.announce_stand_in()
    assert capsys.readouterr().out == ""


def test_nothing_is_said_where_the_chat_model_is(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("KVCOURSE_MODELS", str(tmp_path))
    monkeypatch.setenv("KVCOURSE_OFFLINE", "1")
    kv.announce_stand_in()
    assert "runs on tiny-gqa" in capsys.readouterr().out  # the red partner
    find_source("smollm2-135m").path.write_bytes(b"here")
    kv.announce_stand_in()
    assert capsys.readouterr().out == ""


def test_another_value_is_refused(monkeypatch):
    monkeypatch.setenv("KVCOURSE_OFFLINE", "yes")
    with pytest.raises(ValueError, match="KVCOURSE_OFFLINE='yes' must be 1"):
        kv.announce_stand_in()
