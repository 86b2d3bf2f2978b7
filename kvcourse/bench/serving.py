"""What `kvcourse bench --serving` measures: the engine against others in batches, its step, and its load."""

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime

from kvcourse import __version__
from kvcourse.bench.batches import Batches, EngineBatch, StaticBatch, prompts_of, vllm_rows
from kvcourse.bench.load import measure_scheduler, measure_trace, trace_lengths
from kvcourse.bench.report import SCHEMA, environment
from kvcourse.bench.steps import measure_step
from kvcourse.lm import LM, load_model
from kvcourse.model import Transformer


@dataclass(frozen=True)
class Amounts:
    """How much is measured."""

    prompt_tokens: int = 64
    new_tokens: int = 64
    sizes: tuple[int, ...] = (16, 4)
    steps: int = 8  # with the profiler; as many without
    requests: int = 200
    longest: int = 256  # prompt and answer of the trace
    scheduled: int = 10_000


QUICK = Amounts(prompt_tokens=16, new_tokens=8, steps=2, requests=12, longest=32, scheduled=300)


def measure_serving(
    name: str, rounds: int, quick: bool, vllm: str | None = None, weights: str | None = None, dtype: str | None = None
) -> dict:
    """Everything, one after the other, in a form that JSON can hold. `vllm`: a Python that has it, or None. `weights`:
    the numbers that a compiled model keeps its weights in, "int8" say; None: a plain model. `dtype`: that of the engine
    and its cache, None for this machine's.

    Raises `ValueError` before anything is measured when the model is too short, or has no peer for vLLM.
    """
    amounts = QUICK if quick else Amounts()
    tell(f"Loading {name} ...")
    lm = load_model(name, dtype=dtype, compiled=weights or False)
    model, room = lm.model, amounts.prompt_tokens + amounts.new_tokens
    if room > lm.config.max_seq_len:
        raise ValueError(
            f"{name} has a context of {lm.config.max_seq_len} tokens, and {room} are needed: measure another model."
        )
    batches = measure_batches(lm, name, amounts, rounds, vllm)
    step = None
    if model.device.type == "cpu" and weights is None:  # compiled functions hide their parts
        tell("Measuring where the time of a step goes ...")
        step = measure_step(model, batches.prompts, amounts.steps)
    before = compiled_so_far(model)
    tell(f"Replaying {amounts.requests} mixed requests, twice ...")
    trace = measure_trace(model, trace_lengths(lm.config, amounts.requests, amounts.longest))
    tell(f"Scheduling {amounts.scheduled:,} requests without a model ...")
    return {
        "schema": SCHEMA,
        "measured": "serving",
        "kvcourse": __version__,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "model": name,
        "environment": environment({"device": str(model.device), "dtype": str(model.dtype).removeprefix("torch.")}),
        "rounds": rounds,
        "quick": quick,
        "weights": weights or str(model.dtype).removeprefix("torch."),
        "compiled": weights is not None,
        "compilations": compiled_so_far(model),
        "compilations_in_trace": compiled_so_far(model) - before,
        "prompt_tokens": amounts.prompt_tokens,
        "new_tokens": amounts.new_tokens,
        "rows": batches.summary(),
        "differences": batches.differences,
        "step": step,
        "trace": trace,
        "scheduler": measure_scheduler(amounts.scheduled),
    }


def measure_batches(lm: LM, name: str, amounts: Amounts, rounds: int, vllm: str | None) -> Batches:
    prompts = prompts_of(lm, max(amounts.sizes), amounts.prompt_tokens)
    batches = Batches(prompts, list(amounts.sizes), amounts.new_tokens, rounds)
    with ExitStack() as stack:
        others = []
        if vllm is not None:
            tell("Loading the model into vLLM ...")
            plain = load_model(name).model  # a compiled one has no weights to be written
            others = stack.enter_context(vllm_rows(vllm, plain, amounts.prompt_tokens + amounts.new_tokens))
        tell("Measuring batches ...")
        for size in (*amounts.sizes, 1):  # what is compiled for many texts, and for the last one left
            EngineBatch(lm.model).write(prompts[:size], 3)
        batches.run([EngineBatch(lm.model), StaticBatch(lm.model), *others])
    batches.compare(lm.model)
    return batches


def compiled_so_far(model: Transformer) -> int:
    """Functions that were compiled for a model."""
    return getattr(model, "compilations", 0)


def tell(what: str) -> None:
    print(what, file=sys.stderr)
