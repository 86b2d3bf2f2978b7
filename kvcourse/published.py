"""Shapes of public models, as their makers published them: each names the config.json that its numbers come from.

Some of these files open only for who accepted the model's terms; the numbers are in the papers too. Gemma 3 counts the
text part alone. A mixture of experts without plain layers has no `d_ff` of its own: that of an expert stands there.
"""

from kvcourse.shape import Experts, Latent, Shape


def hub(repo_id: str) -> str:
    return f"https://huggingface.co/{repo_id}/blob/main/config.json"


GEMMA = dict(tie_embeddings=True, n_norms=4)  # a norm before and one after both attention and feed-forward layer
GPT_OSS = dict(qkv_bias=True, o_bias=True, mlp_bias=True, sink_logits=True)
DEEPSEEK = Latent(d_latent=512, d_rope=64, d_nope=128, d_value=128, d_query=1536)


def local_global(n_layers: int, window: int, n_local: int) -> tuple[int | None, ...]:
    """`n_local` layers with a window, then one without, and so on."""
    return tuple(None if (layer + 1) % (n_local + 1) == 0 else window for layer in range(n_layers))


# fmt: off
PUBLISHED = {
    # layers, heads, KV heads, d_head, d_model, d_ff, vocab_size, max_seq_len
    "Llama 2 7B": Shape(32, 32, 32, 128, 4096, 11_008, 32_000, 4096, source=hub("meta-llama/Llama-2-7b-hf")),
    "Llama 2 70B": Shape(80, 64, 8, 128, 8192, 28_672, 32_000, 4096, source=hub("meta-llama/Llama-2-70b-hf")),
    "Llama 3 8B": Shape(32, 32, 8, 128, 4096, 14_336, 128_256, 8192, source=hub("meta-llama/Meta-Llama-3-8B")),
    "Llama 3 70B": Shape(80, 64, 8, 128, 8192, 28_672, 128_256, 8192, source=hub("meta-llama/Meta-Llama-3-70B")),
    "Llama 3.1 8B": Shape(32, 32, 8, 128, 4096, 14_336, 128_256, 131_072, source=hub("meta-llama/Llama-3.1-8B")),
    "Llama 3.1 70B": Shape(80, 64, 8, 128, 8192, 28_672, 128_256, 131_072, source=hub("meta-llama/Llama-3.1-70B")),
    "Llama 3.1 405B": Shape(
        126, 128, 8, 128, 16_384, 53_248, 128_256, 131_072, source=hub("meta-llama/Llama-3.1-405B")),
    "Mistral 7B v0.1": Shape(
        32, 32, 8, 128, 4096, 14_336, 32_000, 32_768, window=4096, source=hub("mistralai/Mistral-7B-v0.1")),
    "Mixtral 8x7B": Shape(
        32, 32, 8, 128, 4096, 14_336, 32_000, 32_768,
        experts=Experts(n=8, active=2, d_ff=14_336), source=hub("mistralai/Mixtral-8x7B-v0.1")),
    "Gemma 2 9B": Shape(
        42, 16, 8, 256, 3584, 14_336, 256_000, 8192,
        window=local_global(42, 4096, 1), **GEMMA, source=hub("google/gemma-2-9b")),
    "Gemma 2 27B": Shape(
        46, 32, 16, 128, 4608, 36_864, 256_000, 8192,
        window=local_global(46, 4096, 1), **GEMMA, source=hub("google/gemma-2-27b")),
    "Gemma 3 12B": Shape(
        48, 16, 8, 256, 3840, 15_360, 262_208, 131_072,
        window=local_global(48, 1024, 5), qk_norm=True, **GEMMA, source=hub("google/gemma-3-12b-pt")),
    "Gemma 3 27B": Shape(
        62, 32, 16, 128, 5376, 21_504, 262_208, 131_072,
        window=local_global(62, 1024, 5), qk_norm=True, **GEMMA, source=hub("google/gemma-3-27b-pt")),
    "Qwen2.5 7B": Shape(28, 28, 4, 128, 3584, 18_944, 152_064, 131_072, qkv_bias=True, source=hub("Qwen/Qwen2.5-7B")),
    "Qwen2.5 72B": Shape(
        80, 64, 8, 128, 8192, 29_568, 152_064, 131_072, qkv_bias=True, source=hub("Qwen/Qwen2.5-72B")),
    "Qwen3 8B": Shape(36, 32, 8, 128, 4096, 12_288, 151_936, 40_960, qk_norm=True, source=hub("Qwen/Qwen3-8B")),
    "Qwen3 32B": Shape(64, 64, 8, 128, 5120, 25_600, 151_936, 40_960, qk_norm=True, source=hub("Qwen/Qwen3-32B")),
    "SmolLM2 135M": Shape(
        30, 9, 3, 64, 576, 1536, 49_152, 8192, tie_embeddings=True, source=hub("HuggingFaceTB/SmolLM2-135M")),
    "SmolLM2 1.7B": Shape(
        24, 32, 32, 64, 2048, 8192, 49_152, 8192, tie_embeddings=True, source=hub("HuggingFaceTB/SmolLM2-1.7B")),
    "Phi-3 mini": Shape(
        32, 32, 32, 96, 3072, 8192, 32_064, 4096, window=2047, source=hub("microsoft/Phi-3-mini-4k-instruct")),
    "Phi-4": Shape(40, 40, 10, 128, 5120, 17_920, 100_352, 16_384, source=hub("microsoft/phi-4")),
    "DeepSeek-V2": Shape(
        60, 128, 128, 128, 5120, 12_288, 102_400, 163_840, latent=DEEPSEEK,
        experts=Experts(n=160, active=6, d_ff=1536, shared=2, first_dense=1), source=hub("deepseek-ai/DeepSeek-V2")),
    "DeepSeek-V3": Shape(
        61, 128, 128, 128, 7168, 18_432, 129_280, 163_840, latent=DEEPSEEK,
        experts=Experts(n=256, active=8, d_ff=2048, shared=1, first_dense=3, router_bias=True),
        source=hub("deepseek-ai/DeepSeek-V3")),
    "gpt-oss 20B": Shape(
        24, 64, 8, 64, 2880, 2880, 201_088, 131_072,
        experts=Experts(n=32, active=4, d_ff=2880, router_bias=True),
        window=local_global(24, 128, 1), **GPT_OSS, source=hub("openai/gpt-oss-20b")),
    "gpt-oss 120B": Shape(
        36, 64, 8, 64, 2880, 2880, 201_088, 131_072,
        experts=Experts(n=128, active=4, d_ff=2880, router_bias=True),
        window=local_global(36, 128, 1), **GPT_OSS, source=hub("openai/gpt-oss-120b")),
}
# fmt: on
