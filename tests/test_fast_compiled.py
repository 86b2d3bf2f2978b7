"""A compiled model computes what the plain one does, for every kind of model and cache, and compiles as often as said.

Most tests leave out PyTorch's own compiler, the slow part, and run the graphs that it would be given (`graphs`): which
graphs there are, and for which sizes, is settled before it. `real` goes the whole way.
"""

import copy
import math
import pickle

import pytest
import torch
from reference import feed, hugging_face, in_chunks, largest_difference, random_tokens, small_config, small_model
from torch._dynamo.backends.debugging import aot_eager

import kvcourse as kv
from kvcourse.caches.dense import UniformStep
from kvcourse.fast import compiled as compiled_file
from kvcourse.fast import function
from kvcourse.fast.compiled import ONE_EACH, ONE_OF_MANY
from kvcourse.fast.function import CompiledFunction, cannot_compile, varying
from kvcourse.fast.graphs import Graphs
from kvcourse.quant import export_compressed, quantize_model, save, smooth
from kvcourse.rope import LinearScaling, Llama3Scaling, YarnScaling

F64 = torch.float64
TEXT = random_tokens(1, 96)
ROWS = [random_tokens(n, seed=n).tolist() for n in (17, 1, 9)]
BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
RICH = BIASES | {"rope_scaling": YarnScaling(4.0, 64), "tie_embeddings": True}
KINDS = {
    "mha": {"n_kv_heads": 8},
    "gqa": {},
    "mqa": {"n_kv_heads": 1},
    "qkv_bias": {"qkv_bias": True},
    "o_bias": {"o_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "qk_norm": {"qk_norm": True},
    "linear": {"rope_scaling": LinearScaling(4.0)},
    "llama3": {"rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 64)},
    "tied": {"tie_embeddings": True},
    "wide heads": {"d_head": 16},
    "one head": {"n_heads": 1, "n_kv_heads": 1, "d_head": 8},
    "window": {"window": 9},
    "a window in one layer": {"window": (9, None)},
    "all": RICH | {"qk_norm": True},
}


def model_of(kind: str = "all", dtype=torch.float32, **changes) -> kv.Transformer:
    return small_model(small_config(**KINDS[kind] | changes), dtype=dtype)


def counts(model) -> list[int]:
    """Compilations of: before attention, after it, one token, the head."""
    counted = [part.compilations for part in model.functions]
    assert counted[ONE_OF_MANY] == 0 and sum(counted) == model.compilations  # that one is for recordings alone
    return counted[:4]


def dense(model, rows=1, max_len=None):
    return kv.DenseCache(model.config, rows, max_len, model.dtype, "cpu")


def run_graphs(monkeypatch, backend):
    if cannot_compile("cpu"):
        pytest.skip(cannot_compile("cpu"))

    def as_captured(self, graph, inputs):
        self.compilations += 1
        return backend(graph, inputs)

    monkeypatch.setattr(CompiledFunction, "backend", as_captured)


@pytest.fixture
def graphs(monkeypatch):
    """Models made from now on run their graphs as they are captured. Skips where there are none."""
    run_graphs(monkeypatch, lambda graph, inputs: graph.forward)


@pytest.fixture
def counted(monkeypatch):
    """The same, and the next step is gone too, in which writing to the cache asks for a length of its own. Sizes that
    are left open in each graph."""
    opened = []

    def next_step(graph, inputs):
        opened.append(sum(isinstance(given, torch.SymInt) for given in inputs))
        return aot_eager(graph, inputs)

    run_graphs(monkeypatch, next_step)
    return opened


@pytest.fixture(params=["graphs", "not compiled"])
def either(request, monkeypatch):
    """With graphs, and as on a machine where nothing is compiled."""
    if request.param == "graphs":
        request.getfixturevalue("graphs")
    else:
        monkeypatch.setattr(compiled_file, "cannot_compile", lambda device: "Not here.")


@pytest.fixture(scope="module")
def real():
    """(a model, the same compiled for good)."""
    if cannot_compile("cpu"):
        pytest.skip(cannot_compile("cpu"))
    model = small_model(small_config(**RICH))
    return model, kv.compiled(model)


# --- the same logits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "either"),
    [(kind, "not compiled") for kind in KINDS]
    + [(kind, "graphs") for kind in ("gqa", "mqa", "one head", "all", "a window in one layer")],
    indirect=["either"],
)
def test_logits_are_those_of_the_plain_model(kind, either):
    model = model_of(kind)
    fast, right = kv.compiled(model), model(TEXT)
    assert largest_difference(fast(TEXT), right) < 1e-4
    for chunks in ([40, 1, 1, 30] + [1] * 24, [1] * 96):
        logits = feed(fast, dense(fast, max_len=96), TEXT.tolist(), chunks)  # full with the last token
        assert largest_difference(logits[0], right[0]) < 1e-4
    last = fast(TEXT, last_only=True)
    assert largest_difference(last, right[:, -1:]) < 1e-4


@pytest.mark.parametrize("kind", ["gqa", "all", "a window in one layer"])
def test_greedy_ids_are_those_of_the_plain_model(kind, either):
    model = model_of(kind, F64)
    fast = kv.compiled(model)
    for prompt in ROWS:
        right = kv.generate_naive(model, prompt, 12).ids
        assert kv.generate(fast, prompt, 12).ids == right
        assert kv.generate(fast, prompt, 12, prefill_chunk=4).ids == right
        assert kv.generate(fast, prompt, 12, cache=dense(fast, max_len=200)).ids == right
        assert kv.generate_naive(fast, prompt, 12).ids == right
    together = kv.generate(fast, ROWS, 12)
    assert [row.ids for row in together] == [kv.generate(model, prompt, 12).ids for prompt in ROWS]


CACHES = {
    "dense": dense,
    "longer": lambda model, rows: dense(model, rows, 150),
    "window": lambda model, rows: kv.WindowCache(model.config, 9, 2, rows, dtype=model.dtype, device="cpu"),
    "paged": lambda model, rows: kv.PagedCache(model.config, batch_size=rows, dtype=model.dtype, device="cpu"),
    "quantized": lambda model, rows: kv.QuantizedCache(
        model.config, 4, 4, 4, rows, dtype=model.dtype, device="cpu", max_len=150
    ),
}


@pytest.mark.parametrize("name", CACHES)
def test_every_cache_gives_the_same_with_either_model(name, either):
    """In float64: what is a rounding error there cannot move a number to the next value of a quantized cache's grid."""
    model = model_of("all", F64)
    fast = kv.compiled(model)
    for rows, chunks in ((TEXT.tolist(), [1] * 5 + [50] + [1] * 41), (ROWS, [5, 1, 1, 1, 9])):
        right = feed(model, CACHES[name](model, len(rows)), rows, chunks)
        for one, other in zip(feed(fast, CACHES[name](fast, len(rows)), rows, chunks), right, strict=True):
            assert largest_difference(one, other) < 1e-9
    if name in ("window", "quantized"):
        assert largest_difference(right[0], feed(model, dense(model, 3), ROWS, chunks)[0]) > 1e-3  # they are no other


@pytest.mark.parametrize("either_attention", ["gather", "direct"])
def test_the_engine_serves_everybody_as_alone(either_attention, either):
    model = model_of("gqa", F64)
    engine = kv.Engine(kv.compiled(model), 40, 4, max_batch_tokens=12, attention=either_attention)
    ids = [engine.submit(prompt, 10) for prompt in ROWS]
    results = engine.run()
    assert [results[i].ids for i in ids] == [kv.generate(model, prompt, 10).ids for prompt in ROWS]
    in_place = engine.model.functions[ONE_EACH].compilations > 0
    assert in_place == (either_attention == "direct" and engine.model.reason is None)


def test_neighbours_change_nothing_in_8_bits(graphs):
    """A request alone is one row of a step, and the head must not take it for a text that is written alone."""
    engine_of = lambda: kv.Engine(fast, 120, 4, prefix_caching=False)  # noqa: E731
    fast, prompts = kv.compiled(model_of("gqa"), "int8"), [random_tokens(7 + i).tolist() for i in range(8)]
    together = engine_of()
    ids = [together.submit(prompt, 12) for prompt in prompts]
    results = together.run()
    for id, prompt in zip(ids, prompts, strict=True):
        alone = engine_of()
        alone.submit(prompt, 12)
        assert results[id].ids == next(iter(alone.run().values())).ids


@pytest.mark.parametrize("path", ["dequantize", "int8 activations"])
def test_a_head_in_few_bits_scores_one_token_too(path, graphs):
    """No model holds the head's twin but the compiled one."""
    model = quantize_model(model_of("gqa"), "rtn", 8, symmetric=True, head_bits=8, path=path, progress=False)
    fast, cache = kv.compiled(model), dense(model, max_len=20)
    expected = model(TEXT[:, :10])[0, -1]
    for token in range(10):
        logits = fast(TEXT[:, token : token + 1], cache=cache)
    assert largest_difference(logits[0, -1], expected) < 0.02 * float(expected.abs().max())


def test_moving_the_source_moves_nothing_here(either):
    for weights in (None, "int8"):
        model = model_of("gqa")
        fast = kv.compiled(model, weights)
        before = fast(TEXT)
        model.to(torch.bfloat16)
        assert torch.equal(fast(TEXT), before) and fast.dtype == torch.float32
    assert not torch.equal(kv.compiled(model)(TEXT).float(), before)


def test_other_numbers_of_threads_are_compiled_too(graphs):
    fast, threads = kv.compiled(model_of("gqa")), torch.get_num_threads()
    counts_seen = []
    try:
        for n in range(1, 11):
            torch.set_num_threads(n)
            kv.generate(fast, ROWS[0], 5)
            counts_seen.append(fast.compilations)
            kv.generate(fast, ROWS[0], 5)
            assert fast.compilations == counts_seen[-1]
    finally:
        torch.set_num_threads(threads)
    assert counts_seen == [counts_seen[0] * n for n in range(1, 11)]  # more than PyTorch's limit of eight


def test_transformers_gives_the_same_logits_and_ids(real):
    """The whole way, PyTorch's compiler included; chunks, single tokens, and a cache that gets full."""
    model, fast = real
    theirs = hugging_face(model)
    right = theirs(TEXT).logits
    assert largest_difference(fast(TEXT), right) < 1e-4
    for chunks in ([40] + [1] * 56, [1] * 96):
        logits = feed(fast, dense(fast, max_len=96), TEXT.tolist(), chunks)
        assert largest_difference(logits[0], right[0]) < 1e-4
    ragged = feed(fast, dense(fast, 3), ROWS, [4, 1, 1, 11])
    for ids, logits in zip(ROWS, ragged, strict=True):
        assert largest_difference(logits, theirs(torch.tensor([ids])).logits[0]) < 1e-4
    assert (
        kv.generate(fast, ROWS[0], 20).ids
        == theirs.generate(
            torch.tensor(ROWS[:1]), max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0
        )[0, len(ROWS[0]) :].tolist()
    )


def test_it_is_the_joined_weights_that_count(either):
    """Red: rows of q, k and v in another order, in one layer, for many tokens and for one."""
    model = model_of("gqa")
    fast, right = kv.compiled(model), model(TEXT)
    matrix = fast.weights[1].qkv
    fast.weights[1] = fast.weights[1]._replace(qkv=matrix._replace(weight=matrix.weight.roll(8, 0)))
    assert largest_difference(fast(TEXT), right) > 0.1
    fast, cache = kv.compiled(model), dense(model)
    fast(TEXT[:, :-1], cache=cache)
    fast.weights[1] = fast.weights[1]._replace(qkv=matrix._replace(weight=matrix.weight.roll(8, 0)))
    assert largest_difference(fast(TEXT[:, -1:], cache=cache), right[:, -1:]) > 0.1


def test_what_is_joined_is_a_copy_and_all_else_is_shared(either):
    model = model_of("gqa")
    fast, before = kv.compiled(model), model(TEXT)
    model.layers[0].self_attn.k_proj.weight += 1
    assert largest_difference(fast(TEXT), before) < 1e-4  # q, k and v were copied next to each other
    model.layers[0].self_attn.k_proj.weight -= 1
    for name in ("layers.0.self_attn.o_proj", "layers.1.mlp.down_proj", "embed_tokens", "lm_head", "norm"):
        weight = model.get_submodule(name).weight
        kept = weight.clone()
        weight *= 2
        assert largest_difference(fast(TEXT), model(TEXT)) < 1e-3 * float(model(TEXT).abs().max())
        assert largest_difference(fast(TEXT), before) > 0.01, name
        weight.copy_(kept)


def test_a_cache_may_change_hands(either):
    """Between the two models, in the middle of a text."""
    model = model_of()
    fast, cache = kv.compiled(model), dense(model)
    pieces, logits = TEXT.split([30, 1, 1, 1, 20, 1, 1, 41], 1), []
    for number, piece in enumerate(pieces):
        logits.append((fast, model)[number // 2 % 2](piece, cache=cache))
    assert largest_difference(torch.cat(logits, 1), model(TEXT)) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_as_the_plain_model(dtype, either):
    """To the same weights in float64. Sums in float32 or wider make it no worse; 1.5: rounding errors are random."""
    model = small_model(small_config(**RICH)).to(dtype)
    right = copy.deepcopy(model).double()(TEXT)
    fast = kv.compiled(model)
    ours = torch.stack(feed(fast, dense(fast), TEXT.tolist(), [1] * 96))
    theirs = torch.stack(feed(model, dense(model), TEXT.tolist(), [1] * 96))
    assert ours.dtype == theirs.dtype == dtype
    assert (ours - right).square().mean() < 1.5**2 * (theirs - right).square().mean()
    assert (ours - right).square().mean() > 0


# --- how often something is compiled ---------------------------------------------------------------------------------


def test_generate_compiles_as_often_as_is_said(counted):
    """Before attention, after it, one token (a cache that is getting full is a case of its own), the head."""
    fast = kv.compiled(model_of())
    assert (counts(fast), fast.compile_seconds) == ([0, 0, 0, 0], 0)
    kv.generate(fast, ROWS[0], 5)
    assert counts(fast) == [1, 1, 2, 1] and fast.compilations == 5
    seconds = fast.compile_seconds
    assert seconds > 0
    for length in (2, 3, 16, 63, 64, 65, 200):
        prompt = random_tokens(length).tolist()
        kv.generate(fast, prompt, 4)
        kv.generate(fast, [prompt] * 3, 4)
        kv.generate(fast, [prompt, prompt[:2], ROWS[0]], 4)
        kv.generate(fast, prompt, 4, cache=dense(fast, max_len=length + 40))
        if length % 4 == 0:
            kv.generate(fast, prompt, 4, prefill_chunk=length // 2)
    kv.perplexity(fast, random_tokens(600).tolist(), 128)
    assert counts(fast) == [1, 1, 2, 1] and fast.compile_seconds == seconds


def test_one_token_without_what_came_before_is_a_case_of_its_own(counted):
    fast = kv.compiled(model_of())
    for prompt in ([7], [9]):
        kv.generate(fast, prompt, 5)
        assert counts(fast) == [1, 1, 2, 1]
    kv.generate(fast, ROWS[0], 5)
    assert counts(fast) == [2, 2, 2, 1]
    for max_len in (1, 2, 3):
        cache = dense(fast, max_len=max_len)
        for token in range(max_len):
            fast(TEXT[:, token : token + 1], cache=cache)
    assert counts(fast) == [2, 2, 2, 1]


@pytest.mark.parametrize("name", CACHES)
def test_another_cache_compiles_nothing_again(name, counted):
    fast = kv.compiled(model_of("gqa"))
    for rows in (ROWS, ROWS[:1], ROWS[::2]):
        for _ in range(2):
            kv.generate(fast, rows, 5, cache=CACHES[name](fast, len(rows)))
    assert counts(fast)[:2] in ([1, 1], [2, 2])
    assert counts(fast)[2:4] == ([1, 1] if name in ("dense", "longer") else [0, 0])  # none of these gets full


def test_the_engine_compiles_nothing_again(counted):
    fast = kv.compiled(model_of("gqa"))
    for budget in (5, 12, 100):
        engine = kv.Engine(fast, 60, 4, max_batch_tokens=budget)
        for prompt in ROWS * 2:
            engine.submit(prompt, 6)
        engine.run()
    assert counts(fast)[2] == 0 and max(counts(fast)) <= 2
    assert fast.functions[ONE_EACH].compilations == 2  # one text, and several


def test_the_order_of_sizes_does_not_matter(counted):
    """A full cache first, and the smallest there is; the other tests begin elsewhere."""
    fast = kv.compiled(model_of("gqa"))
    for length in (2, 90, 3):
        kv.generate(fast, random_tokens(length).tolist(), 2)
        kv.generate(fast, random_tokens(length).tolist(), 9)
    assert counts(fast) == [1, 1, 2, 1]


def test_modes_of_autograd_compile_nothing_again_and_results_are_ordinary(counted):
    model = model_of()
    fast, right = kv.compiled(model), model(TEXT)

    def run():
        cache = dense(fast)
        return torch.cat([fast(piece, cache=cache) for piece in TEXT.split([93, 1, 1, 1], 1)], 1)

    with torch.inference_mode():
        inside = run()
    assert inside.is_inference() and counts(fast) == [1, 1, 1, 1]
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            logits = run()
        assert largest_difference(logits, right) < 1e-4
    outside = run()
    assert counts(fast) == [1, 1, 1, 1]
    assert not outside.is_inference() and not outside.requires_grad
    outside.add_(1)  # an inference tensor refuses this out here
    single = fast(TEXT[:, :1])
    single.add_(1)
    with pytest.raises(RuntimeError, match="[Ii]nference"):
        inside.add_(1)


def test_another_model_disturbs_nobody(counted):
    """Neither what has been compiled, nor what will be. Open is what varies within a model: the number of tokens; for
    one token, that of slots, and the sizes of two caches. That other models have weights of other sizes opens none."""
    models = [kv.compiled(model_of("gqa", d_model=d_model)) for d_model in (64, 96)]  # heads of 8, and of 12
    for fast in models:
        kv.generate(fast, ROWS[0], 5)
        assert counts(fast) == [1, 1, 2, 1]
        assert counted == [1, 1, 3, 0, 3]
        counted.clear()
    kv.generate(models[0], ROWS[1] + ROWS[2], 5)
    assert not counted


def test_many_models_do_not_reach_the_limit_of_recompilations(graphs):
    """PyTorch compiles the same code eight times, and then runs it uncompiled, without a word."""
    alike = [CompiledFunction(torch.add, float(i)) for i in range(torch._dynamo.config.recompile_limit + 2)]
    for number, add in enumerate(alike):
        assert float(add(torch.tensor(1.0))) == number + 1
        assert add.compilations == 1


def test_seconds_are_counted_when_something_is_compiled(real):
    model, fast = real
    fast(TEXT)
    counted, seconds = fast.compilations, fast.compile_seconds
    assert counted >= 2 and seconds > 0
    fast(TEXT[:, :50])
    assert (fast.compilations, fast.compile_seconds) == (counted, seconds)


def test_the_whole_way_compiles_as_often(real):
    for prompt in (ROWS[0], TEXT[0].tolist(), ROWS[1]):
        for new_tokens in (2, 9):
            kv.generate(real[1], prompt, new_tokens)
            kv.generate(real[1], prompt, new_tokens, cache=dense(real[1], max_len=200))
    assert counts(real[1]) == [2, 2, 2, 1]


def test_varying_leaves_a_size_of_one_alone(graphs):
    add = CompiledFunction(lambda x: x + 1)
    for size in (5, 6, 2, 900):
        assert torch.equal(add(varying(torch.zeros(size), 0)), torch.ones(size))
    assert add.compilations == 1
    assert torch.equal(add(varying(torch.zeros(1), 0)), torch.ones(1)) and add.compilations == 2
    assert add.seconds > 0
    told = CompiledFunction(lambda x: x + 1)
    for size in (5, 6):
        told(torch.zeros(size))  # partner: nobody said that it varies
    assert told.compilations == 2


# --- where nothing is compiled ---------------------------------------------------------------------------------------


def broken(*arguments, **options):
    raise RuntimeError("no compiler\nand more lines") from OSError("no g++ in PATH")


def test_without_a_compiler_it_says_why_and_works(monkeypatch):
    model = model_of()
    monkeypatch.setattr(torch, "compile", broken)  # as a Python that is too new does
    monkeypatch.setattr(compiled_file, "cannot_compile", cannot_compile.__wrapped__)
    fast = kv.compiled(model)
    assert fast.reason == (
        "torch.compile does not work on this machine's cpu (no g++ in PATH): install a C++ compiler, such as g++."
    )
    assert largest_difference(fast(TEXT), model(TEXT)) < 1e-4
    assert kv.generate(fast, ROWS[0], 6).ids == kv.generate(model, ROWS[0], 6).ids
    assert (fast.compilations, fast.compile_seconds) == (0, 0)


def test_where_it_works_there_is_no_reason(real):
    assert real[1].reason is None and cannot_compile("cpu") is None
    assert function.cannot_compile("no such device").startswith("torch.compile does not work")


# --- recorded steps --------------------------------------------------------------------------------------------------


def on_cpu(step):
    """In the place of a CUDA graph: computes the same again, into the same tensor."""
    out = step()
    return lambda: out.copy_(step()), out


def recorded(model, record=on_cpu):
    fast = kv.compiled(model)
    fast.graphs = Graphs(fast.run_fixed, record)
    return fast


def test_a_recorded_step_is_captured_once_for_each_length(graphs):
    model = model_of(max_seq_len=600)
    fast, ids = recorded(model), random_tokens(1, 530)
    cache = dense(fast)
    pieces = ids.split([3] + [1] * 5 + [245] + [1] * 6 + [250] + [1] * 21, 1)
    logits = torch.cat([fast(piece, cache=cache) for piece in pieces], 1)
    assert largest_difference(logits, model(ids)) < 1e-4
    assert fast.graphs.recordings == 3  # up to 256, 512 and 600 slots
    cache.reset()
    for piece in ids[:, :5].split([3, 1, 1], 1):
        fast(piece, cache=cache)
    assert fast.graphs.recordings == 3
    assert [row.ids for row in kv.generate(fast, ROWS, 8)] == [kv.generate(model, row, 8).ids for row in ROWS]
    assert kv.generate(fast, ROWS[0], 8).ids == kv.generate(model, ROWS[0], 8).ids
    assert fast.functions[ONE_OF_MANY].compilations == 1 + 1  # once more for another length, then for all of them
    assert fast.functions[2].compilations == 0


def test_an_interrupt_while_recording_leaves_the_cache_as_it_was(graphs):
    def struck(step):
        step()
        raise KeyboardInterrupt

    model = model_of("gqa")
    fast = recorded(model, struck)
    cache = dense(fast)
    fast(TEXT[:, :10], cache=cache)
    before = cache.keys.clone(), cache.values.clone()
    with pytest.raises(KeyboardInterrupt):
        fast(TEXT[:, 10:11], cache=cache)
    assert cache.lengths == [10] and not fast.graphs.known
    assert torch.equal(cache.keys, before[0]) and torch.equal(cache.values, before[1])
    fast.graphs = Graphs(fast.run_fixed, on_cpu)
    assert largest_difference(fast(TEXT[:, 10:11], cache=cache), model(TEXT[:, :11])[:, -1:]) < 1e-4


# --- errors in the middle of a step ----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("tokens", [1, 5])
def test_an_error_in_the_middle_leaves_the_cache_as_it_was(error, tokens, graphs, monkeypatch):
    model = model_of()
    fast, cache = kv.compiled(model), dense(model)
    fast(TEXT[:, :10], cache=cache)
    before, reached = (cache.keys.clone(), cache.values.clone()), []

    def struck(real):
        def run(*arguments):
            real(*arguments)
            reached.append(bool(cache.keys[0, :, :, 10].any()))  # the first layer has been written
            raise error("in the middle")

        return run

    with monkeypatch.context() as patch:
        patch.setattr(fast, "functions", [*fast.functions[:2], struck(fast.functions[2]), *fast.functions[3:]])
        patch.setattr(UniformStep, "attend", struck(UniformStep.attend))
        with pytest.raises(error, match="in the middle"):
            fast(TEXT[:, 10 : 10 + tokens], cache=cache)
    assert reached == [True]
    assert cache.lengths == [10] and cache.open_step is None
    assert torch.equal(cache.keys, before[0]) and torch.equal(cache.values, before[1])
    logits = torch.cat([fast(piece, cache=cache) for piece in TEXT[:, 10:].split([1, 5, 80], 1)], 1)
    assert largest_difference(logits, model(TEXT)[:, 10:]) < 1e-4


def test_an_engine_goes_on_after_an_interrupt(graphs):
    model = model_of("gqa", F64)
    engine, calls = kv.Engine(kv.compiled(model), 40, 4), []
    ids = [engine.submit(prompt, 10) for prompt in ROWS]
    each = engine.model.functions[ONE_EACH]

    def struck(*tensors):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return each(*tensors)

    engine.model.functions[ONE_EACH] = struck
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    results = engine.run()
    assert [results[i].ids for i in ids] == [kv.generate(model, prompt, 10).ids for prompt in ROWS]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": torch.tensor([[97]])}, "outside the vocabulary"),
        ({"tokens": torch.zeros(1, 257, dtype=torch.long)}, "past the model's context of 256"),
        ({"tokens": torch.zeros(2, 3, dtype=torch.long), "cache": "dense"}, "holds 1 rows"),
        ({"tokens": torch.zeros(1, 3)}, "whole numbers"),
    ],
)
def test_bad_input_is_refused_as_by_the_plain_model(arguments, message, either):
    model = model_of("gqa")
    for one in (model, kv.compiled(model)):
        given = arguments | ({"cache": dense(model)} if "cache" in arguments else {})
        with pytest.raises(ValueError, match=message):
            one(**given)


def test_a_cache_that_is_full_is_refused(graphs):
    fast = kv.compiled(model_of("gqa"))
    cache = dense(fast, max_len=3)
    for token in range(3):
        fast(TEXT[:, token : token + 1], cache=cache)
    with pytest.raises(ValueError, match="room for 3 tokens"):
        fast(TEXT[:, 3:4], cache=cache)
    assert cache.lengths == [3]


# --- what such a model is not ----------------------------------------------------------------------------------------


def test_what_a_compiled_model_cannot_is_said(either, tmp_path):
    fast = kv.compiled(model_of("gqa"))
    lm = kv.LM(fast, None, "small")
    stays = "stays where and as it is: move the model that it was made from"
    for move in (lambda: fast.to("cpu"), fast.double, fast.bfloat16, fast.cpu):
        with pytest.raises(ValueError, match=stays):
            move()
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(fast)
    no_layers = "has its weights joined, and no layers: use the model that it was made from"
    calls = (
        lambda: fast.layers,
        lambda: quantize_model(fast, progress=False),
    )
    for call in calls:
        with pytest.raises(ValueError, match=no_layers):
            call()
    with pytest.raises(TypeError, match="cannot be pickled: compile the model that it was made from"):
        pickle.dumps(fast)
    with pytest.raises(ValueError, match="load them into a Transformer"):
        fast.load_state_dict({})
    with pytest.raises(ValueError, match=no_layers):
        smooth(fast, random_tokens(300).tolist())
    with pytest.raises(ValueError, match=no_layers):
        kv.export_hf(lm, tmp_path / "hf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("weights", [None, "int8"])
def test_no_file_is_written_of_what_is_joined(weights, tmp_path, monkeypatch):
    monkeypatch.setattr(compiled_file, "cannot_compile", lambda device: "Not here.")
    lm = kv.LM(kv.compiled(model_of("gqa"), weights), None, "small")
    for write in (
        lambda: kv.write_gguf(lm, tmp_path / "m.gguf"),
        lambda: save(lm, tmp_path / "few bits"),
        lambda: export_compressed(lm, tmp_path / "compressed"),
        lambda: kv.export_hf(lm, tmp_path / "hf"),
    ):
        with pytest.raises(ValueError):
            write()
    assert not list(tmp_path.iterdir())


# --- with a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype):
    model = small_model(small_config(**RICH)).to("cuda", dtype)
    right = small_model(small_config(**RICH)).to(dtype).double()(TEXT)
    fast = kv.compiled(model)
    assert fast.reason is None, fast.reason

    def off(one):
        cache = kv.DenseCache(one.config, 1, 96, dtype, one.device)
        pieces = TEXT.split([40, 20] + in_chunks(36, 1), 1)
        logits = torch.cat([one(piece.cuda(), cache=cache) for piece in pieces], 1)
        return float((logits.cpu().double() - right).square().mean())

    assert off(fast) < (1e-8 if dtype == torch.float32 else 1.5**2 * off(model))
    kv.generate(fast, ROWS[0], 5)
    counted = counts(fast)
    kv.generate(fast, ROWS[2], 9)
    assert counts(fast) == counted and math.isfinite(off(fast))
