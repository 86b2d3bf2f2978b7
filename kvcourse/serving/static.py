"""Static batching, the yardstick for continuous batching: a batch is filled once, and runs until its last text is done.

This is how a plain loop over `generate` serves people, and how servers worked before Orca (Yu et al. 2022, section 3).
"""

from collections.abc import Iterator
from time import perf_counter

import torch

from kvcourse.generation import make_cache, pad, prefill
from kvcourse.model import Transformer
from kvcourse.require import require_whole
from kvcourse.serving.dry_run import TOKEN
from kvcourse.serving.replay import Replay, StepCost, Visitor, Visitors, report, seconds_of, tick
from kvcourse.serving.scheduler import Chunk, Plan, Request
from kvcourse.serving.served import Served
from kvcourse.serving.workload import Arrival


def replay_static(
    model: Transformer | None,
    arrivals: list[Arrival],
    batch_size: int,
    *,
    wait_for_full: bool = False,
    step_cost: StepCost | None = None,
) -> Replay:
    """Play a trace with static batching: same clock as `replay`, same report (no blocks, and no cached tokens).

    Whenever nothing runs, those who have come are taken, at most `batch_size`; with `wait_for_full` a batch waits until
    it is full, or nobody else will come. It is prefilled together, padded to its longest prompt, and decodes until its
    longest answer is done; who has all tokens leaves at once, but its place stays empty and computes on. With a
    `step_cost`, `model` may be None. Raises `ValueError` as `replay` does, and for requests that go on from an answer.
    """
    visitors = Visitors(arrivals)
    if any(arrival.after is not None for arrival in arrivals):
        raise ValueError("Static batching replays requests that stand alone: give a trace without `after`.")
    if model is None and step_cost is None:
        raise ValueError("Without a model there is nothing to measure: give a step_cost.")
    batch_size = require_whole("batch_size", batch_size)
    clock, ticks, waiting = 0.0, [], []
    while visitors.to_come or waiting:
        enough = batch_size if wait_for_full else 1
        while visitors.to_come and (len(waiting) < enough or visitors.next_time <= clock):
            clock = max(clock, visitors.next_time)
            waiting += visitors.due(clock)
        batch, waiting = waiting[:batch_size], waiting[batch_size:]
        steps = dry_batch(batch) if model is None else run_batch(model, batch)
        for plan in static_plans(batch):
            before = perf_counter()
            next(steps)
            seconds = perf_counter() - before if step_cost is None else seconds_of(plan, step_cost)
            ticks.append(tick(plan, clock, seconds))
            clock += seconds
            for visitor in batch:
                if visitor.waits:
                    visitor.times.append(clock)
    order = [visitors.came[number] for number in range(len(arrivals))]
    return report(
        [(visitor, Served(len(visitor.prompt), ids=visitor.ids, id=visitor.number)) for visitor in order], ticks
    )


@torch.inference_mode()
def run_batch(model: Transformer, batch: list[Visitor]) -> Iterator[None]:
    """Write the texts of one batch with the most probable tokens, stopping after each step."""
    prompts = [visitor.prompt for visitor in batch]
    cache = make_cache(model, len(batch), max(len(visitor.prompt) + visitor.wanted - 1 for visitor in batch))
    logits = prefill(model, prompts, cache)
    while True:
        for visitor, token in zip(batch, logits[:, 0].argmax(-1).tolist(), strict=True):
            if len(visitor.ids) < visitor.wanted:
                visitor.ids.append(token)
        yield
        tokens, positions = pad(
            [visitor.ids[-1:] if len(visitor.ids) < visitor.wanted else [] for visitor in batch], cache.lengths
        )
        logits = model(tokens, positions, cache, last_only=True)


def dry_batch(batch: list[Visitor]) -> Iterator[None]:
    """The same without a model."""
    while True:
        for visitor in batch:
            visitor.ids += [TOKEN] * (len(visitor.ids) < visitor.wanted)
        yield


def static_plans(batch: list[Visitor]) -> Iterator[Plan]:
    """What the steps of a static batch compute: all places as far as the longest, needed or not."""
    requests = [Request(visitor.number, visitor.prompt, visitor.wanted) for visitor in batch]
    longest = max(request.prompt_length for request in requests)
    yield Plan([Chunk(request, 0, longest) for request in requests], [], [], 0, 0)
    for step in range(1, max(request.max_new_tokens for request in requests)):
        at = [request.prompt_length + step for request in requests]
        yield Plan([Chunk(request, n - 1, n) for request, n in zip(requests, at, strict=True)], [], [], 0, 0)
