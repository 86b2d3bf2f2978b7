"""Where the time of a decode step goes: PyTorch's profiler over some steps of an engine whose texts all decode.

The profiler sees PyTorch's operations; parts of the package are marked for the occasion, so that an operation counts
for the part that asked for it. What no operation took is Python's time.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from statistics import median
from time import perf_counter
from unittest.mock import patch

from torch.autograd.profiler import profile, record_function

from kvcourse.bench.batches import make_engine
from kvcourse.caches import block_attention
from kvcourse.caches.packed import PackedStep
from kvcourse.caches.pages import Pages
from kvcourse.model import Layer, Transformer

MARK = "kvcourse: "
LINEAR, SMALL, REST = "linear layers", "norms, rotary, activations", "Python and the rest"
ATTENTION, COPIES, HEAD = "attention", "gather and scatter of pages", "head"
PARTS = (LINEAR, ATTENTION, COPIES, HEAD, SMALL, REST)
MARKED = [  # the innermost counts; of a layer's operations outside the others the linear ones are told apart
    (Layer, "forward", SMALL),
    (PackedStep, "attend", ATTENTION),
    (Pages, "store", COPIES),
    (block_attention, "side_by_side", COPIES),
    (Transformer, "head", HEAD),
]


def measure_step(model: Transformer, prompts: list[list[int]], steps: int) -> dict:
    """`steps` decode steps without and then with the profiler: seconds of a step, and of each part of it.

    Raises `ValueError` for a model on a GPU, whose time the CPU's clock does not see.
    """
    if model.device.type != "cpu":
        raise ValueError(f"The parts of a step are timed on the CPU, and this model is on {model.device}.")
    new_tokens = 2 * steps + len(prompts) + 4  # enough for the first to go on while the last are prefilled
    engine = make_engine(model, prompts, new_tokens)
    for prompt in prompts:
        engine.submit(prompt, new_tokens)
    while len(engine.step()) < len(prompts):
        pass
    engine.step()
    plain = median(timed(engine.step) for _ in range(steps))
    with marks(), profile(use_kineto=False) as profiler:  # Kineto, for GPUs, would print lines of its own
        seconds = sum(timed(engine.step) for _ in range(steps))
    return {
        "size": len(prompts),
        "context": engine.plan.chunks[-1].stop,  # tokens of the text that was prefilled last
        "steps": steps,
        "seconds": plain,
        "profiled_seconds": seconds / steps,
        "parts": parts(profiler.function_events, seconds, steps),
    }


def timed(call: Callable[[], object]) -> float:
    before = perf_counter()
    call()
    return perf_counter() - before


@contextmanager
def marks() -> Iterator[None]:
    """Inside, the profiler is told where the `MARKED` functions begin and end."""
    with ExitStack() as stack:
        for owner, name, part in MARKED:
            stack.enter_context(patch.object(owner, name, marked(getattr(owner, name), part)))
        yield


def marked(function: Callable, part: str) -> Callable:
    @wraps(function)
    def run(*arguments, **options):
        with record_function(MARK + part):
            return function(*arguments, **options)

    return run


def parts(events: Iterable, seconds: float, steps: int) -> list[dict]:
    """For each of `PARTS` the seconds and operations of one step, and its share of the `seconds` that all took.

    Of an operation that calls others only the outermost counts. The rest is what the others leave of the measured time:
    Python between operations, choosing tokens, the books of the pages, and the profiler itself.
    """
    found = {part: [0.0, 0] for part in PARTS}
    for event in events:
        caller = event.cpu_parent
        while caller is not None and not is_operation(caller) and not caller.name.startswith(MARK):
            caller = caller.cpu_parent
        if is_operation(event) and caller is not None and caller.name.startswith(MARK):
            part = caller.name.removeprefix(MARK)
            part = LINEAR if (part, event.name) == (SMALL, "aten::linear") else part
            found[part][0] += event.cpu_time_total / 1e6  # microseconds
            found[part][1] += 1
    found[REST][0] = seconds - sum(took for took, _ in found.values())
    return [
        {"part": part, "seconds": took / steps, "share": took / seconds, "operations": count / steps}
        for part, (took, count) in found.items()
    ]


def is_operation(event) -> bool:
    return event.name.startswith("aten::")
