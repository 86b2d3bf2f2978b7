"""Write a model as a GGUF file, which llama.cpp runs and `kvcourse.load_model` reads back.

What `gguf_file` undoes is done here: modules get llama.cpp's names, and the rows of a Llama model's q and k projections
stand pair by pair. A weight of `quantize_model` goes into blocks that hold its very codes and scales; a block lies
within a row, so reordering rows moves whole rows of blocks.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor, nn

from kvcourse.config import ModelConfig
from kvcourse.model import Transformer
from kvcourse.quant.gguf_blocks import block_type, to_blocks
from kvcourse.quant.tensor import QuantizedTensor
from kvcourse.weights.fetch import COURSE_MODELS, model_file
from kvcourse.weights.gguf_file import gguf_name
from kvcourse.weights.gguf_metadata import architecture, model_fields, rope_divisors, tokenizer_fields
from kvcourse.weights.tensors import finite


def write_gguf(
    lm,
    path: str | os.PathLike,
    dtype: torch.dtype | None = None,
    source: str | os.PathLike | None = None,
) -> Path:
    """Write the model and the tokenizer of an `LM` into one file, and return its path.

    Quantized weights are stored in blocks (`kvcourse.quant.gguf_blocks`), other matrices in `dtype`: torch.float32 or
    torch.float16 (None: float16 where the model is, else float32), vectors in float32. `source` is the folder or
    `.gguf` file that the model was loaded from, whose tokenizer is written; a course model is found by its name.

    Raises `ValueError` for what is no `LM`, a model, a tokenizer or a quantized weight that a GGUF file or llama.cpp
    has no form for, and numbers too large for float16, infinite or NaN; `RuntimeError` when the file cannot be written.
    Nothing is left of it then.
    """
    config = require_lm(lm).config
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"path must be the name of a file that ends in .gguf, got {path!r}.")
    path = Path(path)
    dtype = dtype or (torch.float16 if lm.model.dtype == torch.float16 else torch.float32)
    if dtype not in (torch.float16, torch.float32):
        raise ValueError(f"dtype={dtype!r} must be torch.float32 or torch.float16.")
    if path.suffix != ".gguf" or path.is_dir():
        raise ValueError(f"{path} must be the name of a file that ends in .gguf.")
    fields = {"general.type": "model", "general.name": lm.name} | model_fields(config)
    fields |= tokenizer_fields(lm.tokenizer, tokenizer_source(lm, source), config.vocab_size)
    tensors = {name: stored(name, weight, config, dtype) for name, weight in weights(lm.model)}
    beside = path.with_name(f".{path.name}.tmp")
    try:
        write(beside, architecture(config), fields, tensors, rope_divisors(config))
        os.replace(beside, path)
    except BaseException as error:
        with suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError):
            raise RuntimeError(f"{path} could not be written: {error.strerror}.") from error
        raise
    return path


def require_lm(lm):
    """`lm` if it is a model with its tokenizer, as an `LM` is, else `ValueError`."""
    if not isinstance(getattr(lm, "model", None), Transformer) or not hasattr(lm, "tokenizer"):
        raise ValueError(
            f"An LM is needed, as load_model gives it, got {type(lm).__name__}: LM(model, None, name) makes one of a "
            "Transformer."
        )
    lm.model.layers  # noqa: B018 (a compiled model has none, and says so)
    return lm


def tokenizer_source(lm, source: str | os.PathLike | None) -> str | os.PathLike | None:
    """Where the files of the tokenizer are: `source`, or what a course model was loaded from. None without one."""
    if source is not None or lm.tokenizer is None:
        return source
    if lm.name not in COURSE_MODELS:
        raise ValueError(
            f"The files of {lm.name}'s tokenizer are needed: give source=, the folder or .gguf file that the model was "
            "loaded from, or leave the tokenizer out: LM(lm.model, None, lm.name)."
        )
    return model_file(lm.name)


def weights(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
    """(name, weight) of all that a model keeps, by the names of `Transformer`; a quantized weight as it is packed. A
    tied head is not there a second time."""
    for name, parameter in model.named_parameters(recurse=False):
        if not (name == "weight" and hasattr(model, "quantized")):
            yield prefix + name, parameter.detach()
    if hasattr(model, "quantized"):
        yield f"{prefix}weight", model.quantized()
        return
    for name, module in model.named_children():
        if not (name == "lm_head" and model.config.tie_embeddings):
            yield from weights(module, f"{prefix}{name}.")


def stored(name: str, weight: Tensor | QuantizedTensor, config: ModelConfig, dtype: torch.dtype):
    """(type of block or None, array as it is stored) of a weight or bias."""
    try:
        if isinstance(weight, QuantizedTensor):
            kind, array = block_type(weight), to_blocks(weight)
        else:
            kind, array = None, weight.to("cpu", dtype if weight.ndim == 2 else torch.float32).numpy()
            if not finite(weight):
                raise ValueError("A GGUF file cannot have numbers that are infinite or NaN: load the model again.")
            if not np.isfinite(array).all():
                raise ValueError("It has numbers too large for float16: give dtype=torch.float32.")
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if architecture(config) == "llama":
        heads = {"q_proj": config.n_heads, "k_proj": config.n_kv_heads}.get(name.split(".")[-2])
        array = array if heads is None else pair_rows(array, heads)
    return kind, array


def pair_rows(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows `(heads * D, ...)` in halves -> pair by pair: the way back of `gguf_file.restore_rows`."""
    halves = array.reshape(heads, 2, -1, *array.shape[1:])  # (heads, which of the pair, D/2, ...)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)


def write(path: Path, kind: str, fields: dict, tensors: dict, divisors: np.ndarray | None) -> None:
    writer = gguf.GGUFWriter(path, kind)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in fields.items():
        add.get(type(value), writer.add_array)(key, value)
    if any(block for block, _ in tensors.values()):
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    for name, (block, array) in tensors.items():
        raw = None if block is None else gguf.GGMLQuantizationType[block]
        writer.add_tensor(gguf_name(name), array, raw_dtype=raw)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
