"""What `pip install` installs: the whole package with the course's data in it, usable far from the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel, built by what pyproject.toml names, without the network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [path] = folder.glob("*.whl")
    return path


def files_below(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_package_and_data_are_in_it_byte_for_byte(wheel):
    expected = {f"kvcourse/{name}": content for name, content in files_below(ROOT / "kvcourse").items()}
    expected |= {f"kvcourse/data/{name}": content for name, content in files_below(ROOT / "data").items()}
    with zipfile.ZipFile(wheel) as archive:
        found = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    assert sorted(found) == sorted(expected)
    assert found == expected
    assert "kvcourse/data/models/tiny-gqa/model.safetensors" in found and "kvcourse/cli/main.py" in found


CODE = """
import socket
def refuse(*args, **kwargs):
    raise AssertionError("the network was used")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
import kvcourse as kv
from kvcourse.weights.shipped import SHIPPED, altered
print(kv.__file__)
for name in SHIPPED:
    lm = kv.load_model(name, device="cpu")
    print(lm.name, altered(name), len("".join(lm.stream("Once", 5))) > 0)
"""


def test_an_installed_wheel_loads_the_course_s_models_without_the_checkout(wheel, tmp_path):
    """As pip does it: unpacked onto Python's path."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    env = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    where, *models = done.stdout.splitlines()
    assert Path(where).is_relative_to(tmp_path)
    assert models == [f"{name} [] True" for name in ("tiny-mha", "tiny-gqa", "tiny-mqa", "tiny-window")]
