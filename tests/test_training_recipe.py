"""The recipe: what each step reads and how fast it learns, the variants' shapes, and that no story is in two splits."""

import math
import random
from collections import Counter
from dataclasses import replace
from hashlib import sha256
from inspect import signature
from itertools import islice
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcourse.training import curriculum, recipe
from kvcourse.training.curriculum import NEAR, Stage, plan, write
from kvcourse.training.recipe import VARIANTS, Recipe, batch_at, held_out, new_model, training_texts
from kvcourse.training.stories.facts import KINDS
from kvcourse.training.stories.tales import make_story
from kvcourse.training.vocabulary import train_tokenizer

RECIPE = Recipe()
END = 0
OF_PEOPLE = {"food", "amount", "animal", "job", "dress", "journey"}  # kinds whose keys are the people of the story


@pytest.fixture(scope="module")
def tokenizer():
    """A small one: what is tested here holds for any."""
    rng = Random(0)
    return train_tokenizer([write(Stage(200, 0.3), rng).text for _ in range(120)], 500)


def stage_at(step: int) -> Stage:
    return RECIPE.stage(step / RECIPE.steps)


def same(one, other) -> bool:
    return (
        torch.equal(one.tokens, other.tokens) and torch.equal(one.weights, other.weights) and one.asked == other.asked
    )


def texts(batches, tokenizer, written) -> set[str]:
    """The stories in some batches. The last of a row is cut, so it is looked up among those written, by its beginning;
    a beginning that several have says nothing."""
    rows = [row for batch in batches for row in batch.tokens.tolist()]
    parts = [part for row in rows for part in tokenizer.decode(row, skip_special_tokens=False).split("<|end|>")[1:]]
    found = [{text for text in written if text.startswith(part)} for part in parts]
    assert all(found)
    return {text for some in found if len(some) == 1 for text in some}


def digest(text: str) -> int:
    return sha256(text.encode()).digest()[0] % 5


# --- what a step reads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 500, 3399])
def test_a_batch_follows_from_seed_and_step_alone(tokenizer, step):
    first = batch_at(RECIPE, tokenizer, step)
    random.seed(5), torch.manual_seed(5)
    assert same(first, batch_at(Recipe(), tokenizer, step))
    assert not torch.equal(first.tokens, batch_at(replace(RECIPE, seed=1), tokenizer, step).tokens)
    assert not torch.equal(first.tokens, batch_at(RECIPE, tokenizer, step + 1).tokens)


def test_a_batch_knows_no_variant(tokenizer):
    """All variants read the same: nothing that makes a batch is told which one is trained."""
    assert list(signature(batch_at).parameters) == ["recipe", "tokenizer", "step"]
    assert not set(vars(RECIPE)) & {"variant", "n_kv_heads", "window"}


@pytest.mark.parametrize(
    ("step", "rows", "length", "litanies", "weight"),
    [
        (0, 16, 64, 1.0, 30.0),
        (407, 16, 64, 1.0, 30.0),  # 12% of 3400 steps end here
        (408, 16, 64, 1.0, 30.0),
        (578, 16, 96, 1.0, 30.0),  # halfway from 64 to 128: 64 sqrt(2) = 90.5, in multiples of 16
        (747, 16, 128, 1.0, 30.0),  # 10% end here
        (748, 16, 128, 0.8, 10.0),
        (1079, 8, 256, 0.416, 10.0),  # halfway from 128 to 512, which takes a quarter of the steps that are left
        (1411, 4, 512, 0.03, 10.0),
        (3399, 4, 512, 0.03, 10.0),
    ],
)
def test_stages_by_hand(tokenizer, step, rows, length, litanies, weight):
    stage = stage_at(step)
    assert (stage.length, stage.answer_weight) == (length, weight)
    assert stage.litanies == pytest.approx(litanies, abs=1e-3)
    batch = batch_at(RECIPE, tokenizer, step)
    assert batch.tokens.shape == (rows, length + 1) and batch.weights.shape == (rows, length)
    assert set(batch.weights.unique().tolist()) <= {1.0, weight}
    assert int(batch.tokens.max()) < 500 and set(batch.tokens[:, 0].tolist()) == {END}


def test_no_step_reads_more_than_it_may():
    """2048 tokens, in rows that never get shorter, and all of these once the first quarter of a run is over."""
    lengths = [stage_at(step).length for step in range(3401)]
    assert lengths == sorted(lengths) and {length % 16 for length in lengths} == {0}
    assert (lengths[0], lengths[-1]) == (64, 512) == (RECIPE.shortest, RECIPE.max_seq_len)
    read = [length * min(16, 2048 // length) for length in lengths]
    assert max(read) == 2048 and min(read) == 16 * 64
    assert min(read[748:]) > 0.75 * 2048


def kinds_at_once(stage, count=150):
    rng = Random(1)
    return [Counter(question.kind for question in write(stage, rng).questions) for _ in range(count)]


def test_first_come_facts_with_one_word_between_key_and_answer():
    near = {"owner", "color", "price", "food", "amount", "dress"}
    bridges = {kind.name: kind.statement.partition("{key} ")[2].partition("{answer}")[0] for kind in KINDS}
    assert {name for name, words in bridges.items() if words.count(" ") == 1} == near == {kind.name for kind in NEAR}
    asked = kinds_at_once(stage_at(0))
    assert set().union(*asked) == near
    assert set().union(*kinds_at_once(stage_at(408))) == set(bridges)  # then those of all kinds


def test_first_comes_one_kind_at_once():
    """Of people there may be too few for all facts of a litany, and only then it has another kind."""
    asked = kinds_at_once(stage_at(0))
    several = [kinds for kinds in asked if len(kinds) > 1]
    assert len(several) < 0.25 * len(asked)
    assert all(OF_PEOPLE & set(kinds) for kinds in several)
    later = [kinds for kinds in kinds_at_once(stage_at(408)) if len(kinds) > 1]
    assert len(later) > 0.5 * len(asked) and not all(OF_PEOPLE & set(kinds) for kinds in later)


@pytest.mark.parametrize(
    ("step", "low", "high"), [(0, 1.0, 1.0), (748, 0.74, 0.86), (1080, 0.34, 0.49), (3399, 0.01, 0.06)]
)
def test_litanies_give_way_to_stories(monkeypatch, step, low, high):
    monkeypatch.setattr(curriculum, "litany", lambda *args: "litany")
    monkeypatch.setattr(curriculum, "make_story", lambda *args: "story")
    rng = Random(0)
    share = Counter(write(stage_at(step), rng) for _ in range(500))["litany"] / 500
    assert low <= share <= high


# --- plans -----------------------------------------------------------------------------------------------------------


def test_every_plan_is_possible():
    """`Plan` refuses what no story can follow; here for each length of a row and many seeds."""
    rng, seen = Random(0), Counter()
    for length in range(64, 513):
        for step in range(748, 3401, 145):
            made = plan(rng, replace(stage_at(step), length=length))
            assert 2 <= made.facts <= 8 and made.questions >= 1 and made.words >= 30
            seen[made.plain, made.framed] += 1
    assert set(seen) == {(False, False), (False, True), (True, False)}  # plain stories have no frame
    with pytest.raises(ValueError, match="words=0"):
        plan(rng, Stage(0, 0.0))


@settings(max_examples=40, deadline=None)
@given(st.integers(64, 512), st.integers(748, 3400), st.integers(0, 10**9))
def test_every_plan_is_followed(length, step, seed):
    rng = Random(seed)
    made = plan(rng, replace(stage_at(step), length=length))
    story = make_story(rng, made)
    assert len(story.questions) == made.questions
    assert len(story.text.split()) >= made.words - 12


# --- splits ----------------------------------------------------------------------------------------------------------


def test_no_story_is_in_two_splits(tokenizer, monkeypatch):
    """Three fifths of all digests are for training, one is for validation, one for the test."""
    written = []

    def spied(stage, rng):
        story = write(stage, rng)
        written.append(story.text)
        return story

    monkeypatch.setattr(recipe, "write", spied)
    batches = {"train": [batch_at(RECIPE, tokenizer, step) for step in (0, 410, 600, 750, 1090, 1340, 2300, 3399)]}
    batches |= {split: held_out(RECIPE, tokenizer, split, 24) for split in ("validation", "test")}
    stories = {split: texts(some, tokenizer, written) for split, some in batches.items()}
    assert len(stories["train"]) > 60 and all(len(some) >= 20 for some in stories.values())
    digests = {split: {digest(text) for text in some} for split, some in stories.items()}
    assert digests == {"train": {0, 1, 2}, "validation": {3}, "test": {4}}
    assert len(set().union(*stories.values())) == sum(map(len, stories.values()))
    assert {digest(text) for text in written} == {0, 1, 2, 3, 4}  # what was written has all of them


def test_held_out_rows_do_not_depend_on_the_seed(tokenizer):
    batches = held_out(RECIPE, tokenizer, "test", 6)
    assert [tuple(batch.tokens.shape) for batch in batches] == [(4, 513), (4, 513)]  # 6 rows at least
    again = held_out(replace(RECIPE, seed=9), tokenizer, "test", 6)
    assert all(same(one, other) for one, other in zip(batches, again, strict=True))
    assert not same(*batches)
    assert not same(batches[0], held_out(RECIPE, tokenizer, "validation", 4)[0])


def test_the_tokenizer_is_learned_from_training_stories_alone():
    some = list(islice(training_texts(RECIPE), 60))
    assert {digest(text) for text in some} == {0, 1, 2}
    for other in (replace(RECIPE, seed=4), replace(RECIPE, steps=50)):
        assert some == list(islice(training_texts(other), 60))  # a trial, too, has the tokenizer of the recipe
    words = [len(text.split()) for text in some]
    assert min(words) < 100 and max(words) > 300  # litanies, too, and stories as long as the last


# --- learning rate ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 2e-5),  # the first of 100 steps up
        (49, 1e-3),
        (99, 2e-3),
        (100, 2e-3),
        (925, 2e-3 * (0.05 + 0.95 * (1 + math.sqrt(0.5)) / 2)),  # a quarter of 3300 steps down: cos 45 degrees
        (1750, 1.05e-3),  # half of them: the middle of 2e-3 and 1e-4
        (3399, 1.0000043e-4),  # one step before the end: 0.95 (pi/3300)^2 / 4 above 0.05
    ],
)
def test_learning_rate_by_hand(step, rate):
    assert RECIPE.learning_rate(step) == pytest.approx(rate, rel=1e-6)
    assert RECIPE.learning_rate(step + 400) != pytest.approx(rate, rel=1e-3)


@given(st.integers(2, 500), st.integers(1, 400), st.floats(1e-5, 1), st.floats(0, 1))
def test_the_peak_is_the_largest_rate(steps, warmup, peak, final):
    some = Recipe(steps=steps, warmup=warmup, peak_lr=peak, final_lr=final)
    rates = [some.learning_rate(step) for step in range(steps)]
    assert 0 < max(rates) <= peak * (1 + 1e-12)
    if warmup < steps:
        assert max(rates) == pytest.approx(peak) and rates[warmup] == pytest.approx(peak)
        assert rates[:warmup] == sorted(rates[:warmup])
        assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
        assert min(rates[warmup:]) >= peak * final * (1 - 1e-12)


# --- variants --------------------------------------------------------------------------------------------------------

# 2000 x 192 embeddings and a last norm; in each of 4 layers: queries and outputs of 8 heads of 32, keys and values of
# the key-value heads, three matrices of 192 x 512, two norms.
OUTSIDE = 2000 * 192 + 192
PARAMETERS = {
    heads: OUTSIDE + 4 * (2 * 192 * 8 * 32 + 2 * 192 * heads * 32 + 3 * 192 * 512 + 2 * 192) for heads in (8, 2, 1)
}


@pytest.mark.parametrize(
    ("variant", "kv_heads", "window"),
    [("tiny-mha", 8, None), ("tiny-gqa", 2, None), ("tiny-mqa", 1, None), ("tiny-window", 8, 64)],
)
def test_variants_differ_in_attention_alone(variant, kv_heads, window):
    config = RECIPE.config(variant)
    assert (config.n_heads, config.n_kv_heads, config.window) == (8, kv_heads, window)
    assert replace(config, n_kv_heads=8, window=None) == RECIPE.config("tiny-mha")
    count = sum(weight.numel() for weight in new_model(RECIPE, variant).parameters())
    assert count == PARAMETERS[kv_heads] < 4_000_000


def test_the_four_are_small_enough_to_travel():
    assert PARAMETERS == {8: 2_351_808, 2: 2_056_896, 1: 2_007_744}
    models = [new_model(RECIPE, variant) for variant in VARIANTS]
    halves = sum(weight.half().nbytes for model in models for weight in model.state_dict().values())
    assert len(models) == 4 and halves == 17_536_512 < 32_000_000


def test_an_unknown_variant_is_an_error():
    with pytest.raises(ValueError, match="no variant 'tiny-moe'; choose one of tiny-mha, tiny-gqa, tiny-mqa, tiny-win"):
        RECIPE.config("tiny-moe")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "steps=0 must be a whole number of at least 1"),
        ({"rows": 2.5}, "rows=2.5 must be a whole number"),
        ({"batch_tokens": 256}, "shortest=64, max_seq_len=512 and batch_tokens=256 must be given in rising order"),
        ({"max_seq_len": 32}, "shortest=64, max_seq_len=32 and"),
        ({"shortest": 8}, "of at least 16 tokens: shortest=8"),
        ({"near": 0.5, "facts": 0.5}, "near=0.5 and facts=0.5 are shares"),
        ({"near": -0.1}, "near=-0.1 and"),
    ],
)
def test_a_recipe_that_no_run_can_follow_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**wrong)


def test_rows_fit_a_short_context(tokenizer):
    """Half as long as the rows with which stories begin in the recipe."""
    short = Recipe(max_seq_len=72, shortest=16, steps=50)
    lengths = [batch_at(short, tokenizer, step).tokens.shape[1] - 1 for step in range(50)]
    assert (lengths[0], lengths[-1], max(lengths)) == (16, 72, 72) and lengths == sorted(lengths)
    assert held_out(replace(short, rows=3), tokenizer, "test", 6)[0].tokens.shape == (3, 73)
