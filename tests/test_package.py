"""The package as a whole: what importing it costs, which room may know which, and life without a network."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvcourse as kv

PACKAGE = Path(kv.__file__).parent

# Lowest floor first: a room imports only from its own floor and from those before it.
FLOORS = [
    {
        "require",
        "config",
        "rope",
        "device",
        "paths",
        "timing",
        "store",
        "reading",
        "model_folder",
        "text_files",
        "statements",
        "offline",
        "shape",
        "published",
        "evaluation",
        "entry",
        "scoring",
        "expected",
    },
    {
        "layers",
        "tokenizer",
        "cost",
        "capacity",
        "roof",
        "context_cost",
        "gqa",
        "mla",
        "serving.blocks",
        "serving.prefix",
    },
    {"serving.scheduler", "serving.workload", "serving.snapshot", "serving.bill"},
    {"quant.grid", "quant.packing", "quant.statistics"},
    {"quant.tensor", "quant.gguf_blocks"},
    {"quant.gptq", "quant.awq"},
    {"caches"},
    {"model"},
    {"weights", "sampling", "metrics"},
    {"texts", "generation"},
    {"lm", "results", "serving"},
    {
        "bench",
        "plots",
        "widgets",
        "check",
        "notebooks",
        "quality",
        "quant",
        "training",
        "uptraining",
        "parallel",
        "fast",
    },
    {"endpoint", "site"},
    {"cli", "workshop", "__main__"},  # a seat is checked as `kvcourse doctor` does, and more
]


# `from_hf` of a config reads a file, and `load_model` compiles, with what stands far above them, when they are called.
READS = {"config": {"weights"}, "shape": {"weights"}, "lm": {"fast"}}


def floor_of(room: str) -> int:
    return next(i for i, rooms in enumerate(FLOORS) if room in rooms)


def room_of(module: str) -> str:
    """The room of a module such as "kvcourse.caches.dense". A file of `serving` may be a room of its own, since the
    books that it keeps need no model and the engine does."""
    parts = module.split(".")[1:3]
    return ".".join(parts) if any(".".join(parts) in rooms for rooms in FLOORS) else parts[0]


def imports_of(path: Path) -> set[str]:
    """Rooms of this package that a file imports, inside functions too."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kvcourse"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("kvcourse")]
        rooms |= {room_of(name) for name in names if "." in name}
    return rooms - {"__version__"}


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_a_room_imports_only_from_floors_below(path):
    room = room_of(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
    for other in imports_of(path) - READS.get(room, set()):
        assert floor_of(other) <= floor_of(room), f"{room} must not import {other}"


def run(code: str, **env) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_loads_nothing_heavy():
    heavy = "torch matplotlib ipywidgets gguf tokenizers transformers IPython jinja2 numpy"
    code = f"import sys, kvcourse; print([m for m in '{heavy}'.split() if m in sys.modules])"
    assert run(code).strip() == "[]"


def test_using_the_model_needs_torch_only():
    code = (
        "import sys, kvcourse as kv; kv.Transformer; kv.generate; kv.DenseCache;"
        "print([m for m in 'matplotlib ipywidgets gguf tokenizers transformers'.split() if m in sys.modules])"
    )
    assert run(code).strip() == "[]"


def test_import_time_is_printed(capsys):
    code = "import time, torch; t = time.perf_counter(); import kvcourse; print(time.perf_counter() - t)"
    with capsys.disabled():
        print(f"\nimport kvcourse: {float(run(code)):.3f} s over import torch")


def test_every_public_name_exists_and_none_hides_a_module():
    for name in kv.__all__:
        assert getattr(kv, name) is not None
    modules = {path.stem for path in PACKAGE.glob("*.py")} | {
        path.parent.name for path in PACKAGE.glob("*/__init__.py")
    }
    functions = set(kv.__all__) - set(kv._MODULES)
    assert not functions & modules, "importing the module would replace the function"
    with pytest.raises(AttributeError, match="no_such_name"):
        kv.no_such_name  # noqa: B018


@pytest.mark.skipif("PYTEST_XDIST_WORKER_COUNT" not in os.environ, reason="no other worker shares the cores")
def test_workers_share_the_cores():
    """Two workers with two threads each on two cores made every notebook several times slower."""
    share = max(1, os.cpu_count() // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    assert int(os.environ["OMP_NUM_THREADS"]) <= share
    assert int(run("import torch; print(torch.get_num_threads())")) <= share


@pytest.mark.smollm2
def test_no_network_is_used_once_the_model_is_fetched():
    code = """
import socket
def refuse(*args, **kwargs):
    raise AssertionError("the network was used")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
import kvcourse as kv
lm = kv.load_model("smollm2-135m", device="cpu")
print("".join(lm.stream("Say hello.", max_new_tokens=5)))
"""
    assert run(code).strip()
