"""The builder of peers: the family it picks, shared weights, the same numbers for every feature it carries over."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from reference import TEXT, largest_difference, random_tokens, small_config, small_model

from kvcourse.bench import peers
from kvcourse.bench.peers import to_transformers
from kvcourse.rope import LinearScaling, Llama3Scaling, PairScaling, YarnScaling

BIASES = dict(qkv_bias=True, o_bias=True)
FEATURES = {
    "plain": ("Llama", {}),
    "tied": ("Llama", dict(tie_embeddings=True)),
    "wide heads": ("Llama", dict(d_head=16)),
    "another base and norm": ("Llama", dict(rope_theta=500.0, norm_eps=0.1)),
    "all biases": ("Llama", dict(BIASES, mlp_bias=True)),
    "window": ("Mistral", dict(window=8)),
    "biases of q, k, v": ("Qwen2", dict(qkv_bias=True)),
    "biases of q, k, v and some windows": ("Qwen2", dict(qkv_bias=True, window=(None, 8))),
    "norms of q and k": ("Qwen3", dict(qk_norm=True)),
    "norms, biases and some windows": ("Qwen3", dict(BIASES, qk_norm=True, window=(8, None))),
    "linear": ("Llama", dict(rope_scaling=LinearScaling(4.0))),
    "llama3": ("Llama", dict(rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 64))),
    "yarn": ("Llama", dict(rope_scaling=YarnScaling(4.0, 64))),
    "yarn with everything": ("Qwen3", dict(qk_norm=True, rope_scaling=YarnScaling(4.0, 64, 0.8, 16.0, 2.0, False))),
    "divisors": ("Llama", dict(rope_scaling=PairScaling((1.0, 1.5, 2.0, 8.0)))),
}


@pytest.mark.parametrize(("family", "changes"), FEATURES.values(), ids=FEATURES)
def test_family_and_logits(family, changes):
    model = small_model(small_config(**changes))
    peer = to_transformers(model)
    assert type(peer).__name__ == f"{family}ForCausalLM"
    tokens = random_tokens(2, TEXT)
    assert largest_difference(model(tokens), peer(tokens).logits) < 1e-4


@pytest.mark.parametrize(
    "name", [name for name, (_, changes) in FEATURES.items() if "rope" in str(changes)] + ["window"]
)
def test_a_forgotten_feature_would_show(name):
    """The features that have no weights of their own, without which the peer would load just as well."""
    config = small_config(**FEATURES[name][1])
    without = dataclasses.replace(config, rope_scaling=None, window=None, rope_theta=10_000.0)
    model, tokens = small_model(config), random_tokens(2, TEXT)
    peer = to_transformers(small_model(without))
    assert largest_difference(model(tokens), peer(tokens).logits) > 1e-2


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_shared_not_copied(tied):
    model = small_model(small_config(tie_embeddings=tied))
    peer = to_transformers(model)
    ours = {p.data_ptr() for p in model.parameters()}
    assert {p.data_ptr() for p in peer.parameters()} == ours
    assert (peer.lm_head.weight is peer.model.embed_tokens.weight) is tied
    assert not any(p.requires_grad for p in peer.parameters()) and not peer.training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_is_the_models_but_angles_stay_in_float32(dtype):
    peer = to_transformers(small_model(dtype=dtype))
    assert {p.dtype for p in peer.parameters()} == {dtype}
    assert peer.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize(
    "changes",
    [
        dict(o_bias=True),
        dict(mlp_bias=True, qkv_bias=True),
        dict(window=(8, None)),  # a window in some layers, but neither biases nor norms
        dict(window=8, mlp_bias=True),
        dict(qk_norm=True, qkv_bias=True),
        dict(qk_norm=True, mlp_bias=True),
    ],
    ids=str,
)
def test_what_no_family_has_is_refused(changes):
    with pytest.raises(ValueError, match=r"No family .* has these features together: .*'qk_norm'"):
        to_transformers(small_model(small_config(**changes)))


def test_two_sizes_of_window_are_refused():
    with pytest.raises(ValueError, match=r"one size of window for all layers of a model, not \[4, 8\]"):
        to_transformers(small_model(small_config(qkv_bias=True, window=(8, 4))))


def test_sizes_that_transformers_refuses_are_told_with_its_reason():
    config = small_config(n_heads=6, n_kv_heads=6, d_model=20, d_head=4)  # the course shares out no width over heads
    with pytest.raises(ValueError, match=r"transformers refuses this model: .*size \(20\).*heads \(6\)") as caught:
        to_transformers(small_model(config))
    assert "\n" not in str(caught.value)


def test_transformers_missing_or_too_old_is_one_sentence(monkeypatch):
    monkeypatch.setattr(peers, "version", lambda name: "4.57.1")
    with pytest.raises(RuntimeError, match=r"transformers 4\.57\.1 is too old: pip install"):
        to_transformers(small_model())
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="transformers is not installed: pip install"):
        to_transformers(small_model())


def test_importing_the_builder_does_not_import_transformers():
    code = "import sys, kvcourse.bench.peers; print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
