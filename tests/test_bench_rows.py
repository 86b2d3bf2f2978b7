"""The rows of `kvcourse bench`: each writes the most probable tokens, and says right how many bytes a step reads."""

import importlib.util

import pytest
import torch
from gguf_files import random_state, tiny_config, write_model
from reference import small_config, small_model

import kvcourse as kv
from kvcourse.bench import contestants, llama_cpp_row, rows, worker
from kvcourse.bench.bytes_read import weights_read
from kvcourse.bench.contestants import Compiled, Dense, Int4, Int8, Naive
from kvcourse.bench.llama_cpp_row import LlamaCpp
from kvcourse.bench.paged_row import PagedBatch
from kvcourse.bench.rows import choose
from kvcourse.bench.transformers_rows import Transformers, TransformersStatic
from kvcourse.fast.function import cannot_compile
from kvcourse.lm import LM

PROMPT = list(range(5))
with_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed: pip install xllamacpp"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model file with room for all contexts: 2 layers, random weights."""
    config = tiny_config(max_seq_len=2048)
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny.gguf", config, random_state(config)))


@pytest.fixture
def uncompiled(monkeypatch):
    """`load_model` that compiles nothing: what it was asked for is noted, and the plain model comes."""
    asked = []

    def load(name, compiled=None):
        asked.append(compiled)
        return kv.load_model(name)

    monkeypatch.setattr(contestants, "load_model", load)
    return asked


@pytest.mark.parametrize("row", [Naive, Dense, Compiled, Int8, Int4, Transformers, TransformersStatic])
def test_every_row_writes_the_most_probable_tokens(tiny, row, uncompiled):
    this, model = row(tiny), kv.load_model(tiny).model
    made = this.generate(PROMPT, 12)
    assert made.ids == kv.generate(model, PROMPT, 12).ids
    assert made.prompt_length == 5 and len(made.arrivals) == 12 == len(set(made.arrivals))
    assert made.arrivals == sorted(made.arrivals) and made.arrivals[0] > 0
    assert len(this.generate(PROMPT[:1], 1).ids) == 1
    assert uncompiled == [{"compiled": True, "int8": "int8", "int4": "int4"}.get(this.title)]


def test_the_rows_are_those_that_were_promised_and_say_which_may_differ():
    titles = ["naive", "dense", "compiled", "int8", "int4", "paged batch"]
    assert [row.title for row in rows.COURSE] == titles
    assert [row.title for row in rows.PEERS] == ["transformers", "transformers static", "llama.cpp"]
    lossy = [row.title for row in rows.COURSE + rows.PEERS if not row.exact]
    assert lossy == ["int8", "int4", "paged batch", "llama.cpp"]
    assert choose(titles, None) == titles and choose(titles, "int4, naive") == ["naive", "int4"]


def test_naive_times_few_tokens_after_a_long_prompt():
    assert [Naive.most_gaps(None, length) for length in (1, 512, 2000)] == [16, 2, 2]
    assert Dense.most_gaps(None, 2000) == 16


def test_lead_and_perplexity_are_those_of_the_rows_own_model(tiny):
    this = Dense(tiny)
    best, second = this.model(torch.tensor([PROMPT]))[0, -1].sort(descending=True).values[:2]
    assert this.lead(PROMPT) == pytest.approx(float(best - second), abs=1e-5)
    assert this.perplexity() is None  # it has no tokenizer
    course = Dense("tiny-gqa")
    text = course.lm.encode(kv.evaluation_text())[:2048]
    assert course.perplexity() == kv.perplexity(course.model, text, context=512)


# --- bytes of a step -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_a_plain_model_are_those_of_the_closed_form(tied, dtype):
    model = small_model(small_config(tie_embeddings=tied), dtype=dtype)
    for rows_read in (1, 16):
        expected = kv.bytes_moved(model.config, 1, 0, rows_read, bits=8 * dtype.itemsize).weights
        assert weights_read(model, rows_read) == expected


def test_a_table_that_is_looked_up_is_not_read_whole():
    """Red with a head that is the table: vocab_size rows more, but for the one."""
    config = small_config(tie_embeddings=False)
    untied = small_model(config)
    whole = sum(p.nbytes for p in untied.parameters())
    assert weights_read(untied) == whole - (config.vocab_size - 1) * config.d_model * 4


def matrices(c):
    """(rows, columns) of all matrices of a layer."""
    q, kv_size = c.n_heads * c.d_head, c.n_kv_heads * c.d_head
    shapes = [(q, c.d_model), (kv_size, c.d_model), (kv_size, c.d_model), (c.d_model, q)]
    return shapes + [(c.d_ff, c.d_model), (c.d_ff, c.d_model), (c.d_model, c.d_ff)]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_compiled_model_reads_the_same_weights(dtype, tied):
    source = small_model(small_config(tie_embeddings=tied))
    bits = 8 * getattr(torch, dtype).itemsize
    for rows_read in (1, 16):
        expected = kv.bytes_moved(source.config, 1, 0, rows_read, bits=bits).weights
        assert weights_read(kv.compiled(source, dtype), rows_read) == expected


@pytest.mark.parametrize("tied", [True, False])
def test_weights_in_8_bits_are_a_byte_each_and_a_scale_for_each_row(tied):
    source = small_model(small_config(tie_embeddings=tied))
    c, model = source.config, kv.compiled(source, "int8")
    shapes = c.n_layers * matrices(c) + [(c.vocab_size, c.d_model)]  # the head is read whole
    expected = sum(rows * columns + 4 * rows for rows, columns in shapes)
    expected += 4 * (2 * c.n_layers + 1) * c.d_model  # norms
    assert weights_read(model) == expected + 4 * c.d_model  # and one row of the table, in float32
    assert weights_read(model, 16) == expected + 16 * 4 * c.d_model


def test_weights_in_4_bits_are_half_a_byte_each_and_their_groups():
    """32 weights share a scale and a zero point of 2 bytes each; the head is in 8 bits."""
    config = small_config(d_model=64, d_ff=128, d_head=16, n_heads=4, n_kv_heads=4, tie_embeddings=True)
    model = kv.compiled(small_model(config), "int4")
    c = config
    codes = sum(rows * columns for rows, columns in c.n_layers * matrices(c))
    head = c.vocab_size * c.d_model
    expected = codes // 2 + codes // 32 * 4 + head + 4 * c.vocab_size + 2 * (2 * c.n_layers + 1) * c.d_model
    table = weights_read(model) - expected
    assert c.d_model <= table <= c.d_model + 4  # one row of the table, a byte a number and a scale


def test_a_step_reads_the_weights_once_and_the_cache_of_each_text(tiny, uncompiled):
    one, many = Dense(tiny), PagedBatch(tiny)
    config = one.model.config
    assert one.step_bytes(7) == kv.bytes_moved(config, 1, 7, bits=32).total
    cache = kv.cache_bytes(config, 8, bits=32)  # 7 read and one written
    looked_up = 0 if config.tie_embeddings else 15 * config.d_model * 4
    assert many.step_bytes(7) - one.step_bytes(7) == 15 * cache + looked_up


# --- compiled ---


@pytest.mark.skipif(cannot_compile("cpu") is not None, reason="nothing can be compiled here")
def test_measuring_compiles_nothing_once_it_is_warm(tiny):
    """With the real compiler; the counters are those of the model."""
    this = Compiled(tiny)
    assert this.reason is None
    first, second, third = (worker.speed(this, PROMPT, 4) for _ in range(3))
    assert first["compilations"] == second["compilations"] == third["compilations"] == this.model.compilations > 0
    assert first["compile_seconds"] == third["compile_seconds"] > 0
    assert first["tokens"] == third["tokens"] == kv.generate(kv.load_model(tiny).model, PROMPT, 5).ids
    longer = worker.speed(this, [i % 97 for i in range(300)], 4)
    before = longer["compilations"]
    assert worker.speed(this, [i % 97 for i in range(300)], 4)["compilations"] == before


# --- many texts at once --------------------------------------------------------------------------------------------


def test_a_paged_batch_writes_16_texts_in_step_and_shows_the_first(tiny, uncompiled):
    this, model = PagedBatch(tiny), kv.load_model(tiny).model
    assert uncompiled == ["int8"]
    prompt = [i % 97 for i in range(40)]
    made = this.generate(prompt, 6)
    assert made.ids == kv.generate(model, prompt, 6).ids and len(made.arrivals) == 6
    assert made.arrivals == sorted(made.arrivals)
    before = this.engine.stats.steps, this.engine.stats.output_tokens, this.engine.stats.computed_tokens
    again = this.generate(prompt, 6)
    after = this.engine.stats.steps, this.engine.stats.output_tokens, this.engine.stats.computed_tokens
    steps, tokens, computed = (b - a for a, b in zip(before, after, strict=True))
    assert again.ids == made.ids
    assert (steps, tokens) == (1 + 6, 16 * (1 + 6))  # the prompts, then all texts together
    assert computed <= 16 * (2 * 16 + 5)  # of a prompt at most its last block, the rest is cached
    assert this.engine.results == {} == this.alone.results


def test_the_texts_of_a_paged_batch_share_no_page(tiny, uncompiled):
    this = PagedBatch(tiny)
    texts = [this.shifted([3] * 32, by) for by in range(16)]
    assert texts[0] == [3] * 32 and len({tuple(text) for text in texts}) == 16
    assert len({text[0] for text in texts}) == 16  # from their first block on
    this.run(texts, 1)
    assert this.engine.stats.reused_tokens == 0


def test_texts_that_do_not_run_together_are_no_measurement(tiny, uncompiled):
    this = PagedBatch(tiny)
    this.engine.scheduler.max_running = 8
    with pytest.raises(RuntimeError, match="16 texts took .* steps to make 4 tokens together"):
        this.generate(PROMPT, 4)


# --- transformers --------------------------------------------------------------------------------------------------


def test_transformers_does_not_stop_at_the_end_of_a_text(tiny):
    this = Transformers(tiny)
    third, head = this.generate(PROMPT, 8).ids[2], this.model.lm_head.weight
    head[[2, third]] = head[[third, 2]]  # the end of a text in the default configuration of transformers is token 2
    made = this.generate(PROMPT, 8).ids
    assert 2 in made and len(made) == 8
    this.peer.generation_config.eos_token_id = 2
    with pytest.raises(RuntimeError, match=r"made [123] tokens where 8 were asked for"):
        this.generate(PROMPT, 8)


@pytest.mark.parametrize(("row", "kind"), [(Transformers, "DynamicCache"), (TransformersStatic, "StaticCache")])
def test_transformers_has_the_cache_that_the_row_says(tiny, row, kind):
    this, seen = row(tiny), []

    def look(module, arguments, options):
        seen.append(options.get("cache") or options.get("past_key_values"))

    this.peer.model.layers[0].self_attn.register_forward_pre_hook(look, with_kwargs=True)
    this.generate([1] * 100, 4)
    this.generate(PROMPT, 4)
    assert {type(cache).__name__ for cache in seen} == {kind}
    if kind == "StaticCache":  # each text has one of its own length
        assert [seen[0].get_max_length(), seen[-1].get_max_length()] == [103, 8]


# --- llama.cpp -----------------------------------------------------------------------------------------------------


@with_llama_cpp
def test_llama_cpp_streams_the_tokens_of_a_model_written_for_it():
    this, lm = LlamaCpp("tiny-gqa"), kv.load_model("tiny-gqa", dtype=torch.float32)
    prompt = lm.encode("Once upon a time there was a girl who")
    made = this.generate(prompt, 12)
    assert made.ids == kv.generate(lm.model, prompt, 12).ids
    assert len(made.arrivals) == 12 and made.arrivals == sorted(made.arrivals) and made.arrivals[0] > 0
    assert this.generate(prompt, 12).ids == made.ids
    assert this.weights == "F32" and this.compilations == 0 and this.perplexity() is None
    # float32 weights as in the closed form, keys and values in float16
    config = lm.config
    expected = kv.bytes_moved(config, 1, 7, bits=32).weights + kv.cache_bytes(config, 8, bits=16)
    assert this.step_bytes(7) == expected


@with_llama_cpp
def test_llama_cpp_does_not_stop_at_the_end_of_a_text():
    this, lm = LlamaCpp("tiny-gqa"), kv.load_model("tiny-gqa", dtype=torch.float32)
    prompt = lm.encode(kv.evaluation_text())[:200]
    assert len(this.generate(prompt, 200).ids) == 200


@with_llama_cpp
def test_what_llama_cpp_refuses_is_said(tiny):
    this = LlamaCpp("tiny-gqa")
    with pytest.raises(RuntimeError, match="llama.cpp does not continue this text: "):
        this.generate([10**6], 4)
    with pytest.raises(ValueError, match="has no tokenizer"):
        LlamaCpp(tiny)


class Holding:
    """A server that holds back its third token. (A real one must not end before it was asked something: it hangs.)"""

    def handle_completions(self, request, take):
        for token in (5, 7):
            take({"choices": [{"logprobs": {"content": [{"id": token}]}}]})
        take({"choices": [{"logprobs": None}], "usage": {}})


def test_a_token_that_llama_cpp_holds_back_is_no_measurement(monkeypatch):
    monkeypatch.setattr(llama_cpp_row, "check_installed", lambda: None)
    monkeypatch.setattr(llama_cpp_row, "version", lambda name: "1")
    monkeypatch.setattr(llama_cpp_row, "base_settings", lambda path, context: None)
    monkeypatch.setattr(llama_cpp_row, "start_server", lambda settings: Holding())
    this = LlamaCpp("tiny-gqa")
    assert this.generate(PROMPT, 2).ids == [5, 7]
    with pytest.raises(RuntimeError, match="llama.cpp streamed 2 tokens where 3 were asked for"):
        this.generate(PROMPT, 3)


def test_a_file_of_llama_cpp_is_used_as_it_is(tiny, tmp_path):
    assert str(llama_cpp_row.gguf_of(tiny, tmp_path)) == tiny and list(tmp_path.iterdir()) == []
    written = llama_cpp_row.gguf_of("tiny-gqa", tmp_path)
    assert written.parent == tmp_path
    assert kv.load_model(written).config.n_layers == kv.load_model("tiny-gqa").config.n_layers


def test_a_pretend_lm_has_no_text():
    assert contestants.first_tokens(LM(small_model(), None, "silent"), 5) is None
    assert len(contestants.random_ids(97, 5)) == 5
