"""The engine under load: a trace of mixed requests at a share of what it can do; and its scheduler, without a model."""

from dataclasses import replace
from statistics import median
from time import perf_counter

from tqdm.auto import tqdm

from kvcourse.config import ModelConfig
from kvcourse.model import Transformer
from kvcourse.serving.dry_run import DryEngine
from kvcourse.serving.engine import Engine
from kvcourse.serving.replay import Replay, replay
from kvcourse.serving.workload import Arrival, Lengths, mixed_lengths, poisson

LOAD = 0.7  # of the capacity
BLOCK_SIZE, MAX_RUNNING = 16, 64
PERCENTILES = (50, 95, 99)


def trace_lengths(config: ModelConfig, n: int, longest: int = 256, seed: int = 0) -> list[Lengths]:
    """Lengths of `n` requests, prompts and answers of at most `longest` tokens, or half of the model's context."""
    longest = min(longest, config.max_seq_len // 2)
    return mixed_lengths(n, seed, prompt=max(1, longest // 4), answer=max(1, longest * 3 // 16), longest=longest)


def pool_size(lengths: list[Lengths]) -> int:
    """Blocks for a quarter of what `MAX_RUNNING` texts of the longest kind take: most are much shorter."""
    longest = max(prompt for prompt, _ in lengths) + max(answer for _, answer in lengths)
    return -(-longest // BLOCK_SIZE) * MAX_RUNNING // 4


def measure_trace(model: Transformer, lengths: list[Lengths], seed: int = 0) -> dict:
    """The same requests twice: all at once, which gives the capacity, then at `LOAD` of it (Poisson arrivals)."""
    blocks, vocab_size = pool_size(lengths), model.config.vocab_size

    def arrivals(rate: float) -> list[Arrival]:
        return poisson(rate, len(lengths), seed, lengths=lengths, vocab_size=vocab_size)

    rush = play(model, [replace(arrival, at=0.0) for arrival in arrivals(1.0)], blocks, "all at once")
    rate = LOAD * len(lengths) / rush.seconds
    at_load = play(model, arrivals(rate), blocks, f"at {LOAD:.0%} of capacity")
    return {
        "requests": len(lengths),
        "prompt_tokens": sum(prompt for prompt, _ in lengths),
        "longest": Lengths(*map(max, zip(*lengths, strict=True)))._asdict(),
        "num_blocks": blocks,
        "block_size": BLOCK_SIZE,
        "capacity": len(lengths) / rush.seconds,
        "load": LOAD,
        "rate": rate,
        "all_at_once": figures(rush),
        "at_load": figures(at_load),
    }


def play(model: Transformer, arrivals: list[Arrival], blocks: int, name: str) -> Replay:
    """Replay to a new engine, in which nothing is cached, with a progress bar of tokens."""
    engine = Engine(model, blocks, BLOCK_SIZE, max_running=MAX_RUNNING)
    with tqdm(total=sum(arrival.max_new_tokens for arrival in arrivals), desc=name, unit="token", leave=False) as bar:
        return replay(engine, arrivals, on_step=lambda clock: bar.update(engine.stats.output_tokens - bar.n))


def figures(run: Replay) -> dict:
    return {
        "output_tokens": run.output_tokens,
        "seconds": run.seconds,
        "tokens_per_second": run.throughput,
        "ttft": {f"p{p}": run.ttft_percentile(p) for p in PERCENTILES},
        "itl": {f"p{p}": run.itl_percentile(p) for p in PERCENTILES},
        "preemptions": run.preemptions,
        "peak_blocks": run.peak_blocks,
        "steps": len(run.ticks),
    }


def measure_scheduler(n: int, seed: int = 0) -> dict:
    """`n` requests, all there from the start, through blocks, prefix index and scheduler, with a made-up token.

    The seconds of a step are medians over the steps in which the second tenth of the requests ended, and the ninth:
    nine tenths wait in the one, and eight tenths have ended in the other; as many run.
    """
    lengths = mixed_lengths(n, seed, prompt=16, answer=12, longest=64)
    engine = DryEngine(pool_size(lengths), BLOCK_SIZE, max_running=MAX_RUNNING)
    for arrival in poisson(1.0, n, seed, lengths=lengths):
        engine.submit(arrival.prompt, arrival.max_new_tokens)
    tenths: list[list[float]] = [[] for _ in range(10)]
    with tqdm(total=n, desc="scheduler alone", unit="request", leave=False) as bar:
        while engine.unfinished:
            before = perf_counter()
            engine.step()
            seconds = perf_counter() - before
            ended = n - engine.unfinished
            tenths[min(9, 10 * ended // n)].append(seconds)
            bar.update(ended - bar.n)
    early, late = (1 / median(tenths[tenth]) for tenth in (1, 8))
    steps = sum(map(len, tenths))
    return {"requests": n, "steps": steps, "steps_per_second_early": early, "steps_per_second_late": late}
