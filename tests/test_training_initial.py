"""Starting weights: sizes, what variants have in common, and what the first heads and the later layers do already.

Expected numbers are worked out from the documented ones: a head has 32 numbers, the residual stream 192.
"""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from kvcourse.layers import rotate
from kvcourse.training.recipe import VARIANTS, Recipe, new_model

RECIPE = Recipe()
HEADS, D, WIDTH = 8, 32, 192


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


@cache
def model(variant="tiny-mha", arranged=True, seed=0):
    return new_model(replace(RECIPE, arranged=arranged, seed=seed), variant)


def weights(*args, **options):
    return {name: weight.detach() for name, weight in model(*args, **options).named_parameters()}


def random_tokens(rows, length, seed=1):
    return torch.randint(1, RECIPE.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def vectors(count, seed=1):
    """Vectors of size one in each number, as a norm gives them."""
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


# --- which weights ---------------------------------------------------------------------------------------------------


def test_the_seed_fixes_all_of_them():
    torch.manual_seed(3)
    again = dict(new_model(RECIPE, "tiny-gqa").named_parameters())
    mine, other = weights("tiny-gqa"), weights("tiny-gqa", seed=1)
    assert [name for name in mine if not torch.equal(mine[name], again[name])] == []
    assert [name for name in mine if torch.equal(mine[name], other[name])] == [n for n in mine if mine[n].ndim == 1]


def test_no_two_matrices_are_alike():
    seen = [weight.flatten()[:64] for weight in weights(arranged=False).values() if weight.ndim > 1]
    assert len({tuple((part / part.norm()).mul(1e4).round().tolist()) for part in seen}) == len(seen) == 29


def test_a_new_model_is_ready_to_be_trained():
    new = new_model(RECIPE, "tiny-mqa")
    assert new.training and new.dtype == torch.float32 and new.device.type == "cpu"
    assert all(weight.requires_grad and weight.isfinite().all() for weight in new.parameters())


def differing(variant, arranged):
    """Weights of the same shape in which a variant differs from tiny-mha, and those of another shape; no layers."""
    mha, other = weights("tiny-mha", arranged), weights(variant, arranged)
    assert list(mha) == list(other)
    reshaped = {name for name in mha if mha[name].shape != other[name].shape}
    changed = {name for name in mha if name not in reshaped and not torch.equal(mha[name], other[name])}
    return changed, reshaped


KEYS_VALUES = {f"layers.{layer}.self_attn.{part}_proj.weight" for layer in range(4) for part in "kv"}
FOLLOWING = {f"layers.{layer}.self_attn.{part}_proj.weight" for layer in (1, 2, 3) for part in "qo"}


@pytest.mark.parametrize("variant", ["tiny-gqa", "tiny-mqa"])
def test_variants_share_what_does_not_follow_from_keys_and_values(variant):
    """In later layers, queries are begun like keys and outputs like values, so they differ where those do."""
    assert differing(variant, arranged=False) == (set(), KEYS_VALUES)
    assert differing(variant, arranged=True) == (FOLLOWING, KEYS_VALUES)


def test_a_window_changes_no_weight():
    assert differing("tiny-window", arranged=True) == (set(), set())


def test_fewer_key_value_heads_are_the_first_of_many():
    for name in KEYS_VALUES:
        most = weights(arranged=False)[name]
        for variant, heads in (("tiny-gqa", 2), ("tiny-mqa", 1)):
            assert torch.equal(weights(variant, arranged=False)[name], most[: D * heads])


# --- their sizes -----------------------------------------------------------------------------------------------------

STANDARD_DEVIATION = {
    "embed_tokens": 0.2,
    "q_proj": 0.7 / math.sqrt(192),
    "k_proj": 0.7 / math.sqrt(192),
    "v_proj": 0.7 / math.sqrt(192),
    "gate_proj": 0.7 / math.sqrt(192),
    "up_proj": 0.7 / math.sqrt(192),
    "o_proj": 0.7 / math.sqrt(256) / math.sqrt(8),  # four layers write eight times
    "down_proj": 0.7 / math.sqrt(512) / math.sqrt(8),
}


@pytest.mark.parametrize("arranged", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_starting_values_are_of_the_documented_size(variant, arranged):
    for name, weight in weights(variant, arranged).items():
        if weight.ndim == 1:
            assert weight.unique().tolist() == [pytest.approx(0.3 if name == "norm.weight" else 1.0)], name
        elif not arranged or "layers.0.self_attn" not in name:
            own = weight - weight.mean(0) if name == "embed_tokens.weight" else weight
            assert own.std().item() == pytest.approx(STANDARD_DEVIATION[name.split(".")[-2]], rel=0.03), name
            assert abs(own.mean().item()) < 0.05 * own.std().item(), name


def test_outputs_have_seven_tenths_of_the_size_of_inputs():
    mlp = model().layers[2].mlp
    assert mlp.gate_proj(vectors(200)).std().item() == pytest.approx(0.7, rel=0.03)


@pytest.mark.parametrize("arranged", [False, True])
def test_first_scores_are_small(arranged):
    """After the norm a vector has the length 0.3 sqrt(192), and scores are its products with embeddings of 0.2. With
    the last norm's scale at 1, as in other layers, they are more than three times as large."""
    new, tokens = model(arranged=arranged), random_tokens(4, 100)
    spread = 0.3 * math.sqrt(192) * 0.2
    assert new(tokens).std(-1).mean().item() == pytest.approx(spread, rel=0.1)
    scaled = new_model(replace(RECIPE, arranged=arranged), "tiny-mha")
    scaled.norm.weight.fill_(1.0)
    assert scaled(tokens).std(-1).mean().item() == pytest.approx(spread / 0.3, rel=0.1)


# --- the direction that all embeddings share -------------------------------------------------------------------------


def test_all_embeddings_share_one_direction_of_half_their_length():
    added = weights()["embed_tokens.weight"] - weights(arranged=False)["embed_tokens.weight"]
    assert torch.allclose(added, added[:1].expand_as(added), atol=1e-6)
    assert added[0].norm().item() == pytest.approx(0.5 * 0.2 * math.sqrt(192), rel=1e-4)
    assert torch.cosine_similarity(added[0], weights(seed=1)["embed_tokens.weight"].mean(0), dim=0).abs() < 0.3


def test_the_direction_tells_nothing_of_the_next_token():
    """The tied head scores token t by (own part of t + shared) · h: the shared part adds the same number to all scores,
    and probabilities are those of the own parts alone. A direction that half of the tokens have would change them."""
    new, hidden = model(), []
    new.norm.register_forward_hook(lambda module, given, out: hidden.append(out))
    logits = new(random_tokens(2, 50))
    own = weights(arranged=False)["embed_tokens.weight"]
    alone = hidden[0] @ own.T
    shift = logits - alone
    assert shift.std(-1).max() < 1e-5 and shift.abs().max() > 0.1
    assert torch.allclose(logits.log_softmax(-1), alone.log_softmax(-1), atol=1e-5)
    half = own.clone()
    half[::2] = weights()["embed_tokens.weight"][::2]
    assert not torch.allclose((hidden[0] @ half.T).log_softmax(-1), alone.log_softmax(-1), atol=0.1)


# --- heads that look back --------------------------------------------------------------------------------------------


def first_attention(new, tokens, first=0, table=None):
    """Weights `(B, H, T, T)` of the first layer for tokens that stand at `first` and after."""
    layer, positions = new.layers[0], torch.arange(first, first + tokens.shape[1]).expand_as(tokens)
    x = layer.input_layernorm((new.embed_tokens.weight if table is None else table)[tokens])
    q, k = (
        rotate(layer.self_attn.split(project(x)), *new.rotary(positions))
        for project in (layer.self_attn.q_proj, layer.self_attn.k_proj)
    )
    scores = q @ k.repeat_interleave(HEADS // new.config.n_kv_heads, 1).mT / math.sqrt(D)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1)


def looked_at(attention, head, back):
    """Mean weight that a head puts on the token so many places back, where there are three before or more."""
    return attention[:, head].diagonal(-back, -2, -1)[:, 3:].mean().item()


@pytest.mark.parametrize("first", [0, 450])
@pytest.mark.parametrize("variant", ["tiny-mha", "tiny-gqa", "tiny-mqa"])
def test_the_first_two_heads_look_one_and_two_tokens_back(variant, first):
    tokens = random_tokens(16, 40)
    begun = first_attention(model(variant), tokens, first)
    assert torch.allclose(begun.sum(-1), torch.ones(()), atol=1e-5)
    assert looked_at(begun, 0, 1) > 0.5 and looked_at(begun, 1, 2) > 0.5
    assert looked_at(begun, 0, 2) < 0.25 and looked_at(begun, 1, 1) < 0.25
    for attention in (begun[:, 2:], first_attention(model(variant, arranged=False), tokens, first)):
        for head in range(attention.shape[1]):
            assert max(looked_at(attention, head, back) for back in range(3)) < 0.2


def test_they_look_back_by_the_shared_direction():
    """Without it in the embeddings, the same heads find the place no more."""
    own = weights(arranged=False)["embed_tokens.weight"]
    blind = first_attention(model(), random_tokens(16, 40), table=own)
    assert looked_at(blind, 0, 1) < 0.2 and looked_at(blind, 1, 2) < 0.2


def test_these_heads_write_alike_and_three_times_as_much():
    attention = model().layers[0].self_attn
    v = attention.v_proj.weight.view(HEADS, D, WIDTH)
    o = attention.o_proj.weight.view(WIDTH, HEADS, D).movedim(1, 0)
    assert torch.equal(v[0], v[1]) and torch.equal(o[0], o[1])
    assert not torch.equal(v[1], v[2]) and not torch.equal(o[1], o[2])
    assert (o[:2].std() / o[2:].std()).item() == pytest.approx(3.0, rel=0.05)


# --- layers that look for what is alike ------------------------------------------------------------------------------


def own_scores(attention, x, other):
    """Mean score of a place for the key of another, at the same position, so that rotation changes nothing."""
    q, k = attention.split(attention.q_proj(x)[None])[0], attention.split(attention.k_proj(other)[None])[0]
    return (q * k.repeat_interleave(HEADS // len(k), 0)).sum(-1).mean().item() / math.sqrt(D)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_place_scores_those_that_resemble_it_highest(variant):
    """A query is 0.9 of the key and something else, and each of the key's 32 numbers has the variance 0.7^2."""
    expected, x = 0.9 * 0.7**2 * D / math.sqrt(D), vectors(200)
    for layer in (1, 2, 3):
        attention = model(variant).layers[layer].self_attn
        assert own_scores(attention, x, x) == pytest.approx(expected, rel=0.1)
        assert abs(own_scores(attention, x, vectors(200, seed=2))) < 0.1
        assert abs(own_scores(model(variant, arranged=False).layers[layer].self_attn, x, x)) < 0.3
    assert abs(own_scores(model(variant).layers[0].self_attn, x, x)) < 0.5


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_attended_to_is_passed_on_as_it_is(variant):
    """The output matrix is 0.7 of the values' turned back, and sqrt(0.51) of random numbers of the same size.

    For m = 32 x key-value heads rows V of variance s, turning back gives V'V x: m s along x, and m (m + 192) s^2 in
    square length; r = 8 / key-value heads query heads add up the same. The random part has the square length 192 x 256.
    """
    m = D * VARIANTS[variant]["n_kv_heads"]
    r = HEADS * D // m
    length = math.sqrt(0.7**2 * r**2 * m * (m + WIDTH) + (1 - 0.7**2) * WIDTH * HEADS * D)
    x = vectors(200)
    for layer in (1, 2, 3):
        for arranged, expected in ((True, 0.7 * r * m / length), (False, 0.0)):
            attention = model(variant, arranged).layers[layer].self_attn
            values = attention.v_proj(x).view(-1, m // D, D).repeat_interleave(r, 1).flatten(1)
            alike = torch.cosine_similarity(attention.o_proj(values), x).mean().item()
            assert alike == pytest.approx(expected, abs=0.06)
