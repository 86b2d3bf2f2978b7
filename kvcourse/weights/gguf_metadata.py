"""What a GGUF file says about a model and its tokenizer, for `gguf_write`: the way back of `gguf_config` and
`tokenizer.gguf_vocab`.

The keys are those that llama.cpp's converter writes (conversion/base.py, `set_gguf_parameters` and `get_vocab_base`).
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import os
from pathlib import Path

import numpy as np
import tokenizers

from kvcourse.config import ModelConfig
from kvcourse.rope import LinearScaling, PairScaling, YarnScaling, frequencies
from kvcourse.text_files import read_object
from kvcourse.tokenizer import Tokenizer
from kvcourse.tokenizer.gguf_vocab import CONTROL, NORMAL, STOP_TOKENS, UNUSED, USER_DEFINED
from kvcourse.tokenizer.pretokenizers import CUTS
from kvcourse.weights.gguf_file import open_gguf


def architecture(config: ModelConfig) -> str:
    """What llama.cpp calls a model with these features. Raises `ValueError` for one that it cannot compute."""
    if any(window is not None and window < config.max_seq_len for window in config.windows):
        raise ValueError(
            f"This model sees a window of the latest tokens (window={config.window}), and llama.cpp has none for the "
            "architectures llama, qwen2 and qwen3: it would attend to all tokens. Write a model without a window, such "
            "as tiny-mha."
        )
    if config.mlp_bias:
        raise ValueError("This model has mlp_bias=True, and llama.cpp leaves such biases out: it cannot compute it.")
    if not config.qk_norm:
        return "qwen2" if config.qkv_bias and not config.o_bias else "llama"
    if config.qkv_bias or config.o_bias:
        raise ValueError("This model has qk_norm=True and biases, and llama.cpp's qwen3 has no biases.")
    return "qwen3"


def model_fields(config: ModelConfig) -> dict:
    """{key: value} of the sizes, rotary positions included. Raises `ValueError` for what a GGUF file cannot say."""
    fields = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_seq_len,
        "embedding_length": config.d_model,
        "block_count": config.n_layers,
        "feed_forward_length": config.d_ff,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": config.d_head,
        "attention.value_length": config.d_head,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.dimension_count": config.d_head,
        "rope.freq_base": float(config.rope_theta),
    }
    scaling = config.rope_scaling
    if isinstance(scaling, LinearScaling | YarnScaling):
        fields["rope.scaling.type"] = "linear" if isinstance(scaling, LinearScaling) else "yarn"
        fields["rope.scaling.factor"] = float(scaling.factor)
    if isinstance(scaling, YarnScaling):
        if (scaling.beta_fast, scaling.beta_slow, scaling.truncate) != (32, 1, True):
            raise ValueError(
                f"llama.cpp has YaRN with beta_fast=32, beta_slow=1 and truncate=True for these models, not {scaling}."
            )
        fields["rope.scaling.original_context_length"] = int(scaling.original_max_seq_len)
        usual = YarnScaling(scaling.factor, scaling.original_max_seq_len).amplitude  # llama.cpp multiplies by it
        if scaling.amplitude != usual:
            fields["rope.scaling.attn_factor"] = scaling.amplitude / usual
    return {f"{architecture(config)}.{key}": value for key, value in fields.items()}


def rope_divisors(config: ModelConfig) -> np.ndarray | None:
    """What the tensor `rope_freqs.weight` holds, by which each pair's frequency is divided: float32 `(d_head / 2,)`.
    None where the fields say it all."""
    if config.rope_scaling is None or isinstance(config.rope_scaling, LinearScaling | YarnScaling):
        return None
    if isinstance(config.rope_scaling, PairScaling):
        return np.array(config.rope_scaling.divisors, np.float32)
    plain = frequencies(config.d_head, config.rope_theta, None)
    return (plain / frequencies(config.d_head, config.rope_theta, config.rope_scaling)).float().numpy()


def tokenizer_fields(tokenizer: Tokenizer | None, source: str | os.PathLike | None, vocab_size: int) -> dict:
    """The `tokenizer.*` keys for the tokenizer of the checkpoint at `source`: a GGUF file's own, or those made from a
    folder's tokenizer.json. Without a source they say that there are ids alone.

    Raises `ValueError` when the checkpoint has no tokenizer, one of a kind that cannot be written, or another than
    `tokenizer`.
    """
    if source is None:
        return {"tokenizer.ggml.model": "none"}
    path = Path(source)
    if path.is_dir():
        found = Tokenizer.from_folder(path)
        fields = {} if found is None else byte_level_fields(found, path / "tokenizer.json", vocab_size)
    else:
        fields = {key: value for key, value in open_gguf(path)[0].items() if key.startswith("tokenizer.")}
    tokens = fields.get("tokenizer.ggml.tokens", [])
    own = tokens if tokenizer is None else tokenizer.tokens
    if len(tokens) != vocab_size or any(a and a != b for a, b in zip(own, tokens, strict=True)):
        raise ValueError(
            f"{path} has not the tokenizer of this model: give the folder or .gguf file it was loaded from."
        )
    return fields


def byte_level_fields(tokenizer: Tokenizer, file: Path, vocab_size: int) -> dict:
    """The keys of a byte-level BPE tokenizer. Ids without a token get a name, as llama.cpp's converter gives them."""
    data = read_object(file)
    merges = data["model"].get("merges")
    if data["model"].get("type") != "BPE" or (data.get("decoder") or {}).get("type") != "ByteLevel":
        raise ValueError(
            f"{file} is no byte-level BPE, the one kind of tokenizer that is written from a folder. {WITHOUT}"
        )
    before, after = ([] if id is None else [id] for id in (tokenizer.bos_id, tokenizer.eos_id))
    if tokenizer.before not in ([], before) or tokenizer.after not in ([], after):
        raise ValueError(f"{file} puts other tokens around a text than a GGUF file can name. {WITHOUT}")
    if tokenizer.strips_left or tokenizer.strips_right:
        raise ValueError(f"{file} has control tokens that swallow spaces, which a GGUF file cannot say. {WITHOUT}")
    names = tokenizer.tokens + [""] * (vocab_size - tokenizer.vocab_size)
    types = [NORMAL if name else UNUSED for name in names]
    for token in data.get("added_tokens", []):
        types[token["id"]] = USER_DEFINED
    for id in tokenizer.control_ids:
        types[id] = CONTROL
    fields = {
        "model": "gpt2",
        "pre": pre_tokenizer(data, file),
        "tokens": [token or f"[PAD{id}]" for id, token in enumerate(names)],
        "token_type": types,
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "add_bos_token": bool(tokenizer.before),
        "add_eos_token": bool(tokenizer.after),
    } | other_ends(tokenizer, file)
    fields = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    fields["tokenizer.chat_template"] = tokenizer.chat_template
    return {key: value for key, value in fields.items() if value is not None}


def other_ends(tokenizer: Tokenizer, file: Path) -> dict[str, int]:
    """Keys for the ids that end an answer beside the end of text, but for those that are known by their names."""
    ends = sorted(id for id in tokenizer.stop_ids - {tokenizer.eos_id} if tokenizer.tokens[id] not in STOP_TOKENS)
    if len(ends) > 2:
        raise ValueError(
            f"{file.parent} names {len(ends)} more tokens that end an answer, and a GGUF file has room for 2."
        )
    return dict(zip(("eot_token_id", "eom_token_id"), ends, strict=False))


def pre_tokenizer(data: dict, file: Path) -> str:
    """The name that GGUF files have for the way in which a tokenizer.json cuts text into words: that of the `Cut` with
    the same settings which cuts a difficult text into the same pieces, as llama.cpp's converter finds it."""
    library = tokenizers.Tokenizer.from_file(str(file))
    normalizer = (data.get("normalizer") or {}).get("type")
    whole_words = bool(data["model"].get("ignore_merges"))
    for name, cut in CUTS.items():
        if whole_words == cut.whole_words and normalizer == ("NFC" if cut.composed else None):
            if pieces(library.pre_tokenizer) == pieces(cut.pre_tokenizer):
                return name
    raise ValueError(f"{file} cuts text into words in a way that is none of {', '.join(CUTS)}. {WITHOUT}")


def pieces(pre_tokenizer) -> list[str]:
    return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(DIFFICULT)]


WITHOUT = (
    "Give the model as a GGUF file, whose tokenizer is copied, or without a tokenizer: LM(lm.model, None, lm.name)."
)
# Digits in runs of each length, contractions in both cases, white space and line breaks in runs, signs before and after
# words, letters of several scripts, accents apart from their letters and joined with them.
DIFFICULT = """It's 7, 42, 365, 1024 and 1234567.89;  I'LL say we're    done


  then\r\n\tnot!?...\n /path/to_file.py (x+=1) $5 <=> ``~^|`` cafe\u0301 café 中文。日本 Привет ½²
  CamelCaseWord x2y \u00a0 \u2028 end  """
