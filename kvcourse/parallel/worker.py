"""What one rank does, in a process of its own: `python -m kvcourse.parallel.worker FOLDER RANK`.

It loads its part of the weights, meets the other ranks, writes the text with them, and leaves its figures in a file.
"""

import json
import os
import pickle
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from kvcourse.config import ModelConfig
from kvcourse.generation import make_cache
from kvcourse.parallel.shard import assemble

LOST = 3  # exit code: it was another rank that failed


@dataclass(frozen=True)
class Job:
    """What every rank is told; its weights lie beside it."""

    config: ModelConfig  # of a shard
    prompt: list[int]
    max_new_tokens: int
    world: int
    timeout: float  # seconds that a rank waits for the others


class Neighbours:
    """The other ranks, reached over gloo. Counts what is asked of them."""

    def __init__(self, folder: Path, rank: int, job: Job):
        self.all_reduces = self.reduced_bytes = 0
        store = dist.FileStore(str(folder / "store"), job.world)  # a file, so there is no port to clash
        wait = timedelta(seconds=job.timeout)
        reach(partial(dist.init_process_group, "gloo", store=store, rank=rank, world_size=job.world, timeout=wait))

    def all_reduce(self, term: Tensor) -> Tensor:
        """The sum of every rank's `term`, in its place."""
        self.all_reduces += 1
        self.reduced_bytes += term.nbytes
        reach(partial(dist.all_reduce, term))
        return term

    def broadcast(self, tokens: Tensor) -> Tensor:
        """What rank 0 has, in the place of what the others have."""
        reach(partial(dist.broadcast, tokens, src=0))
        return tokens


def reach(call: Callable) -> None:
    """Call the other ranks; when one of them is gone, end this process and say so by its exit code."""
    try:
        call()
    except RuntimeError as error:  # gloo: connection closed, or the time is over
        print(f"the other ranks could not be reached: {error}", file=sys.stderr, flush=True)
        os._exit(LOST)


def write(folder: Path, rank: int) -> dict:
    """Run this rank to the end; its figures, and the tokens that were made."""
    job: Job = pickle.loads((folder / "job").read_bytes())
    weights = load_file(folder / f"rank-{rank}.safetensors")
    neighbours = Neighbours(folder, rank, job)
    shard = assemble(job.config, weights, neighbours.all_reduce)
    cache = make_cache(shard, 1, len(job.prompt) + job.max_new_tokens - 1)
    tokens, made, start = torch.tensor([job.prompt]), [], perf_counter()
    for _ in range(job.max_new_tokens):
        logits = shard(tokens, cache=cache, last_only=True)
        # All ranks have the same logits but for rounding, which could decide a tie: rank 0 chooses for all.
        tokens = neighbours.broadcast(logits.argmax(-1))
        made.append(int(tokens))
    return {
        "tokens": made,
        "seconds": perf_counter() - start,
        "cache_bytes": cache.nbytes,
        "weight_bytes": sum(weight.nbytes for weight in shard.state_dict().values()),
        "all_reduces": neighbours.all_reduces,
        "reduced_bytes": neighbours.reduced_bytes,
    }


def end_with_parent() -> None:
    """Leave as soon as the program that started this one is gone, however it went: its end of the pipe is then shut."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    here, this = Path(sys.argv[1]), int(sys.argv[2])
    with torch.inference_mode():
        figures = write(here, this)
    (here / f"rank-{this}.json").write_text(json.dumps(figures), encoding="utf-8")
    dist.destroy_process_group()
