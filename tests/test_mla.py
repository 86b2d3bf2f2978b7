"""Multi-head latent attention: both forms against transformers' DeepSeek-V3, against each other, and what is kept."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from kvcourse.mla import LatentCache, Weights, absorbed, naive, random_weights

FORMS = [naive, absorbed]
SIZES = dict(n_heads=4, d_model=48, d_latent=20, d_rope=8, d_nope=12, d_value=10)


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def deepseek(interleave=False):
    """An attention layer of transformers with random weights, and a function that runs it over a whole text."""
    config = DeepseekV3Config(
        hidden_size=SIZES["d_model"],
        num_attention_heads=SIZES["n_heads"],
        num_key_value_heads=SIZES["n_heads"],
        q_lora_rank=None,
        kv_lora_rank=SIZES["d_latent"],
        qk_rope_head_dim=SIZES["d_rope"],
        qk_nope_head_dim=SIZES["d_nope"],
        v_head_dim=SIZES["d_value"],
        rope_interleave=interleave,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 100.0,
        },  # so small that all pairs turn within a few tokens
        attn_implementation="eager",
    )
    layer = DeepseekV3Attention(config, 0).double().requires_grad_(False)
    for seed, weight in enumerate(layer.parameters()):
        weight.copy_(draw(*weight.shape, seed=seed) / weight.shape[-1] ** 0.5 + (weight.ndim == 1))

    def run(x):
        T = x.shape[1]
        rotary = DeepseekV3RotaryEmbedding(config)(x, torch.arange(T)[None])
        later = torch.ones(T, T, dtype=torch.bool).triu(1)
        return layer(x, rotary, torch.zeros(1, 1, T, T, dtype=x.dtype).masked_fill(later, -torch.inf))[0]

    return layer, run


def weights_of(layer, order=None):
    """The weights of transformers' layer; `order` of the rows that are rotated."""
    H, d_latent, d_rope, d_nope = (SIZES[name] for name in ("n_heads", "d_latent", "d_rope", "d_nope"))
    order = torch.arange(d_rope) if order is None else order
    down = layer.kv_a_proj_with_mqa.weight
    up = layer.kv_b_proj.weight.view(H, -1, d_latent)
    w_q = layer.q_proj.weight.view(H, d_nope + d_rope, -1)
    return Weights(
        w_q=torch.cat((w_q[:, :d_nope], w_q[:, d_nope:][:, order]), dim=1),
        w_dkv=down[:d_latent],
        w_kr=down[d_latent:][order],
        w_uk=up[:, :d_nope],
        w_uv=up[:, d_nope:],
        w_o=layer.o_proj.weight.unflatten(1, (H, -1)).transpose(0, 1),
        norm=layer.kv_a_layernorm.weight,
        rope_theta=100.0,
        norm_eps=layer.kv_a_layernorm.variance_epsilon,
    )


# --- the numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_both_forms_equal_deepseek_in_transformers(form):
    layer, run = deepseek()
    x = draw(2, 9, SIZES["d_model"])
    # Its norm, softmax and angles are in float32.
    torch.testing.assert_close(form(x, weights_of(layer)), run(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("form", FORMS)
def test_checkpoints_whose_pairs_stand_side_by_side_need_another_order(form):
    layer, run = deepseek(interleave=True)
    x = draw(2, 9, SIZES["d_model"])
    order = torch.arange(SIZES["d_rope"]).view(-1, 2).T.flatten()  # 0 2 4 6 1 3 5 7
    torch.testing.assert_close(form(x, weights_of(layer, order)), run(x), atol=1e-5, rtol=0)
    assert (form(x, weights_of(layer)) - run(x)).abs().max() > 0.01


@pytest.mark.parametrize(
    "change",
    [
        lambda w: {"w_uk": w.w_uk.flip(0)},
        lambda w: {"w_uv": w.w_uv.flip(0)},
        lambda w: {"w_kr": 0 * w.w_kr},
        lambda w: {"norm": torch.ones_like(w.norm)},
        lambda w: {"rope_theta": 1e6},
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_every_weight_counts(form, change):
    """So that the equality above could not hold by chance."""
    layer, run = deepseek()
    x, w = draw(2, 9, SIZES["d_model"]), weights_of(layer)
    assert (form(x, replace(w, **change(w))) - run(x)).abs().max() > 1e-3


@pytest.mark.parametrize(
    "sizes", [SIZES, SIZES | {"n_heads": 1}, SIZES | {"d_latent": 5}, SIZES | {"d_latent": 200}, {}], ids=str
)
def test_naive_and_absorbed_are_equal(sizes):
    w = random_weights(**sizes)
    x = draw(2, 9, w.w_kr.shape[1])
    out = naive(x, w)
    assert out.std() > 0.1
    torch.testing.assert_close(absorbed(x, w), out, atol=1e-12, rtol=0)


def test_the_scale_goes_by_the_keys_that_are_never_made(monkeypatch):
    """The absorbed form compares vectors of d_latent + d_rope; scaling by that size is the natural mistake."""
    w, x = random_weights(**SIZES), draw(2, 9, SIZES["d_model"])
    out = naive(x, w)
    assert w.scale == (12 + 8) ** -0.5
    monkeypatch.setattr(Weights, "scale", (20 + 8) ** -0.5)
    assert (absorbed(x, w) - out).abs().max() > 1e-3


# --- step by step ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunks", [[1] * 9, [4, 1, 1, 1, 1, 1], [3, 3, 3], [1, 8], [9]], ids=str)
def test_steps_equal_the_whole_text(form, chunks):
    w, x = random_weights(**SIZES), draw(2, 9, SIZES["d_model"])
    cache = LatentCache()
    out = torch.cat([form(part, w, cache) for part in x.split(chunks, dim=1)], dim=1)
    torch.testing.assert_close(out, naive(x, w), atol=1e-12, rtol=0)
    assert cache.length == 9


@pytest.mark.parametrize("form", FORMS)
def test_the_cache_is_what_makes_steps_equal(form):
    w, x = random_weights(**SIZES), draw(2, 9, SIZES["d_model"])
    alone = torch.cat([form(part, w) for part in x.split(1, dim=1)], dim=1)
    assert (alone - naive(x, w)).abs().max() > 0.1


def test_one_form_can_go_on_from_the_cache_of_the_other():
    w, x = random_weights(**SIZES), draw(2, 9, SIZES["d_model"])
    cache = LatentCache()
    out = torch.cat([naive(x[:, :5], w, cache), absorbed(x[:, 5:], w, cache)], dim=1)
    torch.testing.assert_close(out, naive(x, w), atol=1e-12, rtol=0)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_later_is_seen(form):
    w, x = random_weights(**SIZES), draw(1, 9, SIZES["d_model"])
    changed = x.clone()
    changed[:, 5] += 1
    moved = (form(changed, w) - form(x, w)).abs().amax((0, 2))
    assert moved[:5].max() < 1e-12 and moved[5:].min() > 1e-3


# --- what is kept, and what is made ----------------------------------------------------------------------------------


def test_bytes_kept_are_those_of_latent_and_rotated_key():
    w, cache = random_weights(**SIZES), LatentCache()
    assert (cache.nbytes, cache.length) == (0, 0)
    for _ in range(3):
        absorbed(draw(2, 2, SIZES["d_model"]), w, cache)
    assert cache.latents.shape == (2, 6, 28)
    assert cache.nbytes == 2 * 6 * (20 + 8) * 8 == 2 * 6 * w.kept_latent * 8


def test_numbers_a_token_in_deepseek_v2():
    """Section 2.1.4, table 1: with 128 heads of 128, d_latent = 512 and d_rope = 64."""
    H, d_model, d_latent, d_rope, d = 128, 5120, 512, 64, 128
    shapes = dict(w_q=(H, d + d_rope, d_model), w_dkv=(d_latent, d_model), w_kr=(d_rope, d_model), norm=(d_latent,))
    shapes |= dict(w_uk=(H, d, d_latent), w_uv=(H, d, d_latent), w_o=(H, d_model, d))
    w = Weights(**{name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    assert w.kept_latent == 576
    assert w.kept_expanded == 40_960
    assert w.scale == 192**-0.5


class Largest(TorchDispatchMode):
    """Notes the most numbers that any operation gave."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numbers = max(self.numbers, out.numel())
        return out


def test_only_the_naive_form_makes_keys_and_values_of_every_head():
    S, w = 400, random_weights(**SIZES)
    made = {}
    for form in FORMS:
        cache = LatentCache()
        cache.append(draw(1, S - 1, w.kept_latent))
        with Largest() as largest:
            form(draw(1, 1, SIZES["d_model"]), w, cache)
        made[form] = largest.numbers
    assert made[naive] == S * 4 * (12 + 8)
    assert made[absorbed] == S * (20 + 8)  # the cache


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("x", "said"),
    [
        (draw(9, 48), r"got \(9, 48\)"),
        (draw(1, 9, 47), r"d_model=48.*got \(1, 9, 47\)"),
        (draw(1, 0, 48), "T at least 1"),
        (draw(1, 9, 48).float(), "float64 as the weights; got .*float32"),
    ],
)
def test_an_x_of_another_shape_or_dtype_is_refused(form, x, said):
    cache = LatentCache()
    with pytest.raises(ValueError, match=said):
        form(x, random_weights(**SIZES), cache)
    assert cache.length == 0


def test_a_cache_of_other_texts_or_weights_is_refused_and_stays_as_it_was():
    w, cache = random_weights(**SIZES), LatentCache()
    absorbed(draw(2, 3, 48), w, cache)
    before = cache.latents.clone()
    with pytest.raises(ValueError, match=r"\(2, 3, 28\), and \(1, 1, 28\)"):
        absorbed(draw(1, 1, 48), w, cache)
    with pytest.raises(ValueError, match=r"\(2, 3, 28\), and \(2, 1, 24\)"):
        absorbed(draw(2, 1, 48), random_weights(**SIZES | {"d_latent": 16}), cache)
    assert torch.equal(cache.latents, before)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"w_q": draw(4, 12, 48)}, r"w_q is \(4, 12, 48\).*must be \(4, 20, 48\)"),
        ({"w_dkv": draw(21, 48)}, r"w_dkv is \(21, 48\).*must be \(20, 48\)"),
        ({"w_uv": draw(2, 10, 20)}, r"w_uv is \(2, 10, 20\).*must be \(4, 10, 20\)"),
        ({"w_o": draw(48, 4, 10)}, r"w_o .*must be \(4, 48, 10\)"),
        ({"norm": draw(1)}, r"norm .*must be \(20,\)"),
        ({"w_uk": draw(48, 20)}, r"w_uk must be \(H, d_nope, d_latent\)"),
        ({"rope_theta": 0}, "rope_theta=0"),
    ],
)
def test_weights_that_do_not_fit_together_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        replace(random_weights(**SIZES), **changes)


@pytest.mark.parametrize(
    ("changes", "said"), [({"d_rope": 7}, "d_rope=7 is odd"), ({"n_heads": 0}, "n_heads=0"), ({"d_latent": 2.5}, "2.5")]
)
def test_sizes_that_cannot_be_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        random_weights(**SIZES | changes)


def test_random_weights_follow_from_the_seed():
    one, same, other = (random_weights(**SIZES, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.w_q, same.w_q) and torch.equal(one.norm, same.norm)
    assert not torch.equal(one.w_q, other.w_q)


@pytest.mark.parametrize("form", FORMS)
def test_products_past_the_largest_float16_are_scaled_first(form):
    """Scores of 2,000 and more, which are 300,000 and more before they are scaled; one token is seen, so the softmax is
    1 whatever the score."""
    w = random_weights(**SIZES | {"d_nope": 20_000}, dtype=torch.float16)
    w = replace(w, w_q=w.w_q.abs() * 20, w_uk=w.w_uk.abs(), norm=w.norm.abs())
    x = draw(1, 1, 48).half()
    exact = replace(w, **{name: x.double() for name, x in vars(w).items() if isinstance(x, torch.Tensor)})
    torch.testing.assert_close(form(x, w).double(), form(x.double(), exact), atol=2e-2, rtol=0)


@pytest.mark.parametrize("seed", [-1, 0.5, None])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(ValueError, match=f"seed={seed} must be a whole number of at least 0"):
        random_weights(**SIZES, seed=seed)
