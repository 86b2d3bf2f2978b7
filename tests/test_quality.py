"""Perplexity and recall, held against transformers, closed forms, hand-made models and the slow way."""

import math
from itertools import islice

import numpy as np
import pytest
import torch
from reference import hugging_face, random_tokens, small_config, small_model

import kvcourse as kv
from kvcourse import quality
from kvcourse.generation import generate
from kvcourse.lm import LM
from kvcourse.quality import Recall, perplexity, recall, wilson
from kvcourse.tokenizer import Tokenizer
from kvcourse.training.stories.probes import Probe, probes
from kvcourse.weights.shipped import shipped_folder

# --- perplexity ----------------------------------------------------------------------------------------------


class Bigrams:
    """A model whose next token depends on the last one alone: `table[a, b]` is the probability of b after a."""

    def __init__(self, table, max_seq_len=8):
        self.table = torch.tensor(table)
        self.config = small_config(vocab_size=len(table), max_seq_len=max_seq_len)

    def __call__(self, tokens, positions=None):
        return self.table.log()[tokens]


def test_perplexity_is_what_the_loss_of_transformers_says():
    model = small_model()
    tokens = random_tokens(1, 200)
    loss = hugging_face(model)(tokens, labels=tokens).loss
    assert perplexity(model, tokens[0]) == pytest.approx(loss.exp().item(), rel=1e-5)
    other = small_model(seed=1)  # partner: other weights, another figure
    assert perplexity(other, tokens[0]) != pytest.approx(loss.exp().item(), rel=1e-3)


@pytest.mark.parametrize("length", [2, 8, 9, 30])
def test_whoever_knows_nothing_has_the_perplexity_of_the_vocabulary(length):
    assert perplexity(Bigrams([[1 / 5] * 5] * 5), [3, 1] * (length // 2) + [0] * (length % 2)) == pytest.approx(5)


def test_a_text_worked_out_by_hand():
    """After 0 comes 1 with 1/2 and 2 with 1/4; after 1 comes 0 with 1/8; after 2 comes 2 with 1."""
    model = Bigrams([[0.25, 0.5, 0.25], [0.125, 0.375, 0.5], [0.0, 0.0, 1.0]])
    assert perplexity(model, [0, 1]) == pytest.approx(2)
    assert perplexity(model, [0, 1, 0, 2, 2]) == pytest.approx((2 * 8 * 4 * 1) ** (1 / 4))
    assert perplexity(model, torch.tensor([2, 2, 2])) == pytest.approx(1)
    for text in ((0, 1), range(2), np.array([0, 1])):
        assert perplexity(model, text) == pytest.approx(2)
    assert perplexity(model, [2, 1]) == math.inf  # it was sure that this cannot come


@pytest.mark.parametrize("context", [1, 2, 5, 7])
def test_where_one_token_is_all_the_context_that_counts_windows_change_nothing(context):
    """Each token but the first is scored, and once, whatever the windows."""
    model = Bigrams(torch.rand(9, 9, generator=torch.Generator().manual_seed(0)).softmax(-1).tolist())
    text = random_tokens(40, vocab_size=9)
    expected = math.exp(-sum(model.table[a, b].log().item() for a, b in zip(text[:-1], text[1:], strict=True)) / 39)
    for stride in range(1, context + 1):
        assert perplexity(model, text, context, stride) == pytest.approx(expected, rel=1e-5)
    assert perplexity(model, text[:-1], context) != pytest.approx(expected, rel=1e-5)


def one_by_one(model, text, context, stride) -> float:
    """Each token predicted alone, from the context that the docstring gives it."""
    losses = []
    for t in range(1, len(text)):
        window = max(0, math.ceil((t - context) / stride))  # the first that reaches it
        seen = text[window * stride : t]
        assert len(seen) == t or context - stride + 1 <= len(seen) <= context
        losses.append(-model(seen[None])[0, -1].log_softmax(-1)[text[t]].item())
    return math.exp(sum(losses) / len(losses))


@pytest.mark.parametrize("context, stride", [(16, 8), (16, 1), (16, 16), (16, 5), (40, 7), (60, 60), (1, 1)])
@pytest.mark.parametrize("length", [41, 48, 60])
def test_windows_are_those_that_are_promised(context, stride, length):
    model = small_model(small_config(n_layers=1), dtype=torch.float64)
    text = random_tokens(length)
    expected = one_by_one(model, text, context, stride)
    assert perplexity(model, text, context, stride) == pytest.approx(expected, rel=1e-5)
    if stride > 1 and length > context + 1:  # partner: another stride gives other contexts
        assert perplexity(model, text, context, stride - 1) != pytest.approx(expected, rel=1e-5)


def test_the_default_is_the_model_s_context_and_half_of_it():
    model = small_model(small_config(max_seq_len=20))
    text = random_tokens(50)
    assert perplexity(model, text) == perplexity(model, text, 20, 10) != perplexity(model, text, 20, 20)
    assert perplexity(model, text, 15) == perplexity(model, text, 15, 8)


def test_an_lm_is_as_good_as_its_model():
    model, text = small_model(), random_tokens(30)
    assert perplexity(LM(model, None, "small"), text.tolist()) == perplexity(model, text)


def test_windows_are_run_in_batches_that_change_nothing(monkeypatch):
    model, text = small_model(dtype=torch.float64), random_tokens(100)
    calls = []
    monkeypatch.setattr(model, "forward", lambda tokens, run=model.forward: calls.append(tokens.shape) or run(tokens))
    together = perplexity(model, text, 16, 8)
    assert calls == [(1, 16), (10, 16), (1, 11)]
    monkeypatch.setattr(quality, "AT_ONCE", 40)  # less than one row of logits: one window, and one row, at a time
    assert perplexity(model, text, 16, 8) == pytest.approx(together, rel=1e-6)
    assert len(calls) == 3 + 12


def test_half_precision_is_scored_in_float32():
    model, text = small_model(dtype=torch.bfloat16), random_tokens(60)
    logits = model(text[None, :-1])[0].double()
    expected = math.exp(-logits.log_softmax(-1)[range(59), text[1:]].mean().item())
    assert perplexity(model, text) == pytest.approx(expected, rel=1e-5)


def test_measuring_in_the_middle_of_a_training_leaves_it_alone():
    model = small_model().requires_grad_(True)
    perplexity(model, random_tokens(20))
    model(random_tokens(1, 5)).sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())


# Through a cache


def new_dense(model):
    return lambda rows: kv.DenseCache(model.config, rows, max_len=20, dtype=model.dtype, device="cpu")


def new_quantized(model, bits=2):
    return lambda rows: kv.QuantizedCache(model.config, bits, 4, 4, rows, dtype=model.dtype, device="cpu")


@pytest.mark.parametrize("chunk", [None, 1, 7, 100])
def test_a_cache_that_keeps_everything_changes_nothing(chunk):
    model, text = small_model(), random_tokens(90)
    made = []
    cache = lambda rows: made.append(new_dense(model)(rows)) or made[-1]  # noqa: E731
    through = perplexity(model, text, 20, 10, cache=cache, chunk=chunk)
    assert through == pytest.approx(perplexity(model, text, 20, 10), rel=1e-5)
    assert [c.batch_size for c in made] == [1, 6, 1] and [c.length for c in made] == [20, 20, 19]


@pytest.mark.parametrize("chunk", [1, 5, 32])
def test_a_lossy_cache_is_read_in_chunks(chunk):
    model, text = small_model(dtype=torch.float64), random_tokens(60)
    cache, losses = new_quantized(model)(1), []
    for start in range(0, 59, chunk):
        piece = text[None, start : min(start + chunk, 59)]
        scores = model(piece, cache=cache)[0].log_softmax(-1)
        losses += [-row[token].item() for row, token in zip(scores, text[start + 1 :], strict=False)]
    through = perplexity(model, text, cache=new_quantized(model), chunk=chunk)
    assert len(losses) == 59 and through == pytest.approx(math.exp(sum(losses) / 59), rel=1e-5)
    assert through != pytest.approx(perplexity(model, text), rel=1e-3)  # the partner
    assert through != perplexity(model, text, cache=new_quantized(model), chunk=chunk + 1)
    if chunk == 32:
        assert through == perplexity(model, text, cache=new_quantized(model))


def test_what_is_no_way_to_a_cache_is_refused():
    model, text = small_model(), random_tokens(30)
    held = kv.DenseCache(model.config, dtype=model.dtype, device="cpu")
    model(text[None, :5], cache=held)
    for options, words in [
        ({"chunk": 4}, "chunk=4 says .* give a cache too"),
        ({"cache": new_dense(model), "chunk": 0}, "chunk=0 must be a whole number of at least 1"),
        ({"cache": held}, "cache must be a function .* got DenseCache"),
        ({"cache": lambda rows: held}, "must make a new cache each time .* gave one that holds 5 tokens already"),
        ({"cache": lambda rows: kv.NoCache(model.config)}, "keeps no tokens"),
        ({"cache": lambda rows: None}, "must make a new cache each time .* gave None"),
        ({"cache": new_dense(model)}, "the cache has room for 20"),
        ({"cache": new_dense(small_model(small_config(n_layers=1)))}, "another model"),
    ]:
        with pytest.raises(ValueError, match=words):
            perplexity(model, text, **options)


NO_TEXTS = ["the fox", b"fox", {1, 2}, {1: 2, 3: 4}, iter([1, 2]), 5, None, [True, False], torch.tensor([True, False])]
NO_TEXTS += [torch.zeros(1, 5, dtype=torch.int64), torch.tensor(5), np.array([[1, 2]]), np.array([True, False])]


@pytest.mark.parametrize(
    "tokens, options, words",
    [
        ([], {}, "tokens has 0, but at least 2"),
        ([5], {}, "tokens has 1, but at least 2"),
        ([5, 97], {}, "Token id 97 in tokens is outside the vocabulary: ids go from 0 to 96"),
        ([-1, 5], {}, "Token id -1"),
        ([1.5, 2], {}, "whole numbers"),
        *((wrong, {}, "tokens must be the ids of one text, whole numbers in a list.*lm.encode") for wrong in NO_TEXTS),
        ([1, 2], {"context": 0}, "context=0 must be a whole number of at least 1"),
        ([1, 2], {"context": 257}, "context=257 must be at most 256, the model's own"),
        ([1, 2], {"context": 2.5}, "context=2.5"),
        ([1, 2], {"stride": 0}, "stride=0 must be a whole number of at least 1"),
        ([1, 2], {"context": 8, "stride": 9}, "stride=9 must be at most 8, the context"),
    ],
)
def test_texts_and_windows_that_cannot_be_scored(tokens, options, words):
    with pytest.raises(ValueError, match=words):
        perplexity(small_model(), tokens, **options)


@pytest.mark.parametrize("measure", [lambda m: perplexity(m, [1, 2]), lambda m: recall(m, 40)])
def test_what_is_no_model(measure):
    for model in ("tiny-gqa", None, small_config()):
        with pytest.raises(ValueError, match="model must be an LM, as load_model gives it, or a Transformer"):
            measure(model)


def test_scores_that_are_no_numbers_are_no_measurement(monkeypatch):
    model = small_model()
    model.norm.weight[0] = torch.nan
    with pytest.raises(RuntimeError, match="scores are no numbers"):
        perplexity(model, [1, 2, 3])
    monkeypatch.setattr(quality, "probes", lambda *_, **__: iter([Probe("key", [1, 2], [3], 1, 0, 0)]))
    with pytest.raises(RuntimeError, match="scores are no numbers"):
        recall(LM(model, course_tokenizer(), "small"), 40, questions=1)


# --- recall --------------------------------------------------------------------------------------------------


def course_tokenizer():
    return Tokenizer.from_folder(shipped_folder("tiny-gqa"))


class Knows:
    """A model made by hand: after each prompt it writes the answer that it was given, and token 0 elsewhere."""

    def __init__(self, answers: list[tuple[list[int], list[int]]], vocab_size: int):
        self.next = {}
        for prompt, answer in answers:
            for i, token in enumerate(answer):
                self.next[(*prompt, *answer[:i])] = token
        self.config = small_config(vocab_size=vocab_size)

    def __call__(self, tokens, positions):
        logits = torch.zeros(*tokens.shape, self.config.vocab_size)
        for row, ids in enumerate(tokens.tolist()):
            for t in range(int((positions[row] >= 0).sum())):
                logits[row, t, self.next.get(tuple(ids[: t + 1]), 0)] = 1
        return logits


def test_whoever_knows_every_answer_is_always_right_and_whoever_knows_none_never():
    tokenizer = course_tokenizer()
    asked = [(p.prompt, p.answer) for p in islice(probes(tokenizer, 40, longest=256, seed=3, split="test"), 12)]
    assert all(answer and 0 not in answer for _, answer in asked)
    knows = Knows(asked, tokenizer.vocab_size)
    assert recall(knows, 40, questions=12, seed=3).right == 12
    assert recall(Knows([], tokenizer.vocab_size), 40, questions=12, seed=3).right == 0
    assert recall(Knows(asked[:5], tokenizer.vocab_size), 40, questions=12, seed=3).right in range(5, 12)
    assert recall(knows, 40, questions=12, seed=4).right < 12  # other questions
    assert recall(knows, 40, questions=12, seed=3, split="validation").right < 12


def test_one_pass_is_as_good_as_writing_the_answer(monkeypatch):
    """Prompts and answers of many lengths; in two of three the answer is not the one that the model writes, wrong at
    its first, or at its last token."""
    model = small_model()
    asked, right = [], 0
    for number in range(24):
        prompt = random_tokens(5 + 3 * number, seed=number).tolist()
        answer = generate(model, prompt, 1 + number % 4).ids
        if number % 3:
            place = 0 if number % 3 == 1 else -1
            answer[place] = (answer[place] + 1) % 97
        asked.append(Probe("key", prompt, answer, 40, 1, number % 2))
        right += generate(model, prompt, len(answer)).ids == answer
    assert right == 8
    monkeypatch.setattr(quality, "probes", lambda *_, **__: iter(asked))
    lm = LM(model, course_tokenizer(), "small")
    assert recall(lm, 40, questions=24) == Recall(8, 24, 40, 0.5)
    monkeypatch.setattr(quality, "AT_ONCE", 1)  # one question at a time
    assert recall(lm, 40, questions=24) == Recall(8, 24, 40, 0.5)
    assert recall(lm, 40, questions=7) == Recall(3, 7, 40, 4 / 7)


def test_the_questions_are_asked_in_the_model_s_own_tokens_and_context(monkeypatch):
    seen = []

    def asked(tokenizer, distance, longest, **options):
        seen.append((tokenizer, distance, longest, options))
        return iter([Probe("key", [1], [2], distance, 0, 0)] * 3)

    monkeypatch.setattr(quality, "probes", asked)
    own = course_tokenizer()
    recall(LM(small_model(), own, "small"), 40, questions=3, seed=7, split="train")
    assert seen == [(own, 40, 256, {"seed": 7, "split": "train"})]
    recall(small_model(small_config(vocab_size=own.vocab_size)), 40, questions=3)
    assert seen[1][0].tokens == own.tokens and seen[1][1:] == (40, 256, {"seed": 0, "split": "test"})


def test_a_course_model_can_be_asked_with_and_without_its_tokenizer():
    lm = kv.load_model("tiny-gqa", "float32", "cpu")
    assert recall(lm, 30, questions=20) == recall(lm.model, 30, questions=20)


@pytest.mark.parametrize(
    "distance, options, words",
    [
        (1000, {}, "1000"),
        (0, {}, "distance=0"),
        (2.5, {}, "distance=2.5"),
        (True, {}, "distance=True"),
        (40, {"questions": 0}, "questions=0"),
        (40, {"seed": None}, "seed=None must be a whole number of at least 0"),
        (40, {"seed": "x"}, "seed='x' must be a whole number"),
        (40, {"split": "exam"}, "exam"),
    ],
)
def test_questions_that_cannot_be_asked(distance, options, words):
    model = small_model(small_config(vocab_size=course_tokenizer().vocab_size))
    with pytest.raises(ValueError, match=words):
        recall(model, distance, **options)


def test_a_context_that_is_too_short_for_any_story():
    model = small_model(small_config(vocab_size=course_tokenizer().vocab_size, max_seq_len=20))
    with pytest.raises(
        ValueError, match="A context of 20 tokens is too short for a story.*it takes at least 36 tokens"
    ):
        recall(model, 12)


def test_a_model_with_another_vocabulary_cannot_be_asked_in_the_course_s_tokens():
    with pytest.raises(ValueError, match="a vocabulary of 97 tokens.*give an LM, which brings its tokenizer"):
        recall(small_model(), 40)
    with pytest.raises(ValueError, match="small came without a tokenizer"):
        recall(LM(small_model(), None, "small"), 40)


@pytest.mark.parametrize(
    "places, share",
    [
        ([(0, 0)], 1),  # the only fact of its kind
        ([(1, 0), (1, 0), (1, 1)], 2 / 3),  # the latest of two
        ([(1, 1), (1, 0), (3, 3)], 2 / 3),  # the first
        ([(3, 1), (3, 2)], 1 / 4),  # neither: one of four
        ([(1, 0), (1, 1), (2, 1)], (1 / 2 + 1 / 2 + 1 / 3) / 3),  # any one, before 1 in 3 by the latest or the first
    ],
)
def test_what_guessing_gives(places, share):
    """A place: how many rivals the fact asked for has, and how many of these come later."""
    assert quality.guessed_share([Probe("key", [1], [2], 40, *place) for place in places]) == pytest.approx(share)


@pytest.mark.parametrize(
    "right, asked, low, high",
    [
        (0, 10, 0, 0.27753),  # none right: z^2 / (n + z^2)
        (10, 10, 0.72247, 1),
        (1, 1, 0.20655, 1),
        (45, 100, 0.35615, 0.54755),
        (500, 1000, 0.46907, 0.53093),
    ],
)
def test_intervals(right, asked, low, high):
    result = Recall(right, asked, 64)
    assert (result.low, result.high) == pytest.approx((low, high), abs=1e-5)
    assert wilson(asked - right, asked) == pytest.approx((1 - high, 1 - low), abs=1e-5)
    assert result.share == right / asked


def test_the_interval_holds_the_shares_that_would_not_be_surprising():
    """Its ends are the shares p from which the count lies just 1.96 standard errors sqrt(p (1 - p) / n) away."""
    for right, asked in ((3, 40), (45, 100), (190, 200)):
        for p in wilson(right, asked):
            assert abs(right / asked - p) == pytest.approx(1.959964 * math.sqrt(p * (1 - p) / asked), rel=1e-6)


def test_a_result_can_be_read():
    said = "45 of 100 questions answered right at 64 tokens: 45.0% (95% interval 35.6% to 54.8%)"
    assert str(Recall(45, 100, 64)) == said
    assert str(Recall(45, 100, 64, 0.375)) == said + "; by guessing 37.5%"
