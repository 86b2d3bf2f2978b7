"""Costs in closed form against PyTorch's own counter and against tensors really allocated."""

from dataclasses import replace

import published_configs
import pytest
import torch
import transformers
from reference import SMOLLM2, random_tokens, small_config, small_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import kvcourse as kv
from kvcourse.cost import bits_per_number
from kvcourse.published import PUBLISHED
from kvcourse.require import require_number
from kvcourse.shape import Experts, Shape, as_shape

CONFIGS = [
    small_config(),
    small_config(n_kv_heads=1, d_head=16),
    small_config(n_kv_heads=8, tie_embeddings=True),
    small_config(qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True),
    small_config(window=(8, None)),
    small_config(window=1),
]


def counted(model, tokens, **options) -> int:
    # On the CPU the counter takes a fused attention for nothing; plain matrix products it sees.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, **options)
    return counter.get_total_flops()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("batch_size", "context", "new"), [(1, 0, 1), (1, 0, 40), (3, 0, 17), (2, 31, 1), (2, 20, 9)])
@pytest.mark.parametrize("last_only", [True, False])
def test_flops_equal_the_flop_counter(config, batch_size, context, new, last_only):
    model = small_model(config)
    cache = kv.DenseCache(config, batch_size, device="cpu", dtype=torch.float32)
    if context:
        model(random_tokens(batch_size, context), cache=cache)
    expected = counted(model, random_tokens(batch_size, new), cache=cache, last_only=last_only)
    assert kv.flops(config, new, context, batch_size, last_only).total == expected


def test_flops_of_a_real_model_on_the_meta_device():
    model = kv.Transformer(SMOLLM2, device="meta", dtype=torch.float32)
    tokens = random_tokens(1, 128)
    with FlopCounterMode(display=False) as counter:
        model(tokens, last_only=True)
    assert kv.flops(SMOLLM2, 128).total == counter.get_total_flops()


@pytest.mark.parametrize("config", [*CONFIGS, SMOLLM2])
def test_weight_bytes_equal_the_weights_of_a_model(config):
    model = kv.Transformer(config, device="meta", dtype=torch.bfloat16)
    assert kv.weight_bytes(config, bits=16) == sum(w.nbytes for w in model.parameters())


def test_smollm2_by_hand():
    """135 million parameters, and 11,520 numbers of cache a token: read equally much from 11,677 tokens on."""
    parameters = kv.weight_bytes(SMOLLM2, bits=8)
    assert parameters == 134_515_008
    assert kv.cache_bytes(SMOLLM2, 1, bits=8) == 2 * 30 * 3 * 64 == 11_520
    at = lambda context: kv.bytes_moved(SMOLLM2, 1, context)  # noqa: E731
    assert at(11_676).cache_read < at(11_676).weights < at(11_677).cache_read


def test_llama_70b_cache_at_128k_by_hand():
    """80 layers, heads of 128: 41.9 GB with 8 KV heads, 335.5 GB if all 64 were kept (float16)."""
    sizes = dict(vocab_size=32000, n_layers=80, n_heads=64, d_model=8192, d_ff=28672)
    grouped = kv.cache_bytes(kv.ModelConfig(**sizes, n_kv_heads=8), 128_000)
    full = kv.cache_bytes(kv.ModelConfig(**sizes), 128_000)
    assert (grouped, full) == (41_943_040_000, 335_544_320_000)
    assert kv.cache_bytes(PUBLISHED["Llama 3.1 70B"], 128_000) == 41_943_040_000


def test_cache_bytes_of_public_models_by_hand():
    """16 bits a number. 2 bytes, keys and values, layers, KV heads, d_head; then tokens."""
    for name, tokens, expected in [
        ("Llama 2 7B", 1, 524_288),  # 2 x 2 x 32 x 32 x 128
        ("Llama 3.1 8B", 1, 131_072),  # 2 x 2 x 32 x 8 x 128
        ("Llama 3.1 405B", 1, 516_096),  # 2 x 2 x 126 x 8 x 128
        ("Qwen2.5 7B", 1, 57_344),  # 2 x 2 x 28 x 4 x 128
        ("SmolLM2 135M", 1, 23_040),  # 2 x 2 x 30 x 3 x 64
        ("Mistral 7B v0.1", 4096, 536_870_912),  # 131,072 a token, up to the window
        ("Mistral 7B v0.1", 128_000, 536_870_912),  # and not more
        ("Mistral 7B v0.1", 1000, 131_072_000),
        ("Gemma 2 9B", 8192, 2_113_929_216),  # 8192 x 21 layers x (8192 + 4096)
        ("Gemma 3 27B", 128_000, 10_921_967_616),  # 8192 x (10 layers x 128,000 + 52 x 1024)
        ("gpt-oss 120B", 128_000, 4_723_310_592),  # 2048 x 18 layers x (128,000 + 128)
        ("DeepSeek-V2", 1, 69_120),  # 2 bytes x 60 layers x (512 + 64)
        ("DeepSeek-V3", 128_000, 8_994_816_000),  # 2 bytes x 61 layers x 576 x 128,000
    ]:
        assert kv.cache_bytes(PUBLISHED[name], tokens) == expected, name
        assert kv.cache_bytes(PUBLISHED[name], tokens, batch_size=3, bits=8) == 3 * expected // 2


@pytest.mark.parametrize("name", ["Llama 3.1 70B", "Mistral 7B v0.1", "Gemma 2 27B", "Gemma 3 12B", "gpt-oss 20B"])
@pytest.mark.parametrize("tokens", [100, 2000, 40_000])
def test_cache_bytes_are_those_of_transformers_fixed_cache(name, tokens):
    """`StaticCache` allocates what a text of so many tokens needs, layer by layer, here without memory behind it."""
    config, shape = published_configs.hugging_face_config(published_configs.CONFIGS[name]), PUBLISHED[name]
    cache = transformers.StaticCache(config, max_cache_len=tokens)
    cache.early_initialization(2, shape.n_kv_heads, shape.d_head, torch.bfloat16, torch.device("meta"))
    allocated = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert kv.cache_bytes(shape, tokens, batch_size=2) == allocated
    if shape.window and tokens > 4096:  # a bill that forgets the windows is larger
        assert kv.cache_bytes(replace(shape, window=None), tokens, batch_size=2) > allocated


def test_a_dense_cache_reserves_every_slot_whatever_the_windows():
    config = small_config(window=(8, None))
    cache = kv.DenseCache(config, batch_size=3, max_len=40, dtype=torch.float32, device="cpu")
    assert cache.nbytes == kv.DenseCache.bytes_for(config, 3, 40) == 2 * 2 * 2 * 8 * 40 * 3 * 4
    assert kv.cache_bytes(config, 40, batch_size=3, bits=32) == 2 * 2 * 8 * (8 + 40) * 3 * 4 < cache.nbytes
    ring = kv.WindowCache(config, batch_size=3, max_len=40, dtype=torch.float32, device="cpu")
    assert ring.nbytes == kv.cache_bytes(config, 40, batch_size=3, bits=32)
    for rows, slots, name in [(0, 4, "batch_size=0"), (1, 0, "max_len=0"), (1, 2.5, "max_len=2.5")]:
        with pytest.raises(ValueError, match=name):
            kv.DenseCache.bytes_for(config, rows, slots)


def test_pages_are_held_whole():
    """Pages of 16: 33 tokens take 48 slots, in each text and layer by itself; windows of 20 take 32."""
    token = 2 * 2 * 8 * 2  # bytes in one layer
    config = small_config(window=(20, None))
    assert kv.cache_bytes(config, 33, 3, block_size=16) == 3 * (32 + 48) * token
    assert kv.cache_bytes(config, 32, 3, block_size=16) == 3 * (32 + 32) * token
    assert kv.cache_bytes(config, 33, 3, block_size=1) == kv.cache_bytes(config, 33, 3) == 3 * (20 + 33) * token
    assert kv.cache_bytes(config, 0, block_size=16) == 0
    with pytest.raises(ValueError, match="block_size=0"):
        kv.cache_bytes(config, 33, block_size=0)


def test_bits_with_the_scales_of_their_groups():
    """GGUF's Q4_0 stores 32 numbers in 18 bytes, Q4_1 in 20, Q8_0 in 34."""
    assert bits_per_number(4, 32) == 18 * 8 / 32 == 4.5
    assert bits_per_number(4, 32, zero_bits=16) == 20 * 8 / 32 == 5.0
    assert bits_per_number(8, 32) == 34 * 8 / 32 == 8.5
    assert bits_per_number(4, 64, scale_bits=0) == 4
    assert kv.weight_bytes(PUBLISHED["Llama 2 70B"], bits_per_number(4, 64)) == 36_643_844_352  # 4.25 bits
    for arguments, message in [
        ((0, 32), "bits=0"),
        ((4, 0), "group_size=0"),
        ((4, 2.5), "group_size=2.5"),
        ((4, 32, -1), "scale_bits=-1"),
        ((4, 32, 16, "0"), "zero_bits='0'"),
        ((4, 32, 16, False), "zero_bits=False"),
    ]:
        with pytest.raises(ValueError, match=message):
            bits_per_number(*arguments)


def test_bytes_moved_by_hand():
    config = small_config()  # untied: of the embedding only the new tokens' rows are read
    moved = kv.bytes_moved(config, 1, context=10, batch_size=4, bits=32)
    embedding = 97 * 64
    assert moved.weights == kv.weight_bytes(config, 32) - (embedding - 4 * 64) * 4
    assert moved.cache_read == 10 * moved.cache_written == 2 * 2 * 2 * 8 * 10 * 4 * 4
    assert moved.total == moved.weights + moved.cache_read + moved.cache_written
    tied = small_config(tie_embeddings=True)
    assert kv.bytes_moved(tied, 1, bits=32).weights == kv.weight_bytes(tied, 32)


def test_a_window_bounds_what_a_step_reads():
    """Window 8: of 100 earlier tokens a decode step reads 7, and keys and values are 2 x 2 heads x 8 numbers each."""
    numbers = 2 * 2 * 8
    for config, tokens in [
        (small_config(window=8), 7 + 7),
        (small_config(window=(8, None)), 7 + 100),
        (small_config(window=200), 100 + 100),
    ]:
        assert kv.bytes_moved(config, 1, context=100, bits=32).cache_read == tokens * numbers * 4
        assert kv.flops(config, 1, context=100).attention == 2 * 2 * 8 * 8 * (tokens + 2)


@pytest.mark.parametrize("config", [*CONFIGS, SMOLLM2])
def test_a_shape_costs_what_its_model_costs(config):
    for new, context, batch_size in [(1, 0, 1), (1, 100, 3), (17, 20, 2)]:
        shape = as_shape(config)
        assert kv.flops(shape, new, context, batch_size) == kv.flops(config, new, context, batch_size)
        assert kv.bytes_moved(shape, new, context, batch_size) == kv.bytes_moved(config, new, context, batch_size)


def test_llama_70b_step_by_hand():
    """Each layer: q and o 8192 x 8192, k and v 8192 x 1024, three of 8192 x 28,672. The head: 8192 x 128,256."""
    llama, layer = PUBLISHED["Llama 3 70B"], 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28_672
    step = kv.flops(llama, 1, 999_999)
    assert step == (2 * 80 * layer, 4 * 80 * 64 * 128 * 1_000_000, 2 * 8192 * 128_256)
    moved = kv.bytes_moved(llama, 1, 999_999)
    assert moved.weights == 2 * (80 * layer + 161 * 8192 + 8192 * 128_256 + 8192)  # norms, head, a row of the embedding
    assert (moved.cache_read, moved.cache_written) == (327_680 * 999_999, 327_680)


def test_a_mixture_of_experts_by_the_flop_counter():
    """Two of four experts for each token: however they are dealt out, each token meets two of them."""
    settings = dict(vocab_size=97, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8)
    settings |= dict(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, head_dim=8)
    config = transformers.MixtralConfig(**settings, attn_implementation="eager", experts_implementation="eager")
    model = transformers.MixtralForCausalLM(config).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(random_tokens(1, 20), use_cache=False)
    experts = Experts(n=4, active=2, d_ff=48)
    shape = Shape(2, 8, 2, 8, 64, 48, 97, 256, experts=experts)
    counted = counter.get_total_flops()
    assert kv.flops(shape, 20, last_only=False).total == pytest.approx(counted, rel=2e-3)  # and its rotary angles
    assert kv.flops(replace(shape, experts=replace(experts, active=3)), 20, last_only=False).total > 1.1 * counted


def test_a_mixture_reads_the_experts_of_one_token():
    """gpt-oss 20B: of 32 experts 4, each 3 x 2880 x 2880 weights and 3 x 2880 biases."""
    shape = PUBLISHED["gpt-oss 20B"]
    one, all_weights = kv.bytes_moved(shape, 1, bits=8).weights, kv.parameters(shape)
    unread = 24 * 28 * (3 * 2880 * 2880 + 3 * 2880) + (201_088 - 1) * 2880
    assert one == all_weights - unread
    with pytest.raises(ValueError, match="How many experts 2 tokens read between them is up to the router"):
        kv.bytes_moved(shape, 1, batch_size=2)
    assert kv.flops(shape, 7).linear == 7 * kv.flops(shape, 1).linear


def test_latent_attention_reads_its_latents_and_its_operations_are_not_guessed():
    """DeepSeek-V2 keeps 576 numbers a token in each of 60 layers."""
    shape = replace(PUBLISHED["DeepSeek-V2"], experts=None)
    moved = kv.bytes_moved(shape, 1, 1000)
    assert (moved.cache_read, moved.cache_written) == (69_120 * 1000, 69_120)
    with pytest.raises(ValueError, match="Latent attention is run in two ways that differ in operations"):
        kv.flops(shape, 1, 1000)


def test_price_by_hand():
    """1,000 tokens a second are 3.6 million an hour."""
    assert kv.price_per_million(1000, 3.6) == pytest.approx(1.0)
    assert kv.price_per_million(10, 3.6) == pytest.approx(100.0)
    for rate, price in [(0, 1), (-5, 1), (1, 0), (float("inf"), 1), (1, float("nan")), (None, 2.0), (2.0, "1")]:
        with pytest.raises(ValueError, match="must be a number greater than 0"):
            kv.price_per_million(rate, price)


def test_sizes_out_of_range_are_refused_and_numpy_integers_do_not_wrap_around():
    import numpy as np

    config = small_config()
    for call, message in [
        (lambda: kv.flops(config, 0), "new_tokens=0"),
        (lambda: kv.flops(config, 2.5), "new_tokens=2.5"),
        (lambda: kv.flops(config, 1, -9), "context=-9"),
        (lambda: kv.bytes_moved(config, 1, 0, batch_size=0), "batch_size=0"),
        (lambda: kv.cache_bytes(config, -1), "seq_len=-1"),
        (lambda: kv.cache_bytes(config, 1, bits=0), "bits=0"),
        (lambda: kv.weight_bytes(config, bits=float("nan")), "bits=nan"),
        (lambda: kv.bytes_moved(config, 1, bits=None), "bits=None"),
        (lambda: kv.weight_bytes(config, bits=10**400), "bits=10+ .*, and finite"),
        (lambda: kv.DenseCache.bytes_for(config, dtype="int8"), "dtype='int8'"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    for bits in (1e306, 10**306):
        with pytest.raises(ValueError, match="bits=1e?0*.* cannot be counted"):
            kv.cache_bytes(config, 200, bits=bits)
    assert kv.flops(SMOLLM2, np.int32(512)) == kv.flops(SMOLLM2, 512)
    assert kv.weight_bytes(SMOLLM2, np.int32(16)) == kv.weight_bytes(SMOLLM2, 16)
    assert kv.weight_bytes(SMOLLM2, np.float32(4.5)) == kv.weight_bytes(SMOLLM2, 4.5)
    assert bits_per_number(4, 2, np.int8(100), np.int8(100)) == 104
    assert kv.cache_bytes(SMOLLM2, np.int32(500_000)) == 11_520_000_000


@pytest.mark.parametrize("function", [kv.flops, kv.bytes_moved, kv.cache_bytes, kv.weight_bytes])
def test_a_model_or_a_name_in_place_of_a_config_is_refused(function):
    model = small_model()
    for given in (model, "smollm2-135m", None, 5):
        kind = type(given).__name__
        with pytest.raises(
            ValueError, match=f"shape must be a Shape, .*, or a ModelConfig, such as lm.config; got {kind}"
        ):
            function(given, 1)
    assert function(model.config, 1)


def test_a_switch_is_true_or_false():
    with pytest.raises(ValueError, match="active_only='no' must be True or False"):
        kv.parameters(SMOLLM2, active_only="no")


@pytest.mark.parametrize(("given", "plain"), [(3, int), (2.5, float)])
def test_a_number_is_plain_python_afterwards(given, plain):
    import numpy as np

    kinds = (np.int8, np.int32, np.uint64) if plain is int else (np.float16, np.float32, np.float64)
    for kind in (plain, *kinds):
        assert require_number("x", kind(given)) == given and type(require_number("x", kind(given))) is plain
