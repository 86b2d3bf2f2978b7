"""What the tests of the engine share: a model, its answers without neighbours, and pages in which nothing is left."""

import torch
from reference import random_tokens, small_config, small_model

import kvcourse as kv
from kvcourse.serving.engine import Engine

# float64: another order of summing cannot change which token wins.
MODEL = small_model(dtype=torch.float64)
WINDOWS = {
    "none": MODEL,
    "one for all": small_model(small_config(window=9), dtype=torch.float64),
    "per layer": small_model(small_config(window=(5, 12)), dtype=torch.float64),
    "one layer sees all": small_model(small_config(window=(6, None)), dtype=torch.float64),
}


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return random_tokens(length, seed=seed).tolist()


def solo(prompt, max_new_tokens, model=MODEL, **options) -> list[int]:
    """What `generate` makes of it, alone."""
    return kv.generate(model, prompt, max_new_tokens, **options).ids


def poison(engine: Engine, value: float = float("nan")) -> Engine:
    """Fill each page with `value` now, when it is taken, and when it is free and not kept for others."""
    pool, pages = engine.scheduler.pool, engine.pages
    take, release = pool.take, pool.release

    def take_and_fill():
        block = take()
        pages.fill(value, [block])
        return block

    def release_and_fill(block):
        release(block)
        if pool.refs[block] == 0 and block not in pool.kept:
            pages.fill(value, [block])

    pool.take, pool.release = take_and_fill, release_and_fill
    pages.fill(value)
    return engine
