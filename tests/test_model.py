"""The decoder against `transformers` with the same weights."""

import pytest
import torch
from reference import TEXT, hugging_face, largest_difference, random_tokens, small_config, small_model
from torch.utils.flop_counter import FlopCounterMode

import kvcourse as kv
from kvcourse.generation import pad
from kvcourse.rope import LinearScaling, Llama3Scaling, YarnScaling

ENGLISH = """The baker starts at four in the morning. He weighs the flour, warms the water, and lets the dough rest
while he sweeps the floor. By six the first loaves are in the oven, and the street begins to smell of bread. At seven
he opens the door. An old woman with a blue scarf is always the first: she buys two rolls, counts out the coins one by
one, and tells him what the weather will be. She is wrong about half of the time, and neither of them minds."""

SHAPES = {
    "gqa 8/2": {},
    "mqa 8/1": {"n_kv_heads": 1},
    "mha 8/8": {"n_kv_heads": 8},
    "tied head": {"tie_embeddings": True},
    "large base and eps": {"rope_theta": 5e5, "norm_eps": 1e-2},
    "wide heads": {"d_head": 16},
    "llama, biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "llama, linear": {"rope_scaling": LinearScaling(4.0)},
    "llama, llama3": {"rope_theta": 5e5, "rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 64)},
    "mistral": {"window": 16},
    "mistral, window of 1": {"window": 1},
    "qwen2": {"qkv_bias": True},
    "qwen2, yarn": {"qkv_bias": True, "rope_scaling": YarnScaling(4.0, 32)},
    "qwen2, window in one layer": {"qkv_bias": True, "window": (None, 16)},
    "qwen3": {"qk_norm": True, "d_head": 16},
    "qwen3, biases and yarn": {"qk_norm": True, "qkv_bias": True, "o_bias": True, "rope_scaling": YarnScaling(4.0, 32)},
    "qwen3, window in one layer": {"qk_norm": True, "window": (16, None)},
}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_logits_equal_transformers(changes):
    model = small_model(small_config(**changes))
    tokens = random_tokens(2, TEXT)
    assert largest_difference(model(tokens), hugging_face(model)(tokens).logits) < 1e-4


@pytest.mark.parametrize(
    ("features", "without"),
    [
        ({"qkv_bias": True}, {"qkv_bias": False}),
        ({"qkv_bias": True, "o_bias": True}, {"o_bias": False}),
        ({"mlp_bias": True}, {"mlp_bias": False}),
        ({"qk_norm": True}, {"qk_norm": False}),
        ({"window": 16}, {"window": None}),
        ({"window": 16}, {"window": 17}),
        ({"window": 16}, {"window": (16, 15)}),
        ({"rope_scaling": LinearScaling(4.0)}, {"rope_scaling": None}),
        ({"rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 64)}, {"rope_scaling": None}),
        ({"rope_scaling": YarnScaling(4.0, 32)}, {"rope_scaling": None}),
        ({"rope_scaling": YarnScaling(4.0, 32)}, {"rope_scaling": YarnScaling(4.0, 32, attention_factor=1.0)}),
    ],
    ids=str,
)
def test_a_feature_left_out_shows(features, without):
    """The partner: without it, or one token off, the logits are far away."""
    model = small_model(small_config(**features))
    other = small_model(small_config(**{**features, **without}))
    weights = model.state_dict()
    other.load_state_dict({name: weights[name] for name in other.state_dict()})
    tokens = random_tokens(1, TEXT)
    assert largest_difference(other(tokens), hugging_face(model)(tokens).logits) > 1e-2


@pytest.mark.parametrize(
    "wrong", [{"rope_theta": 1e4}, {"norm_eps": 1e-5}, {"n_kv_heads": 1}], ids=["base", "eps", "KV heads"]
)
def test_a_wrong_number_in_the_config_shows(wrong):
    config = small_config(rope_theta=5e5, norm_eps=1e-2)
    model = small_model(config)
    reference = hugging_face(model)
    model.config = small_config(**{**vars(config), **wrong})
    other = small_model(model.config)
    weights = {n: w for n, w in small_model(config).state_dict().items() if w.shape == other.state_dict()[n].shape}
    other.load_state_dict(weights, strict=False)
    tokens = random_tokens(1, TEXT)
    assert largest_difference(other(tokens), reference(tokens).logits) > 1e-2


@pytest.mark.smollm2
def test_smollm2_logits_equal_transformers(smollm2):
    # English, not random tokens: those drive the logits' own float32 rounding, in both programs, past 1e-4.
    tokens = torch.tensor([smollm2.encode(ENGLISH)[:TEXT]])
    assert tokens.shape == (1, TEXT)
    reference = hugging_face(smollm2.model)
    assert largest_difference(smollm2.model(tokens), reference(tokens).logits) < 1e-4


@pytest.mark.smollm2
def test_smollm2_writes_the_same_64_tokens_as_transformers(smollm2):
    prompt = torch.tensor([smollm2.chat([{"role": "user", "content": "Why is the sky blue?"}])])
    expected = hugging_face(smollm2.model).generate(
        prompt, max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    generation = kv.generate(smollm2.model, prompt[0], 64)
    assert generation.ids == expected[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_unequal_length_equal_each_row_alone(dtype):
    model = small_model(dtype=dtype)
    rows = [random_tokens(n, seed=n).tolist() for n in (7, 1, 96, 30)]
    tokens, positions = pad(rows)
    assert positions[0].tolist() == [*range(7), *[-1] * 89]
    logits = model(tokens, positions)
    last = model(tokens, positions, last_only=True)
    for i, row in enumerate(rows):
        alone = model(torch.tensor([row]))[0]
        assert largest_difference(logits[i, : len(row)], alone) < 1e-4
        assert largest_difference(last[i, 0], alone[-1]) < 1e-4


def test_rows_of_unequal_length_need_their_own_positions():
    """Left out the -1, the padding is real text, and the last logits are those of a padding token."""
    model = small_model()
    tokens, positions = pad([random_tokens(7).tolist(), random_tokens(96).tolist()])
    last = model(tokens, last_only=True)
    assert largest_difference(last[0], model(tokens, positions, last_only=True)[0]) > 0.1


def test_last_only_runs_the_head_for_one_row_of_each_text():
    config = small_config(vocab_size=5000)
    model, tokens = small_model(config), random_tokens(2, TEXT)
    counts = {}
    for last_only in (False, True):
        with FlopCounterMode(display=False) as counter:
            logits = model(tokens, last_only=last_only)
        counts[last_only] = counter.get_total_flops()
    assert logits.shape == (2, 1, 5000)
    assert counts[False] - counts[True] == 2 * 2 * (TEXT - 1) * config.d_model * config.vocab_size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_finite_with_padding_and_close(dtype):
    model = small_model()
    rows = [random_tokens(5).tolist(), random_tokens(60, seed=2).tolist()]
    tokens, positions = pad(rows)
    half = small_model(dtype=dtype)(tokens, positions)
    assert half.isfinite().all()
    exact = model(tokens, positions)
    assert largest_difference(half[1, :60], exact[1, :60]) < 0.25 * float(exact.std())


def test_bad_tokens_and_positions_are_refused():
    model = small_model()
    for tokens, message in [
        (torch.zeros(5, dtype=torch.int64), r"a tensor \(B, T\)"),
        (torch.zeros(1, 0, dtype=torch.int64), "at least 1"),
        (torch.zeros(1, 5), "whole numbers"),
        (torch.tensor([[3, 97]]), "97 is outside the vocabulary: ids go from 0 to 96"),
        (torch.tensor([[3, -1]]), "-1 is outside"),
        (torch.zeros(1, 257, dtype=torch.int64), "256 is past the model's context of 256"),
    ]:
        with pytest.raises(ValueError, match=message):
            model(tokens)
    with pytest.raises(ValueError, match="a tensor .* got list"):
        model([[1, 2]])
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    for positions, message in [
        ([[-1, -1, -1, -1]], "every token is padding"),
        ([[0, 1]], r"in the shape of tokens \(1, 4\)"),
        ([[0.0, 1.0, 2.0, 3.5]], "whole numbers"),
        ([[-1, -1, 0, 1]], "padding only on the right"),
        ([[0, 1, -1, 2]], "padding only on the right"),
        ([[-5, -4, -3, -2]], "0 or more"),
        ([[0, 1, 2, -3]], "0 or more"),
    ]:
        with pytest.raises(ValueError, match=message):
            model(tokens, positions=torch.tensor(positions))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_tokens_of_any_integer_type(dtype):
    model, tokens = small_model(), random_tokens(1, 5)
    assert torch.equal(model(tokens.to(dtype)), model(tokens))


def test_no_parameter_asks_for_gradients_and_names_are_those_of_the_checkpoints():
    model = small_model()
    assert not any(p.requires_grad for p in model.parameters())
    hugging_face(model)  # fails on a name that is not there
    assert "lm_head.weight" not in kv.Transformer(small_config(tie_embeddings=True), device="meta").state_dict()
