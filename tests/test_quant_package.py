"""What `kvcourse.quant` offers: functions that share their module's name, and imports that run in no circle."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import kvcourse.quant as quant

FIRST = ("caches", "model", "quant.gptq", "quant.awq", "quant.linear", "quant.quantize", "quant.files", "quant.tensor")

IMPORT_EACH_FIRST = f"""
import importlib, sys, torch
for first in {FIRST}:
    for name in [name for name in sys.modules if name.split(".")[0] == "kvcourse"]:
        del sys.modules[name]
    importlib.import_module("kvcourse." + first)
    quant = importlib.import_module("kvcourse.quant")
    for name in quant.__all__:
        value = getattr(quant, name)
        assert callable(value), (first, name, value)
print("done")
"""


@pytest.mark.parametrize("name", ["awq", "gptq"])
def test_a_function_with_the_name_of_its_module_stays_a_function(name):
    module = import_module(f"kvcourse.quant.{name}")
    assert getattr(quant, name) is getattr(module, name) and callable(getattr(quant, name))


def test_no_other_public_name_is_the_name_of_a_module():
    modules = {path.stem for folder in quant.__path__ for path in Path(folder).glob("*.py")}
    assert modules & set(quant.__all__) == {"awq", "gptq"}


def test_whatever_is_imported_first_every_public_name_is_found():
    """In a process of its own, with all of `kvcourse` forgotten each time: circles show only in some orders."""
    found = subprocess.run([sys.executable, "-c", IMPORT_EACH_FIRST], capture_output=True, text=True)
    assert found.stdout == "done\n", found.stderr


def test_names_are_listed_and_others_are_refused():
    assert set(quant.__all__) <= set(dir(quant))
    with pytest.raises(AttributeError, match="'kvcourse.quant' has no attribute 'gguf'"):
        _ = quant.gguf
