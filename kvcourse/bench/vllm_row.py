"""vLLM as a row of a table: another Python, which has it installed, is given the same model and the same prompts.

`VLLM` answers a batch of requests for `kvcourse bench --serving`, `VLLMText` one text at a time for the other table.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from kvcourse.bench.contestants import ROOM
from kvcourse.bench.process import Worker
from kvcourse.config import ModelConfig
from kvcourse.cost import bytes_moved
from kvcourse.device import as_dtype
from kvcourse.lm import LM, load_model
from kvcourse.weights.hf_export import export_hf

DTYPES = ("bfloat16", "float32")
TITLES = [f"vllm {dtype}" for dtype in DTYPES]
SCRIPT = Path(__file__).with_name("vllm_worker.py")
FIND = "import importlib.util as u; print(u.find_spec('vllm') is not None)"
SAFE = {"PYTHONSAFEPATH": "1"}  # a file of the current folder must not take the place of a library with its name


class VLLM:
    """The checkpoint in `folder`, held by vLLM in a process of its own, which computes in `dtype`."""

    means = "vLLM in another Python, eager, with as many threads, over the same weights"

    def __init__(self, python: str, folder: str, dtype: str, max_len: int):
        self.title = f"vllm {dtype}"
        self.worker = VLLMWorker(python, folder, dtype, max_len)
        try:
            self.program = self.worker.answer()["program"]
        except BaseException:
            self.close()
            raise

    def write(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], float]:
        answer = self.worker.ask(prompts=prompts, new_tokens=new_tokens)
        return answer["tokens"], answer["seconds"]

    def close(self) -> None:
        self.worker.close()


class VLLMWorker(Worker):
    def __init__(self, python: str, folder: str, dtype: str, max_len: int):
        self.start([python, str(SCRIPT), folder, dtype, str(max_len)], settings() | os.environ | SAFE)

    def close(self) -> None:
        """Let it end by itself, so that processes it started end too; a silent one is killed."""
        try:
            self.process.stdin.close()
            self.process.wait(timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            pass
        super().close()


class VLLMText:
    """A contestant of the race: one text at a time. `folder` has the checkpoint, `config` its numbers."""

    exact = False
    texts = 1

    def __init__(self, python: str, folder: str, dtype: str, config: ModelConfig):
        self.title, self.python, self.folder, self.dtype, self.config = f"vllm {dtype}", python, folder, dtype, config

    def start(self, name: str) -> "OneTextWorker":
        return OneTextWorker(self)


class OneTextWorker(VLLMWorker):
    """vLLM asked as the race asks a contestant."""

    def __init__(self, row: VLLMText):
        self.row = row
        super().__init__(row.python, row.folder, row.dtype, min(ROOM, row.config.max_seq_len))

    def answer(self) -> dict:
        return {"means": VLLM.means, "weights": self.row.dtype} | super().answer()

    def ask(self, measure: str, prompt: list[int] = (), most_gaps: int = 0) -> dict:
        if measure != "speed":
            return {measure: None}
        super().ask(prompts=[prompt[:1]], new_tokens=4)
        answer = super().ask(prompt=prompt, new_tokens=most_gaps + 1)
        bits = 8 * as_dtype(self.row.dtype).itemsize
        moved = bytes_moved(self.row.config, 1, len(prompt), bits=bits)
        wanted = {name: answer[name] for name in ("tokens", "arrivals", "peak_bytes")}
        return wanted | {"step_bytes": moved.total}


@contextmanager
def vllm_texts(python: str, name: str) -> Iterator[list[VLLMText]]:
    """vLLM with the model `name`, in bfloat16 and in float32. Nothing is started yet."""
    model = load_model(name).model
    with TemporaryDirectory() as folder:
        export_hf(LM(model, None, "model"), folder)
        yield [VLLMText(python, folder, dtype, model.config) for dtype in DTYPES]


def settings() -> dict[str, str]:
    """What vLLM is told besides; variables of the environment come first.

    As many threads as PyTorch has here. By itself vLLM leaves one core to its scheduler, so that of two cores one
    computes, and its scheduler runs in a process that looks for work even while others have their turn. Here both are
    in one process, as the course's are.
    """
    return {
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def require_vllm(python: str) -> str:
    """`python` if it is a Python that can find vLLM, else `ValueError`. vLLM is not loaded yet."""
    try:
        found = subprocess.run(
            [python, "-c", FIND], env=os.environ | SAFE, capture_output=True, text=True, errors="replace", timeout=60
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        cause = getattr(error, "strerror", None) or "it does not answer"
        raise ValueError(f"--vllm {python} cannot be run ({cause}): give a Python that has vLLM installed.") from error
    if found.stdout.strip() == "False":
        raise ValueError(f"--vllm {python} is a Python without vLLM: install it there, or give one that has it.")
    if found.stdout.strip() != "True":
        raise ValueError(f"--vllm {python} does not answer as a Python does: give a Python that has vLLM installed.")
    return python
