"""Tensor parallelism: every layer of one model cut over several processes, which add up what each has worked out.

`shard`: which part of each matrix a rank holds; `run`: the processes started, watched and ended; `worker`: what each
of them does.
"""

from kvcourse.parallel.run import ParallelRun, run_parallel
from kvcourse.parallel.shard import sent_bytes, split

__all__ = ["ParallelRun", "run_parallel", "sent_bytes", "split"]
