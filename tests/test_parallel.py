"""Tensor parallelism: shards of a model against the whole, in threads with a stand-in for gloo, and in processes."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from threading import Barrier, Thread

import psutil
import pytest
import torch
from reference import SMOLLM2, largest_difference, random_tokens, small_config, small_model

import kvcourse as kv
from kvcourse.parallel import run, run_parallel, sent_bytes, shard, split

EVERYTHING = dict(qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True)
CASES = [  # configuration, worlds
    (small_config(n_kv_heads=8), (1, 4)),  # MHA
    (small_config(), (1, 2)),  # GQA, 8 query heads on 2
    (small_config(), (4, 8)),  # more ranks than KV heads: copies
    (small_config(n_kv_heads=1), (2,)),  # MQA
    (small_config(**EVERYTHING), (2, 4)),
    (small_config(n_heads=9, n_kv_heads=3, d_head=8, d_ff=126, tie_embeddings=True), (3,)),  # as in SmolLM2
    (small_config(window=(8, None)), (2,)),
]
PAIRS = [(config, world) for config, worlds in CASES for world in worlds]


class Sum:
    """`all_reduce` between threads: every rank waits for the terms of the others."""

    def __init__(self, world: int):
        self.terms, self.all_there, self.all_read = (
            [None] * world,
            Barrier(world, timeout=60),
            Barrier(world, timeout=60),
        )
        self.calls = 0

    def of(self, rank: int):
        def all_reduce(term):
            self.terms[rank] = term
            self.all_there.wait()
            total = sum(self.terms)
            self.calls += rank == 0
            self.all_read.wait()
            return total

        return all_reduce


def together(model, world, work, reducer=None) -> list:
    """`work(shard)` of every rank, in threads."""
    reducer = reducer or Sum(world)
    shards = [split(model, rank, world, reducer.of(rank)) for rank in range(world)]
    return in_threads(shards, work)


def in_threads(shards, work) -> list:
    results = [None] * len(shards)

    def rank(i):
        with torch.inference_mode():
            results[i] = work(shards[i])

    threads = [Thread(target=rank, args=(i,)) for i in range(len(shards))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def alone(model, world, work) -> list:
    """Every rank for itself: nothing is added up."""
    return [work(split(model, rank, world, lambda term: term)) for rank in range(world)]


@pytest.mark.parametrize(("config", "world"), PAIRS)
def test_shards_give_the_logits_of_the_whole_model(config, world):
    model, tokens = small_model(config, dtype=torch.float64), random_tokens(2, 24)
    expected, reducer = model(tokens), Sum(world)
    for logits in together(model, world, lambda shard: shard(tokens), reducer):
        assert largest_difference(logits, expected) < 1e-10
    assert reducer.calls == 2 * config.n_layers
    if world > 1:  # each rank's terms alone are another model's
        assert min(largest_difference(logits, expected) for logits in alone(model, world, lambda s: s(tokens))) > 1e-2


@pytest.mark.parametrize(("config", "world"), PAIRS)
def test_shards_with_their_caches_write_the_same_text(config, world):
    """Prefill and decode from caches with fewer heads, by `kv.generate` as it is."""
    model, prompt = small_model(config, dtype=torch.float64), random_tokens(10).tolist()
    expected = kv.generate(model, prompt, 6).ids
    assert all(made.ids == expected for made in together(model, world, lambda shard: kv.generate(shard, prompt, 6)))
    if world > 1:
        assert any(made.ids != expected for made in alone(model, world, lambda s: kv.generate(s, prompt, 6)))


def test_float32_is_within_1e_4():
    model, tokens = small_model(small_config(**EVERYTHING)), random_tokens(2, 24)
    assert 0 < largest_difference(together(model, 2, lambda s: s(tokens))[0], model(tokens)) < 1e-4


def test_a_bias_added_to_every_term_is_too_much(monkeypatch):
    """What `SummedLinear` is for: with the bias in each of two terms, it counts twice."""
    model, tokens = small_model(small_config(**EVERYTHING), dtype=torch.float64), random_tokens(1, 24)
    biased = lambda self, x: self.all_reduce(torch.nn.functional.linear(x, self.weight, self.bias))  # noqa: E731
    monkeypatch.setattr(shard.SummedLinear, "forward", biased)
    assert largest_difference(together(model, 2, lambda s: s(tokens))[0], model(tokens)) > 1e-2


def test_ranks_with_the_wrong_copy_of_a_head_differ():
    """Four ranks, two KV heads: ranks 0 and 1 hold the first. Dealt out in turns instead, the text is another."""
    model, tokens, reducer = small_model(dtype=torch.float64), random_tokens(1, 24), Sum(4)
    shards = [split(model, rank, 4, reducer.of(rank)) for rank in range(4)]
    for i, layer in enumerate(model.layers):
        for rank, s in enumerate(shards):
            for name in ("k_proj", "v_proj"):
                own, whole = (getattr(a, name).weight for a in (s.layers[i].self_attn, layer.self_attn))
                assert torch.equal(own, whole.chunk(2)[rank // 2])
                own.copy_(whole.chunk(2)[rank % 2])
    assert largest_difference(in_threads(shards, lambda s: s(tokens))[0], model(tokens)) > 1e-2


def test_bytes_of_each_rank_by_hand():
    """d_model 64, 8 heads of 8, 2 of them KV, d_ff 128, 97 tokens, two layers; each of two ranks has half a matrix."""
    model = small_model(small_config(o_bias=True))
    layer = 64 * (64 + 2 * 16) + 64 * 64 + 3 * 64 * 128
    whole = 2 * 97 * 64 + 2 * 2 * 64 + 64 + 2 * 64  # embedding and head, norms, the bias of o
    for rank in range(2):
        numbers = sum(w.numel() for w in split(model, rank, 2, None).state_dict().values())
        assert numbers == 2 * layer // 2 + whole
    keys_and_values = 4 * (64 * 8 * 2 + 64 * 16 * 2 + 3 * 64 * 32)  # of four: one of the two KV heads each
    assert sum(w.numel() for w in split(model, 3, 4, None).state_dict().values()) == 2 * keys_and_values // 4 + whole


@pytest.mark.parametrize(("config", "world"), PAIRS)
def test_the_cache_is_shared_out_until_a_rank_has_one_head(config, world):
    part = split(small_model(config), 0, world, None).config
    assert kv.cache_bytes(part, 40) * min(world, config.n_kv_heads) == kv.cache_bytes(config, 40)
    assert (part.d_head, part.d_model, part.n_heads * world) == (config.d_head, config.d_model, config.n_heads)


def test_a_shard_has_memory_of_its_own():
    model = small_model()
    before = model.layers[0].self_attn.q_proj.weight.clone()
    for weight in split(model, 0, 2, None).state_dict().values():
        weight.zero_()
    assert torch.equal(model.layers[0].self_attn.q_proj.weight, before)


def test_bytes_sent_by_hand():
    """SmolLM2, float32, three ranks: 30 layers, 2 x 576 numbers of 4 bytes; each sends 2 x 2/3 of them."""
    assert sent_bytes(SMOLLM2, 3, 32) == 30 * 2 * 576 * 4 * 4 / 3 == 184_320
    assert sent_bytes(SMOLLM2, 1, 32) == 0
    assert sent_bytes(SMOLLM2, 2, 16) == 30 * 2 * 576 * 2  # of two ranks each sends all of it


@pytest.mark.parametrize(
    ("config", "world", "allowed"),
    [
        (SMOLLM2, 2, "1, 3"),
        (SMOLLM2, 9, "1, 3"),  # nine heads, but d_ff=1536 is no multiple of 9
        (small_config(), 3, "1, 2, 4, 8"),
        (small_config(), 16, "1, 2, 4, 8"),
        (small_config(n_heads=12, n_kv_heads=4, d_head=8, d_ff=132), 6, "1, 2, 4, 12"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(config, world, allowed):
    model = kv.Transformer(config, "meta", torch.float32)
    with pytest.raises(ValueError, match=f"world={world} ranks cannot share .*: world can be {allowed}\\."):
        split(model, 0, world, None)
    for number in allowed.split(", "):
        assert split(model, 0, int(number), None).config.n_heads * int(number) == config.n_heads


def test_bad_requests_are_refused_before_any_process_starts(monkeypatch):
    monkeypatch.setattr(run.Ranks, "start", lambda self: pytest.fail("a process was started"))
    model = small_model()
    quantized = kv.quant.quantize_model(small_model(), "rtn", 8, 32, progress=False)
    for call, message in [
        (lambda: split(model, 2, 2, None), "rank=2 is none of world=2 ranks"),
        (lambda: split(model, -1, 2, None), "rank=-1"),
        (lambda: split(model, 0, 0, None), "world=0"),
        (lambda: split("tiny-gqa", 0, 2, None), "model must be an LM, .* not str"),
        (lambda: split(split(model, 0, 2, None), 0, 2, None), "Only a plain model can be split"),
        (lambda: split(quantized, 0, 2, None), "Only a plain model can be split"),
        (lambda: run_parallel(model, [1, 2], 3, world=5), "world can be 1, 2, 4, 8"),
        (lambda: run_parallel(model, [], 3), "Prompt 0 is empty"),
        (lambda: run_parallel(model, [97], 3), "outside the vocabulary"),
        (lambda: run_parallel(model, [[1], [2]], 3), "one text, and 2 prompts"),
        (lambda: run_parallel(model, [1, 2], 0), "max_new_tokens=0"),
        (lambda: run_parallel(model, [1, 2], 300), "shorten the prompt or ask for fewer tokens"),
        (lambda: run_parallel(model, [1, 2], 3, timeout=0), "timeout=0"),
        (lambda: run_parallel(kv.Transformer(model.config, "meta"), [1], 3), 'on meta: load it with device="cpu"'),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if "kvcourse.parallel.worker" in " ".join(p.cmdline())]


def test_two_processes_write_what_one_writes():
    config = small_config(**EVERYTHING)
    model, prompt = small_model(config, dtype=torch.float64), random_tokens(10).tolist()
    made = run_parallel(model, torch.tensor(prompt), 12)
    assert made.tokens == kv.generate(model, prompt, 12).ids
    assert made.all_reduces == 2 * 2 * 12  # two a layer, twelve passes
    assert made.sent_bytes == sent_bytes(config, 2, 64) == 2 * 2 * 64 * 8
    assert made.cache_bytes == [kv.DenseCache.bytes_for(config, 1, 21, torch.float64) // 2] * 2
    assert made.weight_bytes == [sum(w.nbytes for w in split(model, 0, 2, None).state_dict().values())] * 2
    assert made.seconds > 0 and children() == []


def test_half_precision_and_copies_of_a_head():
    """One KV head on two ranks, in bfloat16: both hold it whole."""
    model = small_model(small_config(n_kv_heads=1), dtype=torch.bfloat16)
    made = run_parallel(kv.LM(model, None, "small"), [1, 2, 3], 4)
    assert len(made.tokens) == 4 and made.cache_bytes == [kv.DenseCache.bytes_for(model.config, 1, 6, model.dtype)] * 2


def endless_model() -> kv.Transformer:
    """Nobody waits for its text to end."""
    return small_model(replace(small_config(), max_seq_len=200_000))


def test_a_rank_that_is_killed_is_named_and_the_others_are_stopped(monkeypatch):
    def kill_one_that_writes(self, timeout):
        while not (self.folder / "store").exists():
            time.sleep(0.02)
        time.sleep(0.3)
        self.processes[0].kill()
        wait(self, timeout)

    wait = run.Ranks.wait
    monkeypatch.setattr(run.Ranks, "wait", kill_one_that_writes)
    with pytest.raises(
        RuntimeError, match="^Rank 0 of 2 was killed by signal 9, most often for want of memory; the other"
    ):
        run_parallel(endless_model(), [1, 2], 100_000)
    assert children() == []


def test_a_rank_that_fails_says_why(monkeypatch):
    def damage(weights, path):
        path.write_bytes(b"no weights") if "rank-1" in path.name else save(weights, path)

    save = run.save_file
    monkeypatch.setattr(run, "save_file", damage)
    with pytest.raises(RuntimeError, match=r"^Rank 1 of 2 ended with exit code 1 \(.*header.*\); the other ranks were"):
        run_parallel(endless_model(), [1, 2], 100_000)
    assert children() == []


def test_the_time_is_bounded():
    with pytest.raises(RuntimeError, match="^2 ranks were not done after 0.2 seconds and were stopped"):
        run_parallel(endless_model(), [1, 2], 100_000, timeout=0.2)
    assert children() == []


def test_an_interrupt_leaves_no_process_behind(monkeypatch):
    def interrupted(self, timeout):
        assert len(children()) == 2
        raise KeyboardInterrupt

    monkeypatch.setattr(run.Ranks, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_parallel(endless_model(), [1, 2], 100_000)
    assert children() == []


SCRIPT = """
import kvcourse as kv
kv.run_parallel(kv.load_model("tiny-gqa", device="cpu"), [1, 2, 3], 500)
"""


def test_a_script_needs_no_guard_and_takes_its_ranks_along_when_it_is_killed(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    env = os.environ | {"TMPDIR": str(tmp_path)}  # killed, it cannot clear up
    script = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, env=env)
    try:
        ranks = []
        while len(ranks) < 2:
            assert script.poll() is None
            ranks = psutil.Process(script.pid).children()
        script.kill()
        assert psutil.wait_procs(ranks, timeout=30)[1] == []  # the second are those still alive
    finally:
        script.kill()
        script.wait()
