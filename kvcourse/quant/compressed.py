"""A quantized model as a Hugging Face checkpoint in the layout "pack-quantized" of the compressed-tensors library, that
`transformers` and vLLM read.

For each rounded weight `layers.0.mlp.up_proj.weight` (rows, columns) the file has

| tensor | what it holds |
|---|---|
| `weight_packed` | int32 (rows, words): the codes of a row as one stream of bits, lowest first |
| `weight_scale` | (rows, groups), in the dtype of the model |
| `weight_zero_point` | int32 (words, groups), unless symmetric: zero points, packed down the columns |
| `weight_shape` | rows and columns |

Rows of `kvcourse.quant.packing` are that stream already. Which layers have which grid stands in config.json.
Source: https://github.com/vllm-project/compressed-tensors, compressors/pack_quantized.
"""

import os
from pathlib import Path

import torch
from torch import Tensor, nn

from kvcourse.lm import LM
from kvcourse.model import Transformer
from kvcourse.quant.grid import TENSOR, Grid
from kvcourse.quant.packing import pack
from kvcourse.quant.tensor import QuantizedTensor
from kvcourse.weights.gguf_write import require_lm, weights
from kvcourse.weights.hf_export import ends, write_folder
from kvcourse.weights.hf_write import as_stored, hf_config, hf_name


def export_compressed(lm: LM, folder: str | os.PathLike) -> Path:
    """Write what `quantize_model` made of an `LM`, so that `transformers.AutoModelForCausalLM.from_pretrained(folder)`
    computes the same; return the folder. Beside the weights it is one as `kvcourse.export_hf` writes it, tokenizer
    included.

    All layers must have one grid of 4 or 8 bits, symmetric or with a zero point, in groups or a whole row. Scales are
    stored in the dtype of the model, as all programs that read this layout expect, so that must hold them exactly.

    Raises `ValueError` for what is no `LM`, a model that is not quantized, or in a way that the layout has no form for
    or `transformers` cannot read, and all that `export_hf` refuses; `RuntimeError` when the files cannot be written.
    """
    model, dtype = require_lm(lm).model, lm.model.dtype
    grid, ignored = one_grid(model)
    tensors = {}
    for name, weight in weights(model):
        if isinstance(weight, QuantizedTensor):
            tensors |= packed(hf_name(name), weight, dtype)
        else:
            tensors[hf_name(name)] = as_stored(name, weight, dtype, "Quantize the model again.")
    config = hf_config(model.config, dtype, *ends(lm)) | {"quantization_config": quantization_config(grid, ignored)}
    return write_folder(lm, folder, config, tensors)


def one_grid(model: Transformer) -> tuple[Grid, list[str]]:
    """The grid of all rounded layers, and the names of the linear layers that were not rounded."""
    grids = {name: weight.grid for name, weight in weights(model) if isinstance(weight, QuantizedTensor)}
    if not grids:
        raise ValueError("Nothing in this model is quantized: give what quantize_model returned.")
    if not grids.keys().isdisjoint({"embed_tokens.weight", "lm_head.weight"}):
        raise ValueError("The layout has linear layers of the stack alone: quantize the model with head_bits=None.")
    if len(set(grids.values())) > 1:
        raise ValueError("Layers of this model have different grids, and the file names one: round all of them alike.")
    grid = next(iter(grids.values()))
    if grid.bits not in (4, 8) or grid.kind not in ("symmetric", "zero_point") or grid.group_size == TENSOR:
        raise ValueError(
            f"The layout has no form for a grid with bits={grid.bits}, group_size={grid.group_size!r} and "
            f"kind={grid.kind!r}: quantize with bits=4 or 8, in groups or (group_size=None) a whole row, symmetric or "
            "with a zero point."
        )
    plain = [f"model.{name}" for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    return grid, [name for name in plain if name != "model.lm_head"] + ["lm_head"]


def packed(name: str, weight: QuantizedTensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors that stand for the weight with this name."""
    scale = weight.scale.to(dtype)
    if not torch.equal(scale.to(weight.scale.dtype), weight.scale):
        kept, wanted = (str(kind).removeprefix("torch.") for kind in (dtype, weight.scale.dtype))
        raise ValueError(
            f"{name} has scales in {wanted}, and the layout keeps them in the dtype of the model, {kept}, which cannot "
            f"hold them: quantize with dtype=torch.float32, or with scale_dtype=torch.{kept}."
        )
    if weight.order is not None or weight.column_scale is not None:
        raise ValueError(
            f"{name} has its columns in another order, or scaled: quantize with static_groups=True beside act_order, "
            "and with quantize_model, which folds AWQ's scales."
        )
    codes, _, zero = weight.unpacked()
    if weight.grid.bits == 4 and weight.shape[0] <= 8 and zero is not None and zero.shape[1] > 1:
        raise ValueError(  # transformers 5.24 views (1, groups) as bytes, which PyTorch refuses
            f"{name} has {weight.shape[0]} rows, whose zero points fill one word at most, and transformers cannot read "
            "them in groups then: quantize with symmetric=True, or with group_size=None."
        )
    parts = {"packed": words(codes, weight.grid.bits), "scale": scale, "shape": torch.tensor(weight.shape)}
    if zero is not None:
        parts["zero_point"] = words(zero.T, weight.grid.bits).T
    return {f"{name}_{part}": tensor.cpu().contiguous() for part, tensor in parts.items()}


def words(codes: Tensor, bits: int) -> Tensor:
    """Codes `(rows, n)` -> int32 `(rows, ceil(n * bits / 32))`: the bytes of each row, and zeros up to a whole word."""
    row = pack(codes.contiguous(), bits).cpu()
    return nn.functional.pad(row, (0, -row.shape[1] % 4)).contiguous().view(torch.int32)


def quantization_config(grid: Grid, ignored: list[str]) -> dict:
    """What config.json says about the quantization."""
    weights = {
        "num_bits": grid.bits,
        "type": "int",
        "symmetric": grid.kind == "symmetric",
        "strategy": "channel" if grid.group_size is None else "group",
        "group_size": grid.group_size,
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ignored,
    }
