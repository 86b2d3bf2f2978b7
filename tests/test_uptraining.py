"""Sharing key-value heads of a trained model, and training it a little more."""

import math
from dataclasses import replace

import pytest
import torch

import kvcourse as kv
from kvcourse import uptraining
from kvcourse.lm import LM
from kvcourse.training.recipe import Recipe
from kvcourse.training.stories.page import split_of
from kvcourse.uptraining import fine_tune, share_heads, stories, tokenizer_for

SIZES = dict(vocab_size=2000, n_layers=2, n_heads=8, d_model=32, d_head=8, d_ff=48, max_seq_len=64)
CONFIG = kv.ModelConfig(**SIZES, tie_embeddings=True)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_model(config=CONFIG, dtype=torch.float32):
    """Norms are random too, and biases, where there are some."""
    model = kv.Transformer(config, "cpu", dtype)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.copy_(0.1 * torch.randn(weight.shape, generator=generator) + (weight.ndim == 1))
    return model


def with_equal_heads(config, number_of):
    """A model in which key-value heads of the same `number_of(head)` are the same."""
    model = random_model(config, torch.float64)
    for layer in model.layers:
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            for weight in projection.parameters():
                heads = weight.view(config.n_kv_heads, config.d_head, *weight.shape[1:])
                heads.copy_(torch.stack([heads[number_of(head)] for head in range(config.n_kv_heads)]))
    return model


def weights(model):
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def differing(one, other):
    return [name for name in one if not torch.equal(one[name], other[name])]


def logits(model):
    return model(torch.arange(40).reshape(2, 20) * 37)


# --- sharing heads ---------------------------------------------------------------------------------------------------

CONFIGS = {
    "llama": CONFIG,
    "4 heads": kv.ModelConfig(**SIZES, n_kv_heads=4),
    "qwen2": kv.ModelConfig(**SIZES, qkv_bias=True),
    "qwen3": kv.ModelConfig(**SIZES, qk_norm=True),
    "window": kv.ModelConfig(**SIZES, window=(None, 5)),
}


@pytest.mark.parametrize("how", ["mean", "first"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_heads_that_are_equal_can_be_shared_without_loss(config, n_kv_heads, how):
    """If all heads of a group were the same already, one of them does the work of all."""
    group = config.n_kv_heads // n_kv_heads
    model = with_equal_heads(config, lambda head: head // group)
    shared = share_heads(model, n_kv_heads, how)
    assert shared.config == replace(config, n_kv_heads=n_kv_heads)
    torch.testing.assert_close(logits(shared), logits(model), atol=1e-12, rtol=0)


@pytest.mark.parametrize("how", ["mean", "first", "random"])
def test_heads_that_differ_cannot(how):
    """With every second head the same, the groups would have to be laid out like tiles: heads 0, 2, 4, 6 together."""
    model = with_equal_heads(CONFIG, lambda head: head % 2)
    assert (logits(share_heads(model, 2, how)) - logits(model)).abs().max() > 1e-2


def test_random_heads_keep_nothing_even_of_equal_ones():
    model = with_equal_heads(CONFIG, lambda head: head // 4)
    assert (logits(share_heads(model, 2, "random")) - logits(model)).abs().max() > 1e-2


def test_mean_and_first_by_hand():
    """Heads of size 2 in a model of width 2, so a projection is read two rows at a time."""
    config = kv.ModelConfig(vocab_size=5, n_layers=1, n_heads=4, d_model=2, d_head=2, d_ff=2, qkv_bias=True)
    model = random_model(config)
    v = model.layers[0].self_attn.v_proj
    v.weight.copy_(torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7], [10, 10], [10, 10], [20, 30], [40, 50]]))
    v.bias.copy_(torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]))
    mean, first = (share_heads(model, 2, how).layers[0].self_attn.v_proj for how in ("mean", "first"))
    assert mean.weight.tolist() == [[2, 3], [4, 5], [15, 20], [25, 30]]
    assert mean.bias.tolist() == [2, 3, 6, 7]
    assert first.weight.tolist() == [[0, 1], [2, 3], [10, 10], [10, 10]]
    assert first.bias.tolist() == [1, 2, 5, 6]


def test_random_heads_have_the_spread_of_those_before_and_follow_from_the_seed():
    model = random_model(replace(CONFIG, d_model=64))
    model.layers[1].self_attn.k_proj.weight.mul_(7)
    one, same, other = (weights(share_heads(model, 2, "random", seed=seed)) for seed in (0, 0, 1))
    for name, spread in (("layers.0.self_attn.k_proj.weight", 0.1), ("layers.1.self_attn.k_proj.weight", 0.7)):
        assert one[name].std().item() == pytest.approx(spread, rel=0.1)
        assert one[name].shape == (16, 64)
    assert differing(one, same) == []
    drawn = [f"layers.{layer}.self_attn.{kind}_proj.weight" for layer in (0, 1) for kind in "kv"]
    assert differing(one, other) == drawn
    assert not torch.equal(one[drawn[0]], one[drawn[1]])


@pytest.mark.parametrize("how", ["mean", "first", "random"])
def test_the_given_model_stays_as_it_is_and_shares_no_memory(how):
    model = random_model()
    before = weights(model)
    for n_kv_heads in (2, 8):
        shared = share_heads(model, n_kv_heads, how)
        for weight in shared.parameters():
            weight.add_(1)
        assert differing(before, model.state_dict()) == []
    assert model.config.n_kv_heads == 8


def test_the_copy_has_the_model_s_dtype_and_is_ready_to_run():
    shared = share_heads(random_model(dtype=torch.bfloat16), 2, "random")
    assert {weight.dtype for weight in shared.parameters()} == {torch.bfloat16}
    assert not any(weight.requires_grad for weight in shared.parameters()) and not shared.training
    assert logits(shared).isfinite().all()
    assert kv.DenseCache(shared.config).nbytes * 4 == kv.DenseCache(CONFIG).nbytes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((3,), "8 key-value heads cannot become 3.*divisor of 8"),
        ((16,), "8 key-value heads cannot become 16"),
        ((0,), "n_kv_heads=0 must be a whole number"),
        ((2.0,), "n_kv_heads=2.0 must be a whole number"),
        ((2, "random", -1), "seed=-1 must be a whole number"),
        ((2, "mean", "0"), "seed='0' must be a whole number"),
        ((2, "last"), "how='last' is not known: choose one of 'mean', 'first', 'random'"),
    ],
)
def test_what_cannot_be_shared_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        share_heads(random_model(), *arguments)


def test_a_name_is_no_model():
    with pytest.raises(ValueError, match="not str"):
        share_heads("tiny-mha", 2)


# --- training a little more ------------------------------------------------------------------------------------------


def test_the_first_loss_is_that_before_training():
    """An embedding of zeros scores all tokens alike, so the loss is the logarithm of their number."""
    model = random_model()
    assert fine_tune(model, 1, progress=False) != [pytest.approx(math.log(2000), rel=1e-6)]
    model.embed_tokens.weight.zero_()
    assert fine_tune(model, 1, progress=False) == [pytest.approx(math.log(2000), rel=1e-6)]


def test_a_course_model_recovers_and_the_one_it_came_from_is_not_touched():
    lm = kv.load_model("tiny-mha", dtype="float32", device="cpu")
    before = weights(lm.model)
    shared = share_heads(lm, 2)
    start = weights(shared)
    losses = fine_tune(shared, 8, progress=False)
    assert losses[-1] < losses[0] - 0.5
    assert differing(start, shared.state_dict()) == [*start]  # all weights learn
    assert differing(before, lm.model.state_dict()) == []
    assert not any(weight.requires_grad or weight.grad is not None for weight in shared.parameters())
    assert not shared.training


def test_losses_follow_from_the_seed():
    one, same, other = (fine_tune(random_model(), 3, seed=seed, progress=False) for seed in (0, 0, 1))
    assert one == same
    assert one[0] != other[0]


def test_every_step_reads_whole_rows_of_new_training_stories():
    recipe = Recipe(max_seq_len=64, batch_tokens=200, seed=3)
    tokenizer = tokenizer_for(random_model())
    endless = stories(recipe, tokenizer)
    batches = [next(endless) for _ in range(20)]
    assert {batch.tokens.shape for batch in batches} == {(3, 65)}
    rows = {tuple(row) for batch in batches for row in batch.tokens.tolist()}
    assert len(rows) == 60
    texts = [tokenizer.decode(row, skip_special_tokens=False).split("<|end|>")[1:-1] for row in rows]
    whole = {split_of(text) for some in texts for text in some}
    assert whole == {"train"}


def test_the_learning_rate_rises_over_a_tenth_of_the_steps_and_falls(monkeypatch):
    rates = []
    monkeypatch.setattr(uptraining, "take_step", lambda m, o, batch, rate, clip: (rates.append(rate) or 1.0, []))
    fine_tune(random_model(), 20, progress=False, peak_lr=0.3)
    peak = 0.3
    assert rates[:3] == pytest.approx([peak / 2, peak, peak])
    assert rates[11] == pytest.approx(peak * (0.05 + 0.95 / 2))  # halfway from step 2 to 20
    assert sorted(rates[1:], reverse=True) == rates[1:] and rates[-1] < 0.07 * peak


def test_progress_is_shown_unless_it_is_not_wanted(capsys):
    fine_tune(random_model(), 2)
    assert "fine-tuning: 100%" in capsys.readouterr().err
    fine_tune(random_model(), 2, progress=False)
    assert capsys.readouterr().err == ""


def test_a_training_that_diverges_says_so_and_leaves_a_model_that_is_not_in_training():
    model = random_model()
    model.norm.weight[0] = math.inf
    with pytest.raises(RuntimeError, match="diverged at step 0.*peak_lr lower than 0.001"):
        fine_tune(model, 2, progress=False)
    assert not any(weight.requires_grad for weight in model.parameters()) and not model.training


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({"dtype": torch.bfloat16}, {}, 'bfloat16, too coarse.*dtype="float32"'),
        ({"config": replace(CONFIG, vocab_size=1999)}, {}, "vocabulary of 1,999 tokens"),
        ({}, {"batch_tokens": 63}, "batch_tokens=63 must be at least 64"),
        ({}, {"batch_tokens": "many"}, "batch_tokens='many'"),
        ({}, {"peak_lr": 0}, "peak_lr=0 must be a number greater than 0"),
        ({}, {"steps": 0}, "steps=0 must be a whole number"),
        ({}, {"seed": -1}, "seed=-1 must be a whole number"),
        ({}, {"seed": None}, "seed=None must be a whole number"),
    ],
)
def test_what_cannot_be_trained_is_refused(changes, options, said):
    with pytest.raises(ValueError, match=said):
        fine_tune(random_model(**changes), **{"steps": 2, "progress": False} | options)


def test_an_lm_is_not_trained_in_place():
    with pytest.raises(ValueError, match="must be a Transformer, as share_heads gives it, not LM"):
        fine_tune(LM(random_model(), None, "mine"), 2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_works_where_gradients_are_switched_off(mode):
    expected = fine_tune(share_heads(random_model(), 2), 2, progress=False)
    model = random_model()
    with mode():
        assert fine_tune(share_heads(model, 2), 2, progress=False) == expected
    assert expected[1] != expected[0]


def test_weights_made_in_inference_mode_cannot_learn():
    with torch.inference_mode():
        model = random_model()
    with pytest.raises(ValueError, match=r"made inside torch.inference_mode\(\).*make it outside"):
        fine_tune(model, 2, progress=False)
    assert fine_tune(share_heads(model, 8), 1, progress=False)  # a copy can
