"""The ranks as processes of this machine: started, watched, ended. In production each has a GPU of its own."""

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file

from kvcourse.lm import LM
from kvcourse.model import Transformer
from kvcourse.parallel.shard import plain, shard_config, shard_weights
from kvcourse.parallel.worker import LOST, Job
from kvcourse.require import require_number, require_whole
from kvcourse.texts import Prompt, Texts


@dataclass(frozen=True)
class ParallelRun:
    """What several ranks wrote together, and what each of them held and sent."""

    tokens: list[int]  # the new ones
    cache_bytes: list[int]  # allocated, for each rank
    weight_bytes: list[int]
    all_reduces: int  # by each rank: two for each layer of each forward pass
    sent_bytes: float  # by each rank for one token that went through the layers, around a ring; as `sent_bytes` says
    seconds: float  # from the prompt to the last token, without starting the processes and loading the weights


def run_parallel(
    model: LM | Transformer, prompt: Prompt, max_new_tokens: int, world: int = 2, timeout: float = 600
) -> ParallelRun:
    """Write `max_new_tokens` tokens greedily on `world` processes, each with its part of the model (`split`).

    The processes are Python's own with this package, whatever program calls; each reads its weights from a file in the
    temporary folder (together somewhat more than the model), and they meet over gloo on this machine alone. They are
    gone when this returns or raises, and share the threads that PyTorch has here. Raises `ValueError` before any work
    when something is out of range, the model is not on the CPU or cannot be shared out by so many, and `RuntimeError`
    when a process ends early, or all is not done after `timeout` seconds.
    """
    model = plain(model)
    config = shard_config(model.config, world)
    if model.device.type != "cpu":
        raise ValueError(
            f'run_parallel runs on the CPU, and the model is on {model.device}: load it with device="cpu".'
        )
    texts = Texts(model, prompt, require_whole("max_new_tokens", max_new_tokens))
    if not texts.single:
        raise ValueError(f"run_parallel writes one text, and {len(texts.rows)} prompts were given: call it for each.")
    job = Job(config, texts.rows[0].prompt, texts.max_new_tokens, world, require_number("timeout", timeout))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcourse-parallel-")))
        (folder / "job").write_bytes(pickle.dumps(job))
        for rank in range(world):
            save_file(shard_weights(model, rank, world), folder / f"rank-{rank}.safetensors")
        ranks = Ranks(folder, world)
        stack.callback(ranks.end)
        ranks.start()
        ranks.wait(timeout)
        figures = [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(world)]
    first, rows = figures[0], len(job.prompt) + job.max_new_tokens - 1
    return ParallelRun(
        tokens=first["tokens"],
        cache_bytes=[each["cache_bytes"] for each in figures],
        weight_bytes=[each["weight_bytes"] for each in figures],
        all_reduces=first["all_reduces"],
        sent_bytes=first["reduced_bytes"] / rows * 2 * (world - 1) / world,
        seconds=first["seconds"],
    )


class Ranks:
    """The processes of one run."""

    def __init__(self, folder: Path, world: int):
        self.folder, self.world = folder, world
        self.processes: list[subprocess.Popen] = []

    def start(self) -> None:
        threads = max(1, torch.get_num_threads() // self.world)
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": loopback()}
        for rank in range(self.world):
            # -P: a file of the current folder must not take the place of a library with its name
            command = [sys.executable, "-P", "-m", "kvcourse.parallel.worker", str(self.folder), str(rank)]
            with open(self.messages(rank), "wb") as said:  # the pipe tells a rank when this process is gone
                self.processes.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=said, stderr=said, env=env)
                )

    def messages(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.txt"

    def wait(self, timeout: float) -> None:
        """Until all have ended well. Raises `RuntimeError` as soon as one has not, and when the time is over."""
        over = time.monotonic() + timeout
        while (codes := [process.poll() for process in self.processes]) != [0] * self.world:
            if any(codes):
                raise RuntimeError(self.what_happened())
            if time.monotonic() > over:
                raise RuntimeError(
                    f"{self.world} ranks were not done after {timeout:g} seconds and were stopped: give a longer "
                    "timeout, or ask for fewer tokens."
                )
            time.sleep(0.02)

    def what_happened(self) -> str:
        """Which rank failed and why. The others lose touch with it at once: that they did is no cause."""
        for _ in range(100):
            codes = {rank: code for rank, process in enumerate(self.processes) if (code := process.poll())}
            guilty = [rank for rank, code in codes.items() if code != LOST]
            if guilty:
                break
            time.sleep(0.02)
        rank = (guilty or list(codes))[0]
        if codes[rank] < 0:
            cause = f"was killed by signal {-codes[rank]}"
            cause += ", most often for want of memory" if codes[rank] == -9 else ""
        else:
            said = self.messages(rank).read_text(encoding="utf-8", errors="replace").strip().split("\n")[-1]
            cause = f"ended with exit code {codes[rank]}" + (f" ({said})" if said else "")
        return f"Rank {rank} of {self.world} {cause}; the other ranks were stopped and nothing was written."

    def end(self) -> None:
        """End all that still run, and wait until they are gone."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            process.stdin.close()


def loopback() -> str:
    """The network interface that reaches this machine alone: "lo" on Linux, "lo0" on macOS."""
    addresses = psutil.net_if_addrs().items()
    return next(name for name, known in addresses if any(a.address == "127.0.0.1" for a in known))
