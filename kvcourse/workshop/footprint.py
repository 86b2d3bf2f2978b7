"""What one learner takes on a shared server: a JupyterLab of their own, with one notebook run from top to bottom.

Everything is started as a hub starts it, and the whole tree of processes is watched. Two memories are given: resident
counts pages that several learners would share (PyTorch's own code) for each of them, private does not. A server for
many needs something between their sums, nearer to the private one.
"""

import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request, urlopen

import psutil

from kvcourse.notebooks.build import read
from kvcourse.notebooks.execute import scratch_results
from kvcourse.workshop.check import run

PATIENCE = 120  # seconds for JupyterLab to start
RUNTIME = "JUPYTER_RUNTIME_DIR"  # where a server notes its address, and files of its kernels
PLACES = (RUNTIME, "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR")
PLACES += ("IPYTHONDIR",)
SETTLE = 3  # seconds of doing nothing before the server is measured


class Footprint(NamedTuple):
    """Bytes and seconds of one learner; `error` is None, or what the first failing cell said."""

    name: str
    server: int
    resident: int
    private: int
    seconds: float
    cpu_seconds: float
    error: str | None

    def __str__(self):
        memory = f"{self.server / 1e9:>7.2f}  {self.resident / 1e9:>9.2f}  {self.private / 1e9:>8.2f}"
        busy = self.cpu_seconds / self.seconds
        return f"{self.name:<28}{memory}  {self.seconds:>7.0f}  {busy:>10.2f}  {self.error or 'ok'}"


HEAD = f"{'one learner':<28}{'server':>7}  {'resident':>9}  {'private':>8}  {'seconds':>7}  {'cores busy':>10}   (GB)"


def footprint(path: Path) -> Footprint:
    """Run the notebook at `path` in the kernel of a JupyterLab started for it. Raises `RuntimeError` when that does not
    start."""
    cells = [cell.source for cell in read(path, as_version=4).cells if cell.cell_type == "code"]
    token = secrets.token_hex(16)
    with (
        scratch_results() as env,
        tempfile.TemporaryDirectory(prefix="kvcourse-lab-", ignore_cleanup_errors=True) as scratch,
        jupyterlab(path.parent, Path(scratch), token, **env) as (process, address),
    ):
        time.sleep(SETTLE)
        with Watch(process.pid) as idle:
            time.sleep(1)
        kernel = open_session(address, token, path.name)
        with connected(kernel, Path(scratch, RUNTIME.lower())) as client, Watch(process.pid) as watch:
            begun, error = time.perf_counter(), None
            for cell in cells:
                _, error = run(client, cell, patience=3600)
                if error:
                    break
            seconds = time.perf_counter() - begun
    return Footprint(path.stem, idle.resident, watch.resident, watch.private, seconds, watch.cpu_seconds, error)


@contextmanager
def jupyterlab(folder: Path, scratch: Path, token: str, **variables: str):
    """A JupyterLab on `folder`, its process and its address; `token` opens it. All that it keeps goes to `scratch`;
    `variables` are added to the environment that its kernels inherit. Raises `RuntimeError` when it does not start."""
    environment = os.environ | variables | {place: str(scratch / place.lower()) for place in PLACES}
    options = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.port": 0,
        "ServerApp.root_dir": folder,
        "IdentityProvider.token": token,
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += [f"--{name}={value}" for name, value in options.items()]
    with open(scratch / "jupyterlab.log", "w") as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
        try:
            yield process, _address(process, scratch / RUNTIME.lower())
        finally:
            with suppress(psutil.NoSuchProcess):
                for child in [*psutil.Process(process.pid).children(recursive=True), process]:
                    with suppress(psutil.NoSuchProcess):
                        child.terminate()
            process.wait()


def _address(process: subprocess.Popen, runtime: Path) -> str:
    """Where the server answers, from the file that it writes when it does."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        for path in runtime.glob("jpserver-*.json"):
            with suppress(ValueError):  # half written
                return json.loads(path.read_text(encoding="utf-8"))["url"].rstrip("/").replace("localhost", "127.0.0.1")
        time.sleep(0.1)
    raise RuntimeError("JupyterLab did not start: run `kvcourse lab --no-browser` to see why.")


def open_session(address: str, token: str, notebook: str) -> str:
    """Start a kernel for a notebook, as JupyterLab does when it opens one; return its id."""
    body = {"path": notebook, "name": notebook, "type": "notebook", "kernel": {}}
    request = Request(f"{address}/api/sessions", json.dumps(body).encode(), {"Authorization": f"token {token}"})
    with urlopen(request, timeout=PATIENCE) as reply:
        return json.load(reply)["kernel"]["id"]


@contextmanager
def connected(kernel: str, runtime: Path):
    """A client of a kernel that a server on this computer has started."""
    from jupyter_client import BlockingKernelClient, find_connection_file

    client = BlockingKernelClient(connection_file=find_connection_file(f"kernel-{kernel}.json", [str(runtime)]))
    client.load_connection_file()
    client.start_channels()
    try:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                client.wait_for_ready(timeout=PATIENCE)
                break
            except RuntimeError:  # on a busy computer a heart that beats late is taken for a stopped one
                if time.monotonic() > end:
                    raise
        yield client
    finally:
        client.stop_channels()


class Watch:
    """The most memory that a tree of processes held at once, and the seconds of processor it took, while open."""

    def __init__(self, pid: int):
        self.root, self.resident, self.private = psutil.Process(pid), 0, 0
        self._before, self._used = {}, {}  # seconds of processor by process
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._poll, daemon=True)

    @property
    def cpu_seconds(self) -> float:
        return sum(used - self._before.get(pid, 0) for pid, used in self._used.items())

    def _poll(self) -> None:
        while True:
            self._look()
            if self._stop.wait(0.5):
                return

    def _look(self) -> None:
        resident = private = 0
        for process in [self.root, *self.root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                memory, times = process.memory_full_info(), process.cpu_times()
                resident, private = resident + memory.rss, private + memory.uss
                self._used[process.pid] = times.user + times.system
        self.resident, self.private = max(self.resident, resident), max(self.private, private)

    def __enter__(self):
        self._look()
        self._before = dict(self._used)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        self._look()
