"""A real server to measure: llama.cpp's, over HTTP, on this computer only and for as long as it is needed."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

import httpx
import torch

from kvcourse.bench.llama_cpp import check_installed
from kvcourse.require import require_flag, require_number, require_whole


@contextmanager
def llama_cpp_server(
    path,
    *,
    slots: int = 1,
    context: int = 2048,
    threads: int | None = None,
    float32_cache: bool = False,
    prefix_caching: bool = True,
    timeout: float = 120.0,
) -> Iterator[str]:
    """Serve a GGUF file inside a `with` block, which is given the server's URL.

    llama.cpp runs in a process of its own, on the CPU: whatever happens to it, this one goes on, and it ends with the
    block or with this process. It listens on 127.0.0.1 on a free port. `slots`: how many requests run at once, each
    with room for `context` tokens; `threads`: as many as PyTorch uses, by default. Keys and values are kept in float16,
    or in float32 as the course keeps them. `timeout` is how many seconds it may take to load.

    Raises `RuntimeError` when xllamacpp is not installed or the server does not start, `FileNotFoundError` when there
    is no such file.
    """
    check_installed()
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    settings = {
        "path": str(path.resolve()),
        "slots": require_whole("slots", slots),
        "context": require_whole("context", context),
        "threads": torch.get_num_threads() if threads is None else require_whole("threads", threads),
        "float32_cache": require_flag("float32_cache", float32_cache),
        "prefix_caching": require_flag("prefix_caching", prefix_caching),
    }
    timeout = require_number("timeout", timeout)
    with tempfile.TemporaryDirectory() as folder:
        said, log = Path(folder, "said"), Path(folder, "log")
        command = [sys.executable, "-m", "kvcourse.endpoint.server_process", str(said), json.dumps(settings)]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield _wait(process, said, log, path, timeout)
        finally:
            _end(process)


def _wait(process: subprocess.Popen, said: Path, log: Path, path: Path, timeout: float) -> str:
    """The server's URL, once it is healthy."""
    deadline = monotonic() + timeout
    while monotonic() < deadline:
        if process.poll() is not None:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            why = (
                lines[-1].strip().removeprefix("RuntimeError: ").rstrip(".")
                if lines
                else f"it ended with code {process.returncode}"
            )
            raise RuntimeError(f"llama.cpp cannot serve {path}: {why}.")
        if said.exists():
            url = said.read_text()
            with suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=1, trust_env=False).is_success:
                    return url
        sleep(0.02)
    raise RuntimeError(f"llama.cpp did not load {path} within {timeout:g} s.")


def _end(process: subprocess.Popen) -> None:
    process.stdin.close()  # which tells it to end
    try:
        process.wait(2)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
