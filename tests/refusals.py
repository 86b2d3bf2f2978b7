"""What a test may refuse to a kernel: the network, and, even to root, writing into folders that are closed."""

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

# Python runs this at its start when it finds it on its path: whoever leaves this computer is refused and written down.
NO_NETWORK = """
import socket

connect, look_up = socket.socket.connect, socket.getaddrinfo

def refuse(place):
    with open({log!r}, "a") as log:
        print(place, file=log)
    raise OSError(f"no network in this test: {{place}}")

def guarded_connect(self, address):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
        refuse(address)
    return connect(self, address)

def guarded_look_up(host, *args, **kwargs):
    if host not in (None, "127.0.0.1", "::1", "localhost"):
        refuse(host)
    return look_up(host, *args, **kwargs)

socket.socket.connect, socket.getaddrinfo = guarded_connect, guarded_look_up
"""


def without_network(folder: Path) -> tuple[dict, Path]:
    """(environment, log): what to add to the environment of a Python that must not leave this computer, and the file
    that has its attempts, if there are any. Both live in `folder`."""
    log = folder / "attempts"
    (folder / "sitecustomize.py").write_text(NO_NETWORK.format(log=str(log)))
    return {"PYTHONPATH": python_path(folder)}, log


def python_path(*folders: Path) -> str:
    """`PYTHONPATH` with these folders first."""
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")]))


def ordinary_python(folder: Path) -> str:
    """A Python for which folders closed to writing are closed. Root may write everywhere; `setpriv` takes that right
    away. Skips the test on a system where neither is so."""
    if os.name != "posix":
        pytest.skip("chmod does not close a folder on Windows")
    if os.geteuid() != 0:
        return sys.executable
    if not shutil.which("setpriv"):
        pytest.skip("root may write everywhere, and there is no setpriv to take that right away")
    python = folder / "python"
    command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", sys.executable]
    python.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    python.chmod(0o755)
    return str(python)


def close(folder: Path, writable: bool = False) -> None:
    """Close a folder, and all that is in it, to writing; or open it again, so that it can be removed."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod((0o755 if writable else 0o555) if path.is_dir() else (0o644 if writable else 0o444))
