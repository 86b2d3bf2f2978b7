"""Run a notebook from top to bottom in a fresh kernel, with a progress bar, a clock and a memory gauge."""

import asyncio
import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from tqdm.auto import tqdm

from kvcourse.notebooks.source import where


@dataclass
class Execution:
    """What came of running a notebook; `error` is None, or a sentence naming cell and exception."""

    name: str
    cells: int
    seconds: float = 0.0
    peak_bytes: int = 0
    error: str | None = None


class _Client(NotebookClient):
    """A client whose kernel runs in this very Python, whichever one the computer's `python3` kernel names."""

    def create_kernel_manager(self):
        manager = super().create_kernel_manager()
        manager.kernel_spec.argv[0] = sys.executable
        return manager


@contextmanager
def scratch_results():
    """An environment for kernels whose guesses and measurements must not end up among the learner's own."""
    with tempfile.TemporaryDirectory(prefix="kvcourse-results-", ignore_cleanup_errors=True) as folder:
        yield {**os.environ, "KVCOURSE_RESULTS": folder}


def execute(
    notebook: NotebookNode, folder: Path, name: str, env: dict, timeout: int | None = None, record_timing: bool = False
) -> Execution:
    """Fill in the outputs of `notebook`, run as if it lay in `folder`; a cell may take `timeout` seconds. With
    `record_timing` each cell's metadata says when it ran.

    The first failing cell ends the run and is described in the returned `Execution`, not raised.
    """
    number = 0
    done = Execution(name, sum(cell.cell_type == "code" for cell in notebook.cells))
    bar = tqdm(total=done.cells, desc=name, unit="cell", leave=False)

    def kernel_started(notebook):
        gauge.watch(client.km.provisioner.pid)
        # Give Ctrl-C its usual meaning back: nbclient's own handler ends in a traceback.
        with suppress(NotImplementedError):  # Windows, where nbclient has none
            asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    def cell_started(cell, cell_index):
        nonlocal number
        number = cell_index + 1

    client = _Client(
        notebook,
        kernel_name="python3",
        extra_arguments=["--IPKernelApp.log_level=50"],  # its advice and last words are not the reader's business
        timeout=timeout,
        resources={"metadata": {"path": str(folder)}},
        record_timing=record_timing,
        store_widget_state=False,
        coalesce_streams=True,
        on_cell_start=cell_started,
        on_cell_executed=lambda **_: bar.update(),
        on_notebook_start=kernel_started,
    )
    begun = time.perf_counter()
    with bar, _Gauge() as gauge:
        try:
            client.execute(env=env)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            done.error = f"{where(name, number, notebook.cells[number - 1])}: {_reason(error, timeout)}"
    done.seconds, done.peak_bytes = time.perf_counter() - begun, gauge.peak
    return done


def _reason(error: Exception, timeout: int | None) -> str:
    if isinstance(error, CellExecutionError):
        return f"{error.ename}: {error.evalue}"
    if isinstance(error, CellTimeoutError):
        return f"not done after {timeout} s"
    return "the kernel died, most often for want of memory"


class _Gauge:
    """The most memory that a process and its children held together, looked at ten times a second."""

    def __init__(self):
        self.peak, self._thread, self._stop = 0, None, threading.Event()

    def watch(self, pid: int) -> None:
        self._thread = threading.Thread(target=self._poll, args=(pid,), daemon=True)
        self._thread.start()

    def _poll(self, pid: int) -> None:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            while True:
                self.peak = max(self.peak, _resident(process))
                if self._stop.wait(0.1):
                    return

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stop.set()
        if self._thread:
            self._thread.join()


def _resident(process: psutil.Process) -> int:
    total = process.memory_info().rss
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            total += child.memory_info().rss
    return total
