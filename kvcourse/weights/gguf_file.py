"""Read a checkpoint of the Llama, Mistral, Qwen2 or Qwen3 family from a GGUF file.

A GGUF file is one file with everything: sizes and tokenizer as key-value metadata, then the tensors, most of them in
blocks of small integers with a scale. The `gguf` package reads the container and undoes the blocks; `gguf_config` knows
what the metadata mean; this file knows what the tensors are called, and undoes the one thing that converters do to a
Llama model: reordering rows of q and k.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import os
from pathlib import Path

import gguf
import numpy as np
import torch
from tqdm.auto import tqdm

from kvcourse.config import ModelConfig
from kvcourse.weights.fields import Fields
from kvcourse.weights.gguf_config import read_config
from kvcourse.weights.tensors import check_tensors, converted, model_shapes


class GGUFModel:
    """The model in a GGUF file, opened and checked: its `config` and `metadata`, and `read`, which gives the weights.

    A model split over several files is opened by the path of the first. Raises `ValueError` when a file is damaged,
    holds another kind of model, or has a tensor too few, too many or of another shape; `FileNotFoundError` when there
    is none.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = path = Path(path)
        self.metadata, tensors = open_gguf(path)
        rope_freqs, tied = tensors.pop("rope_freqs.weight", None), has_tied_head(tensors)
        if rope_freqs is not None:
            rope_freqs = dequantize(rope_freqs, path).ravel().tolist()
        if tied:
            tensors.pop("output.weight", None)  # a copy of the embedding
        self.config = read_config(self.metadata, tensors, str(path), tied, rope_freqs)
        shapes = model_shapes(self.config, str(path))
        found = {name: tuple(reversed(tensor.shape.tolist())) for name, tensor in tensors.items()}  # outermost first
        check_tensors(found, {gguf_name(name): shape for name, shape in shapes.items()}, str(path), "its metadata")
        self.tensors = {name: tensors[gguf_name(name)] for name in shapes}

    def read(self, dtype: torch.dtype = torch.float32, device="cpu") -> dict[str, torch.Tensor]:
        """The state dict, with the names and shapes of `Transformer`.

        Tensors are converted one by one, so memory holds one copy in `dtype` and one tensor in float32. Raises
        `ValueError` when a tensor has numbers that are not finite, or are too large for `dtype`.
        """
        state = {}
        for name, tensor in tqdm(self.tensors.items(), desc=self.path.name, unit="tensor", delay=5, leave=False):
            weight = dequantize(tensor, self.path)
            if self.metadata["general.architecture"] == "llama":
                weight = restore_order(name, weight, self.config)
            state[name] = converted(torch.from_numpy(weight), dtype, device, f"{self.path}: tensor {tensor.name}")
        return state


class Reader(gguf.GGUFReader):
    """`GGUFReader` that reads nothing past the end of the file, where the original finds empty values; and on a plain
    array: slicing a memmap costs several times more, and the vocabulary is read in 10^5 slices."""

    def _get(self, offset, dtype, count=1, override_order=None):
        self.data = self.data.view(np.ndarray)
        values = super()._get(offset, dtype, count, override_order)
        if len(values) < count:
            raise ValueError(f"it ends at byte {len(self.data)}, where it says more should follow")
        return values


def open_gguf(path: Path) -> tuple[dict, dict]:
    """Metadata {key: value} and tensors {name: tensor, still in blocks on disk}, those of all the parts of a model."""
    metadata, tensors = open_part(path)
    split = Fields(metadata, str(path))
    count, number = split.whole("split.count", 1, least=0), split.whole("split.no", 0, least=0) + 1
    if count < 2:
        return metadata, tensors
    ending = "-{:05d}-of-" + f"{count:05d}.gguf"
    if number != 1:
        raise ValueError(f"{path.name} is part {number} of {count} of a model: give part 1, ...{ending.format(1)}.")
    if not path.name.endswith(ending.format(1)):
        raise ValueError(
            f"{path.name} is part 1 of {count} of a model: parts must have the names ...{ending.format(1)}."
        )
    for number in range(2, count + 1):
        part = path.with_name(path.name.removesuffix(ending.format(1)) + ending.format(number))
        about, more = open_part(part)
        if (about.get("split.count"), about.get("split.no")) != (count, number - 1):
            raise ValueError(f"{part} is not part {number} of the {count} parts of {path.name}.")
        if tensors.keys() & more.keys():
            raise ValueError(f"{part} has tensors that an earlier part has too, {min(tensors.keys() & more.keys())}.")
        tensors |= more
    return metadata, tensors


def open_part(path: Path) -> tuple[dict, dict]:
    """Metadata and tensors of one file."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    with open(path, "rb") as file:
        check_beginning(file.read(8), path)
    try:
        reader = Reader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, MemoryError) as error:
        raise ValueError(f"{path} is damaged or was cut short: fetch or copy it again. ({error})") from error
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def check_beginning(first: bytes, path: Path) -> None:
    """Raise `ValueError` unless these are the first bytes of a file that can be read: the letters GGUF, a version."""
    if first[:4] != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file: it does not begin with the letters GGUF.")
    if len(first) < 8:
        raise ValueError(f"{path} was cut short: it ends after {len(first)} bytes. Fetch or copy it again.")
    version = int.from_bytes(first[4:], "little")
    if version >= 1 << 16:
        raise ValueError(f"{path} is a big-endian GGUF file; this package reads little-endian ones.")
    if not 2 <= version <= gguf.GGUF_VERSION:
        raise ValueError(f"{path} is of GGUF version {version}; versions 2 to {gguf.GGUF_VERSION} can be read.")


def has_tied_head(tensors: dict) -> bool:
    """Whether the head is the embedding matrix: it is not in the file, or the same bytes are there twice."""
    head, table = tensors.get("output.weight"), tensors.get("token_embd.weight")
    if head is None or table is None:
        return head is None
    return head.tensor_type == table.tensor_type and np.array_equal(head.data, table.data)


# Modules of `Transformer`, and what a GGUF file calls them.
NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """`layers.3.mlp.up_proj.bias` -> `blk.3.ffn_up.bias`."""
    module, kind = name.rsplit(".", 1)
    if not module.startswith("layers."):
        return f"{NAMES[module]}.{kind}"
    _, index, module = module.split(".", 2)
    return f"blk.{index}.{NAMES[module]}.{kind}"


def dequantize(tensor, path: Path) -> np.ndarray:
    """The tensor's values in float32, in memory of their own (float32 tensors would otherwise stay the file itself)."""
    try:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise ValueError(f"{path}: tensor {tensor.name} is of type {kind}, which cannot be dequantized.") from error
    return np.require(values, np.float32, ["C", "W"])


def restore_order(name: str, weight: np.ndarray, config: ModelConfig) -> np.ndarray:
    """A weight or bias of a Llama model with its rows in the order of the original checkpoint.

    Rotary embedding turns pairs of numbers. The original pairs number i of a head with number i + D/2; for Llama and
    Mistral, llama.cpp's converter stores the two rows of a pair side by side (`permute` in conversion/llama.py). For
    the Qwen families it leaves them as they are.
    """
    heads = {"q_proj": config.n_heads, "k_proj": config.n_kv_heads}.get(name.split(".")[-2])
    return weight if heads is None else restore_rows(weight, heads)


def restore_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows `(heads * D, ...)` that stand pair by pair back in halves. Each matrix has its own number of heads."""
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])  # (heads, D/2, which of the pair, ...)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)
