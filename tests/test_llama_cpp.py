"""llama.cpp with files that this package wrote: it computes the same, as far as its own rounding goes."""

import importlib.util

import pytest
import torch
from reference import random_tokens, small_config, small_model

import kvcourse as kv
from kvcourse.bench import llama_cpp
from kvcourse.bench.llama_cpp import Continuation, agreement, continue_with_llama_cpp
from kvcourse.lm import LM, load_model
from kvcourse.quant.quantize import quantize_model
from kvcourse.rope import LinearScaling, Llama3Scaling, PairScaling, YarnScaling
from kvcourse.weights import gguf_write
from kvcourse.weights.gguf_write import write_gguf
from kvcourse.weights.shipped import shipped_folder

needed = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed: pip install xllamacpp"
)
FEATURES = {
    "plain": {},
    "tied": dict(tie_embeddings=True),
    "as many heads": dict(n_kv_heads=8),
    "wide heads": dict(d_head=16),
    "another base and norm": dict(rope_theta=500.0, norm_eps=0.1),
    "biases of attention": dict(qkv_bias=True, o_bias=True),
    "qwen2": dict(qkv_bias=True),
    "qwen3": dict(qk_norm=True),
    "linear": dict(rope_scaling=LinearScaling(4.0)),
    "llama3": dict(rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 64)),
    "yarn": dict(rope_scaling=YarnScaling(4.0, 64)),
    "yarn, another factor": dict(rope_scaling=YarnScaling(4.0, 64, 0.8)),
    "divisors": dict(rope_scaling=PairScaling((1.0, 1.5, 2.0, 8.0))),
}


def written(tmp_path, model: kv.Transformer, **options):
    """llama.cpp needs a tokenizer with as many tokens as the model has: any will do for token ids."""
    return write_gguf(LM(model, None, "small"), tmp_path / "m.gguf", source=shipped_folder("tiny-gqa"), **options)


def random_model(**changes) -> kv.Transformer:
    return small_model(small_config(vocab_size=2000, **changes))


PROMPT = random_tokens(96, vocab_size=2000)


@needed
@pytest.mark.parametrize("changes", FEATURES.values(), ids=FEATURES)
def test_a_random_model_with_each_feature(changes, tmp_path):
    model = random_model(**changes)
    found = agreement(model, PROMPT, continue_with_llama_cpp(written(tmp_path, model), PROMPT, 8))
    assert found.difference < 1e-4 and found.same == 8 and found.gap is None


@needed
def test_rows_left_in_halves_would_show(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_write, "pair_rows", lambda array, heads: array)
    model = random_model()
    assert agreement(model, PROMPT, continue_with_llama_cpp(written(tmp_path, model), PROMPT, 8)).difference > 0.01


@needed
def test_a_forgotten_feature_would_show(tmp_path):
    """The file says one base of the rotary frequencies, the model has another."""
    theirs = continue_with_llama_cpp(written(tmp_path, random_model(rope_theta=500.0)), PROMPT, 8)
    assert agreement(random_model(), PROMPT, theirs).difference > 0.01


@pytest.fixture(scope="module")
def lm() -> LM:
    return load_model("tiny-gqa", dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def ids(lm) -> list[int]:
    return lm.encode("Once upon a time there was a girl who")


@needed
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_course_model_is_continued_with_the_same_tokens(dtype, lm, ids, tmp_path, capfd):
    """With weights in float16 llama.cpp rounds the activations to float16 too."""
    theirs = continue_with_llama_cpp(write_gguf(lm, tmp_path / "m.gguf", dtype), ids, 48)
    found = agreement(lm.model, ids, theirs)
    assert found.ours == kv.generate(lm.model, ids, 48).ids
    assert found.ours == found.theirs and found.same == 48 and found.gap is None and found.their_gap is None
    assert found.difference < (1e-3 if dtype == torch.float32 else 0.1)
    assert capfd.readouterr() == ("", "")  # llama.cpp is quiet


@needed
@pytest.mark.parametrize(("method", "bits"), [("rtn", 8), ("gptq", 4)])
def test_a_quantized_course_model_parts_only_where_two_tokens_are_close(method, bits, lm, ids, tmp_path):
    """Each program's log-probabilities are off by at most `difference`, so the gap between its two choices is at most
    twice that."""
    calibration = lm.encode(kv.evaluation_text("calibration"))[:2048]
    quantized = quantize_model(lm, method, bits, 32, calibration, symmetric=True, head_bits=8, progress=False)
    path = write_gguf(quantized, tmp_path / "m.gguf")
    found = agreement(quantized.model, ids, continue_with_llama_cpp(path, ids, 100))
    print(f"\n{method}, {bits} bits: {found.same} of 100 tokens equal, then a gap of {found.gap}; {found.difference=}")
    assert 0 < found.difference < 1
    assert found.gap is None or 0 <= found.gap < 2 * found.difference
    plain = agreement(lm.model, ids, continue_with_llama_cpp(path, ids, 100))
    assert plain.difference > found.difference  # it is this model's rounding that llama.cpp has, not none


@needed
def test_the_end_of_a_text_is_the_last_token(lm, ids, tmp_path):
    """Here a full stop is made the end, which the model writes soon."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (shipped_folder("tiny-gqa") / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace('"eos_token": "<|end|>"', '"eos_token": "."'), encoding="utf-8")
    stop = lm.encode(".")[-1]
    theirs = continue_with_llama_cpp(write_gguf(lm, tmp_path / "m.gguf", source=tmp_path), ids, 48)
    ours = kv.generate(lm.model, ids, 48, stop_ids={stop})
    assert theirs.tokens == ours.ids and len(theirs.log_probs) == len(ours.ids) < 48
    assert ours.stop_reason == "stop" and theirs.tokens[-1] == stop


@needed
def test_what_cannot_be_continued(lm, ids, tmp_path):
    path = write_gguf(lm, tmp_path / "m.gguf")
    with pytest.raises(ValueError, match="at least 1 and 1, and fit a context of 512"):
        continue_with_llama_cpp(path, ids, 512)
    with pytest.raises(ValueError, match="0 tokens and 4 new ones must be"):
        continue_with_llama_cpp(path, [], 4)
    with pytest.raises(ValueError, match="n=0 must be a whole number of at least 1"):
        continue_with_llama_cpp(path, ids, 0)
    with pytest.raises(ValueError, match="llama.cpp does not continue this text: Prompt contains invalid tokens"):
        continue_with_llama_cpp(path, [5000], 4)
    with pytest.raises(FileNotFoundError, match="There is no file"):
        continue_with_llama_cpp(tmp_path / "none.gguf", ids, 4)
    without = write_gguf(LM(small_model(), None, "small"), tmp_path / "without.gguf")
    with pytest.raises(ValueError, match="has no tokenizer, and llama.cpp ends the program over that"):
        continue_with_llama_cpp(without, [1, 2, 3], 4)


@needed
def test_a_file_that_llama_cpp_cannot_run(tmp_path):
    path = written(tmp_path, random_model())
    data = path.read_bytes()
    path.write_bytes(data.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(ValueError, match="llama.cpp cannot run .*m.gguf"):
        continue_with_llama_cpp(path, PROMPT, 4)


def test_without_xllamacpp_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(llama_cpp.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="is not installed: pip install xllamacpp"):
        continue_with_llama_cpp(tmp_path / "m.gguf", [1], 1)


def likely(*tokens: int) -> list[dict[int, float]]:
    return [{token: -0.1, 0: -3.0} for token in tokens]


def test_agreement_is_counted_up_to_where_the_texts_part():
    """No llama.cpp is needed: the other text is made up from the model's own."""
    model, prompt = small_model(), random_tokens(20)
    ours = kv.generate(model, prompt, 6).ids
    other = next(token for token in range(1, 97) if token != ours[3])
    theirs = Continuation([*ours[:3], other, *ours[4:]], likely(*ours[:3], other, *ours[4:]))
    found = agreement(model, prompt, theirs)
    logits = model(torch.tensor([prompt.tolist() + ours[:3]]))[0, -1]
    assert (found.same, found.ours, found.theirs) == (3, ours, theirs.tokens)
    assert found.gap == pytest.approx((logits[ours[3]] - logits[other]).item(), abs=1e-4)
    assert found.their_gap is None  # the course's token is not among the likeliest there
    scores = model(torch.tensor([prompt.tolist() + ours[:3]]))[0, 19:].log_softmax(-1)
    steps = [abs(scores[i, t].item() - p) for i, step in enumerate(theirs.log_probs[:4]) for t, p in step.items()]
    assert found.difference == pytest.approx(max(steps), abs=1e-4)
