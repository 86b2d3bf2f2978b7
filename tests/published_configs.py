"""config.json files of public models as they are on the hub, without what is the same in each or only bookkeeping.

Sizes are written out again here, from those files, so that a slip in `kvcourse.published` shows.
"""

import torch
import transformers

transformers.logging.set_verbosity_error()

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
LLAMA_2 = LLAMA | {"max_position_embeddings": 4096, "vocab_size": 32000, "pretraining_tp": 1, "rope_scaling": None}
LLAMA_3 = LLAMA | {
    "attention_bias": False,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
LLAMA_31 = LLAMA_3 | {
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
SIZE_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32}
SIZE_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80}
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
SMOLLM2 = LLAMA | {
    "max_position_embeddings": 8192,
    "rope_interleaved": False,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
MISTRAL = SIZE_8B | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "max_position_embeddings": 32768,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
MIXTRAL = MISTRAL | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}
GEMMA_2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 144,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
    "vocab_size": 256000,
}
GEMMA_3 = {
    "model_type": "gemma3_text",
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
PHI_3 = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "attention_bias": False,
    "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
    "embd_pdrop": 0.0,
    "hidden_act": "silu",
    "pad_token_id": 0,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
DEEPSEEK_V2 = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1536,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 128,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "routed_scaling_factor": 16.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
DEEPSEEK_V3 = DEEPSEEK_V2 | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]},
    "rms_norm_eps": 1e-05,
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def sized(base: dict, layers: int, heads: int, kv_heads: int, width: int, inner: int, **more) -> dict:
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return base | sizes | {"hidden_size": width, "intermediate_size": inner} | more


CONFIGS = {
    "Llama 2 7B": sized(LLAMA_2, 32, 32, 32, 4096, 11008),
    "Llama 2 70B": LLAMA_2 | SIZE_70B | {"num_key_value_heads": 8},
    "Llama 3 8B": LLAMA_3 | SIZE_8B,
    "Llama 3 70B": LLAMA_3 | SIZE_70B,
    "Llama 3.1 8B": LLAMA_31 | SIZE_8B,
    "Llama 3.1 70B": LLAMA_31 | SIZE_70B,
    "Llama 3.1 405B": sized(LLAMA_31, 126, 128, 8, 16384, 53248),
    "Mistral 7B v0.1": MISTRAL,
    "Mixtral 8x7B": MIXTRAL,
    "Gemma 2 9B": sized(GEMMA_2, 42, 16, 8, 3584, 14336, head_dim=256),
    "Gemma 2 27B": sized(GEMMA_2, 46, 32, 16, 4608, 36864, head_dim=128),
    "Gemma 3 12B": sized(GEMMA_3, 48, 16, 8, 3840, 15360),
    "Gemma 3 27B": sized(GEMMA_3, 62, 32, 16, 5376, 21504, head_dim=128, query_pre_attn_scalar=168),
    "Qwen2.5 7B": sized(QWEN25, 28, 28, 4, 3584, 18944, max_window_layers=28),
    "Qwen2.5 72B": sized(QWEN25, 80, 64, 8, 8192, 29568, max_window_layers=80),
    "Qwen3 8B": sized(QWEN3, 36, 32, 8, 4096, 12288, max_window_layers=36),
    "Qwen3 32B": sized(QWEN3, 64, 64, 8, 5120, 25600, max_window_layers=64),
    "SmolLM2 135M": sized(SMOLLM2, 30, 9, 3, 576, 1536),
    "SmolLM2 1.7B": sized(SMOLLM2, 24, 32, 32, 2048, 8192),
    "Phi-3 mini": sized(
        PHI_3, 32, 32, 32, 3072, 8192, vocab_size=32064, max_position_embeddings=4096, sliding_window=2047
    ),
    "Phi-4": sized(
        PHI_3, 40, 40, 10, 5120, 17920, vocab_size=100352, max_position_embeddings=16384, sliding_window=None
    ),
    "DeepSeek-V2": DEEPSEEK_V2,
    "DeepSeek-V3": DEEPSEEK_V3,
    "gpt-oss 20B": GPT_OSS,
    "gpt-oss 120B": GPT_OSS
    | {
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "num_hidden_layers": 36,
        "num_local_experts": 128,
    },
}


def hugging_face_config(settings: dict, **changes):
    """What `transformers` makes of a config.json."""
    settings = settings | changes
    no_sizes = ("architectures", "auto_map", "quantization_config")
    return transformers.AutoConfig.for_model(**{name: settings[name] for name in settings if name not in no_sizes})


def hugging_face_weights(config) -> list[int]:
    """Sizes of the weights of a model of `transformers`, made without memory for them."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    weights = {id(weight): weight.numel() for weight in model.parameters()}  # a tied head counts once
    # DeepSeek-V3 steers which experts are picked by a bias that training sets without a gradient.
    return [*weights.values(), *(b.numel() for name, b in model.named_buffers() if name.endswith("correction_bias"))]
