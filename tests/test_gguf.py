"""Weights read from GGUF files, against the `gguf` package's own writer, names and quantizers, and blocks by hand."""

import gguf
import numpy as np
import pytest
import torch
from gguf_files import gguf_tensors, llama_fields, permute, random_state, read_gguf, tiny_config, write, write_model

from kvcourse.model import Transformer
from kvcourse.weights.gguf_file import restore_rows


def rounded(state: dict, kind: str) -> dict:
    """What is left of the weights after being stored as `kind`; vectors are stored in F32."""
    type_ = gguf.GGMLQuantizationType[kind]
    return {
        name: w if w.ndim == 1 else gguf.quants.dequantize(gguf.quants.quantize(w, type_), type_)
        for name, w in state.items()
    }


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("heads", [(8, 2), (8, 4), (8, 8), (8, 1)])
def test_every_tensor_comes_back(tmp_path, kind, heads):
    config = tiny_config(*heads)
    state = random_state(config)
    got_config, got, _ = read_gguf(write_model(tmp_path / "m.gguf", config, state, kind))
    assert got_config == config
    expected = rounded(state, kind)
    assert got.keys() == expected.keys()
    for name in expected:
        assert got[name].dtype == torch.float32
        np.testing.assert_array_equal(got[name].numpy(), expected[name], err_msg=name)


@pytest.mark.parametrize("heads", [(8, 2), (8, 4), (8, 1)])
def test_rows_permuted_with_the_wrong_head_count_are_noticed(tmp_path, heads):
    """Partner of the test above: k written with q's number of heads does not come back, v does."""
    config = tiny_config(*heads, d_model=128)
    state = random_state(config)
    path = write(tmp_path / "m.gguf", llama_fields(config), gguf_tensors(config, state, k_heads=config.n_heads))
    _, got, _ = read_gguf(path)
    k, v = "layers.0.self_attn.k_proj.weight", "layers.0.self_attn.v_proj.weight"
    assert not np.array_equal(got[k], state[k])
    np.testing.assert_array_equal(got[v], state[v])


def test_restore_rows_by_hand():
    """One head of four rows 0 1 2 3: rotation pairs 0 with 2 and 1 with 3, the file holds 0 2 1 3. Then two heads."""
    rows = np.array([[0.0], [2], [1], [3]])
    np.testing.assert_array_equal(restore_rows(rows, 1), [[0], [1], [2], [3]])
    rows = np.array([[0.0], [2], [1], [3], [4], [6], [5], [7]])
    np.testing.assert_array_equal(restore_rows(rows, 2)[:, 0], np.arange(8))
    assert not np.array_equal(restore_rows(rows, 1)[:, 0], np.arange(8))
    w = np.random.default_rng(0).normal(size=(24, 5))
    np.testing.assert_array_equal(restore_rows(permute(w, 3), 3), w)


def test_logits_are_those_of_the_weights_that_were_written(tmp_path):
    config = tiny_config()
    state = random_state(config)
    original = Transformer(config, "cpu", torch.float32)
    original.load_state_dict({name: torch.from_numpy(w) for name, w in state.items()})
    got_config, got, _ = read_gguf(write_model(tmp_path / "m.gguf", config, state))
    loaded = Transformer(got_config, "cpu", torch.float32)
    loaded.load_state_dict(got)
    tokens = torch.randint(0, config.vocab_size, (1, 96), generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded(tokens), original(tokens))
    q = "layers.0.self_attn.q_proj.weight"
    unrestored = dict(got) | {q: torch.from_numpy(permute(state[q], 8))}
    loaded.load_state_dict(unrestored)
    assert (loaded(tokens) - original(tokens)).abs().max() > 1e-2


def test_config_comes_from_the_metadata_not_from_defaults(tmp_path):
    config = tiny_config(rope_theta=123_456.0, norm_eps=0.03125, max_seq_len=77)
    got, _, metadata = read_gguf(write_model(tmp_path / "m.gguf", config, random_state(config)))
    assert (got.rope_theta, got.norm_eps, got.max_seq_len) == (123_456.0, 0.03125, 77)
    assert metadata["llama.context_length"] == 77
    assert (
        read_gguf(write_model(tmp_path / "n.gguf", tiny_config(norm_eps=1e-5), random_state(config)))[0].norm_eps
        == 1e-5
    )


def test_head_size_that_is_not_the_quotient(tmp_path):
    config = tiny_config(n_heads=4, n_kv_heads=2, d_head=32)
    fields = {"llama.attention.key_length": 32, "llama.attention.value_length": 32, "llama.rope.dimension_count": 32}
    state = random_state(config)
    got_config, got, _ = read_gguf(write_model(tmp_path / "m.gguf", config, state, **fields))
    assert got_config.d_head == 32
    for name, weight in state.items():
        np.testing.assert_array_equal(got[name].numpy(), weight)


def test_a_file_without_a_head_is_tied(tmp_path):
    config = tiny_config(tie_embeddings=True)
    got, state, _ = read_gguf(write_model(tmp_path / "m.gguf", config, random_state(config)))
    assert got.tie_embeddings and "lm_head.weight" not in state
    untied, state, _ = read_gguf(write_model(tmp_path / "n.gguf", tiny_config(), random_state(tiny_config())))
    assert not untied.tie_embeddings and "lm_head.weight" in state


def test_dtype_is_converted_on_the_way(tmp_path):
    config = tiny_config()
    state = random_state(config)
    _, got, _ = read_gguf(write_model(tmp_path / "m.gguf", config, state), dtype=torch.bfloat16)
    assert {w.dtype for w in got.values()} == {torch.bfloat16}
    assert torch.equal(got["norm.weight"], torch.from_numpy(state["norm.weight"]).bfloat16())


def test_numbers_too_large_for_float16_are_not_made_infinite(tmp_path):
    config = tiny_config()
    state = random_state(config)
    state["norm.weight"][5] = 1e5
    path = write_model(tmp_path / "m.gguf", config, state)
    assert read_gguf(path, torch.bfloat16)[1]["norm.weight"].max() > 9e4
    words = "m.gguf: tensor output_norm.weight has numbers too large for float16: load the model in bfloat16 or float32"
    with pytest.raises(ValueError, match=words):
        read_gguf(path, torch.float16)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_numbers_that_are_none_are_found(tmp_path, bad, dtype):
    config = tiny_config()
    state = random_state(config)
    state["norm.weight"][5] = bad
    with pytest.raises(ValueError, match="tensor output_norm.weight has numbers that are infinite or not"):
        read_gguf(write_model(tmp_path / "m.gguf", config, state), dtype)


def test_weights_are_not_the_file_itself(tmp_path):
    """An F32 tensor must be a copy: writing to it must neither crash nor change the file."""
    config = tiny_config()
    path = write_model(tmp_path / "m.gguf", config, random_state(config))
    before = path.read_bytes()
    _, state, _ = read_gguf(path)
    for weight in state.values():
        weight.fill_(7.0)
    assert path.read_bytes() == before


def without(fields: dict, key: str) -> dict:
    return {k: v for k, v in fields.items() if k != key}


REQUIRED = [
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.layer_norm_rms_epsilon",
]


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_field_is_named(tmp_path, key):
    config = tiny_config()
    path = write(tmp_path / "m.gguf", without(llama_fields(config), key), gguf_tensors(config, random_state(config)))
    with pytest.raises(ValueError, match=key):
        read_gguf(path)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"llama.expert_count": 8}, "llama.expert_count = 8, which is not supported: only 0 is"),
        ({"llama.attention.causal": False}, "llama.attention.causal = False"),
        ({"llama.attention.scale": 0.5}, "llama.attention.scale = 0.5"),
        ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window = 64"),
        ({"llama.attention.sliding_window": 127}, "llama.attention.sliding_window = 127"),
        ({"llama.attention.sliding_window": [0, 64]}, r"llama.attention.sliding_window = \[0, 64\]"),
        ({"llama.attention.sliding_window_pattern": [True, False]}, "llama.attention.sliding_window_pattern"),
        ({"llama.attention.key_length": 16}, "shape"),
        ({"llama.block_count": 2**31}, "llama.block_count = 2147483648, but there are only 21 tensors in all"),
        ({"llama.block_count": 3}, "lacks 9 tensor"),
        ({"llama.block_count": 1}, r"has 9 tensor\(s\): .*, which its metadata does not ask for"),
        ({"llama.attention.scale": "large"}, "llama.attention.scale = 'large', which must be a finite number"),
        ({"llama.rope.freq_base": "large"}, "llama.rope.freq_base = 'large'"),
        ({"llama.pooling_type": 3}, "llama.pooling_type = 3"),
        ({"llama.something_new": 2.0}, "llama.something_new = 2.0"),
        ({"llama.something_new": "on"}, "llama.something_new = 'on'"),
        (
            {"llama.feed_forward_length": [96, 96]},
            r"llama.feed_forward_length = \[96, 96\], which must be",
        ),
        ({"llama.logit_scale": 0.25}, "llama.logit_scale = 0.25"),
        ({"llama.final_logit_softcapping": 30.0}, "llama.final_logit_softcapping = 30.0"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count = 4"),
        ({"llama.attention.value_length": 4}, "value_length = 4"),
        ({"llama.vocab_size": 98}, "vocab_size = 98"),
        ({"llama.attention.head_count_kv": 3}, "n_kv_heads=3"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count = 0"),
        ({"llama.embedding_length": 128}, "llama.embedding_length = 128, but its embeddings have 64 numbers"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(tmp_path, fields, words):
    config = tiny_config()
    path = write_model(tmp_path / "m.gguf", config, random_state(config), **fields)
    with pytest.raises(ValueError, match=words):
        read_gguf(path)


@pytest.mark.parametrize(
    "fields",
    [
        {"llama.attention.causal": True, "llama.logit_scale": 1.0, "llama.embedding_scale": 0.0},
        {"llama.vocab_size": 97, "llama.attention.value_length": 8, "llama.rope.dimension_count": 8},
        {"llama.expert_count": 0, "llama.expert_used_count": 0, "llama.use_parallel_residual": False},
        {"llama.attention.scale": 0.0},
        {"llama.attention.scale": float(np.float32(8**-0.5))},
        {"llama.attention.sliding_window": 0},
        {"llama.attention.sliding_window": 128},  # as long as the context: every token is seen
        {"llama.tensor_data_layout": "Meta AI original pth", "llama.rope.scaling.finetuned": True},
        {"llama.something_new": 0.0, "llama.something_else": [0, 0], "llama.one_more": ""},
        {"general.type": "model", "general.something": 7, "tokenizer.ggml.something": 7, "qwen2.block_count": 7},
    ],
)
def test_fields_that_change_nothing_are_accepted(tmp_path, fields):
    config = tiny_config()
    assert read_gguf(write_model(tmp_path / "m.gguf", config, random_state(config), **fields))[0] == config


@pytest.mark.parametrize("arch", ["gemma2", "qwen2moe", "mistral3", "llama4", "phi3", "gpt2"])
def test_other_architectures_are_named(tmp_path, arch):
    path = write(tmp_path / "m.gguf", {f"{arch}.block_count": 1}, {"a": np.zeros(3, np.float32)}, arch=arch)
    with pytest.raises(ValueError, match=f"m.gguf says general.architecture = '{arch}', .*only 'llama' or 'qwen2'"):
        read_gguf(path)


def test_a_file_without_an_architecture(tmp_path):
    path = write(tmp_path / "m.gguf", {}, {"a": np.zeros(3, np.float32)})
    path.write_bytes(path.read_bytes().replace(b"general.architecture", b"general.architectur_"))
    with pytest.raises(ValueError, match="m.gguf has no field general.architecture"):
        read_gguf(path)


def test_metadata_without_a_tokenizer_are_fine(tmp_path):
    config = tiny_config()
    _, _, metadata = read_gguf(write_model(tmp_path / "m.gguf", config, random_state(config)))
    assert not any(key.startswith("tokenizer.") for key in metadata)


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path):
    config = tiny_config()
    fields, tensors = llama_fields(config), gguf_tensors(config, random_state(config))

    def message(tensors):
        with pytest.raises(ValueError) as caught:
            read_gguf(write(tmp_path / "m.gguf", fields, tensors))
        return str(caught.value)

    assert "lacks 1 tensor(s): blk.1.ffn_up.weight" in message(without(tensors, "blk.1.ffn_up.weight"))
    assert "token_embd.weight" in message(without(tensors, "token_embd.weight"))
    extra = message(tensors | {"blk.2.attn_q.weight": np.zeros((64, 64), np.float32), "output.bias": np.zeros(97)})
    assert "has 2 tensor(s): blk.2.attn_q.weight, output.bias, which its metadata does not ask for" in extra
    wrong = message(tensors | {"blk.0.attn_v.weight": np.zeros((64, 16), np.float32)})
    assert "blk.0.attn_v.weight has shape (64, 16)" in wrong and "(16, 64)" in wrong
