"""Decode speed beside `transformers` with the same weights, in one run. See it with `pytest -n 0 tests/test_speed.py`.

The tokens are asserted to be equal; the times are printed, never asserted.
"""

from statistics import median
from time import perf_counter

import pytest
import torch
from reference import hugging_face, random_tokens

import kvcourse as kv

PROMPT, NEW, ROUNDS = 512, 33, 3


@pytest.mark.smollm2
def test_decode_after_512_tokens_beside_transformers(smollm2, capsys):
    prompt = random_tokens(1, PROMPT, vocab_size=smollm2.config.vocab_size)
    reference = hugging_face(smollm2.model)
    options = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
    reference.generate(prompt[:, :32], max_new_tokens=4, **options)  # warm-up; load_model has warmed ours
    ours, theirs = [], []
    for _ in range(ROUNDS):
        generation = kv.generate(smollm2.model, prompt[0], NEW)
        ours.append(generation.tokens_per_second)
        start = perf_counter()
        reference.generate(prompt, max_new_tokens=1, **options)
        first = perf_counter()
        tokens = reference.generate(prompt, max_new_tokens=NEW, **options)
        theirs.append((NEW - 1) / (perf_counter() - first - (first - start)))  # its prefill taken off
        assert generation.ids == tokens[0, PROMPT:].tolist()
    with capsys.disabled():
        ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
        print(
            f"\ndecode after {PROMPT} tokens, {torch.get_num_threads()} threads, medians of {ROUNDS}: "
            f"kvcourse {median(ours):.1f} tokens/s, transformers {median(theirs):.1f} tokens/s; "
            f"ratios {', '.join(f'{ratio:.2f}' for ratio in ratios)}"
        )
