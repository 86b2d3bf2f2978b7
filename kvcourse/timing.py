"""How long a piece of code takes: the median of many runs, the first ones not counted."""

from collections.abc import Callable

import torch
from torch.utils.benchmark import Timer


def median_time(fn: Callable[[], object], min_run_time: float = 0.2) -> float:
    """Median seconds of one call of `fn`, run again and again for at least `min_run_time` seconds in all.

    PyTorch's own timer does the work: it warms up first, waits for the GPU, and keeps the number of threads the
    program uses. A single run says little: another program may have had the processor for a moment.
    """
    timer = Timer(stmt="fn()", globals={"fn": fn}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=min_run_time).median
