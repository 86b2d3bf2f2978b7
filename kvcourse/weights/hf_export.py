"""Write a model as a Hugging Face folder, which `transformers`, vLLM and `kvcourse.load_model` read.

| file | what it holds |
|---|---|
| `tokenizer.json`, `tokenizer_config.json` | the tokenizer, its special tokens and the chat template |
| `generation_config.json` | the tokens that end an answer |
| `model.safetensors` | the weights; a tied head is not there a second time |
| `config.json` | the shape of the model, and its family |

The same text has the same ids in other programs, with two exceptions. Text that looks like a control token is that
token for them, and ordinary text for `LM.encode`; and they drop what the vocabulary cannot write, which it refuses.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kvcourse.device import as_dtype
from kvcourse.model_folder import as_text, place, usable
from kvcourse.quant.tensor import QuantizedTensor
from kvcourse.tokenizer.json_write import tokenizer_files
from kvcourse.weights.gguf_write import require_lm, weights
from kvcourse.weights.hf_write import as_stored, hf_config, hf_name, safetensors_file
from kvcourse.weights.tensors import model_shapes


def export_hf(lm, folder: str | os.PathLike, dtype: torch.dtype | str | None = None) -> Path:
    """Write the model and the tokenizer of an `LM` into `folder`, and return it. Weights are stored in `dtype` (None:
    the model's), so with float32 `transformers.AutoModelForCausalLM.from_pretrained(folder)` computes the same logits.

    The files are written whole or not at all, config.json last. Raises `ValueError` for what is no `LM`, a model whose
    features no family of Hugging Face's has, a quantized or compiled one, a tokenizer that tokenizer.json has no form
    for, numbers that `dtype` cannot hold, and a folder with other files; `RuntimeError` when it cannot be written.
    """
    model = require_lm(lm).model
    dtype = model.dtype if dtype is None else as_dtype(dtype)
    config = hf_config(model.config, dtype, *ends(lm))
    return write_folder(lm, folder, config, plain_tensors(lm, dtype))


def plain_tensors(lm, dtype: torch.dtype) -> dict[str, Tensor]:
    """{name in the file: tensor} of a model that is a plain `Transformer`."""
    found = dict(weights(lm.model))
    if any(isinstance(weight, QuantizedTensor) for weight in found.values()):
        raise ValueError(
            f"{lm.name} is quantized: kvcourse.quant.export_compressed(lm, folder) writes it in few bits, or else give "
            "the model before it was quantized."
        )
    shapes = model_shapes(lm.config, "The model's configuration")
    if {name: tuple(weight.shape) for name, weight in found.items()} != shapes:
        raise ValueError(f"{lm.name} keeps its weights in a form of its own: give the model that it was made of.")
    advice = f"Give dtype={str(lm.model.dtype)}, or load the model again."
    return {hf_name(name): as_stored(name, weight, dtype, advice) for name, weight in found.items()}


def ends(lm) -> tuple[int | None, int | None]:
    """The ids that begin and end a text."""
    return (None, None) if lm.tokenizer is None else (lm.tokenizer.bos_id, lm.tokenizer.eos_id)


def write_folder(lm, folder: str | os.PathLike, config: dict, tensors: dict[str, Tensor]) -> Path:
    """The folder with this config.json, these tensors and the tokenizer of `lm`."""
    files: dict[str, bytes | Callable[[Path], None]] = dict(tokenizer_files(lm.tokenizer, lm.config.max_seq_len))
    files |= {"model.safetensors": safetensors_file(tensors), "config.json": as_text(config)}
    return place(files, refuse_others(usable(folder), files))


def refuse_others(folder: Path, files: dict) -> Path:
    """`folder`, if nothing in it could be read as part of the model beside `files`, else `ValueError`."""
    others = sorted(path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    other = next((name for name in others if name not in files), None)
    if other is not None:
        raise ValueError(
            f"{folder} has other files, such as {other}, and programs would read them too: give a new one."
        )
    return folder
