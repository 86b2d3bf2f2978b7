"""Read a checkpoint from a Hugging Face folder: config.json, and weights in safetensors files.

The weights are in `model.safetensors`, or in several files ("shards") that `model.safetensors.index.json` lists by
tensor. A safetensors file is a JSON header (name, type, shape and place of each tensor) followed by the numbers;
nothing in it can run code, unlike the pickle files it replaced. The `safetensors` library reads it.
Layout: https://huggingface.co/docs/safetensors
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm.auto import tqdm

from kvcourse.config import ModelConfig
from kvcourse.text_files import read_object, refuse_pointer
from kvcourse.weights.hf_config import read_config
from kvcourse.weights.tensors import check_tensors, converted, model_shapes

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


class Folder:
    """The checkpoint in a Hugging Face folder, opened and checked: its `config`, and `read`, which gives the weights.

    Raises `FileNotFoundError` when there is no such folder, `ValueError` when a file is missing or damaged, the
    configuration is not supported, or a tensor is missing, unknown, of another shape or of a type that is not floating
    point.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = folder = Path(path)
        if not folder.is_dir():
            if folder.exists():
                raise ValueError(f"{folder} is a file: give the folder that it is in.")
            raise FileNotFoundError(f"There is no folder {folder}.")
        names = file_names(folder)
        if "config.json" not in names or "adapter_config.json" in names:
            raise not_a_checkpoint(names, str(folder))
        settings = read_object(folder / "config.json")
        self.tensors = find_tensors(folder)
        self.config = read_config(settings, str(folder / "config.json"), len(self.tensors))
        check_stored(self.tensors, self.config, folder)

    def read(self, dtype: torch.dtype = torch.float32, device="cpu") -> dict[str, Tensor]:
        """The state dict, with the names and shapes of `Transformer`.

        Tensors are read one by one, straight into `dtype` on `device`, so memory holds one copy. Raises `ValueError`
        when a tensor has numbers that are not finite, or are too large for `dtype`.
        """
        state = {}
        with tqdm(desc=self.path.name, total=len(self.tensors), unit="tensor", delay=5, leave=False) as bar:
            for file in sorted({tensor.file for tensor in self.tensors.values()}):  # one shard at a time stays open
                with open_safetensors(file) as opened:
                    for name, tensor in self.tensors.items():
                        if tensor.file == file:
                            weight = opened.get_tensor(tensor.name)
                            state[name] = converted(weight, dtype, device, f"{file}: tensor {tensor.name}", copy=True)
                            bar.update()
        return state


class Stored(NamedTuple):
    """A tensor in a file: what its header says."""

    file: Path
    name: str  # in the file
    shape: tuple[int, ...]
    dtype: str  # F32, BF16, I64, ...


def find_tensors(folder: Path) -> dict[str, Stored]:
    """All tensors of a checkpoint by their name in `Transformer`; only headers are read."""
    stored = {}
    for file, listed in weight_files(folder).items():
        with open_safetensors(file) as opened:
            names = set(opened.keys())
            if listed is not None and listed != names:
                name = min(listed ^ names)
                lacks, has = (INDEX, file.name) if name in names else (file.name, INDEX)
                raise ValueError(f"{folder}: {has} has a tensor {name}, but {lacks} does not: fetch the folder again.")
            for name in sorted(names):
                if name.endswith("rotary_emb.inv_freq"):  # in older files; config.json says how to work them out
                    continue
                part = opened.get_slice(name)
                found = Stored(file, name, tuple(part.get_shape()), part.get_dtype())
                other = stored.setdefault(name.removeprefix("model."), found)
                if other is not found:
                    raise ValueError(f"{folder} has the same tensor twice, as {other.name} and as {name}.")
    return stored


def weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """The safetensors files of a checkpoint, each with the names of its tensors as far as an index tells them."""
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    if not (folder / INDEX).is_file():
        raise not_a_checkpoint(file_names(folder), str(folder))
    files = {folder / name: tensors for name, tensors in read_index(folder / INDEX).items()}
    for file in files:
        if not os.path.isfile(file):  # Path.is_file fails on a name that is too long
            raise ValueError(f"{file} is missing, and {INDEX} says that it is part of the model: fetch it again.")
    return files


def read_index(index: Path) -> dict[str, set[str]]:
    """The names of the shards, each with the names of its tensors."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map, which says where each tensor is.")
    shards = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise ValueError(f"{index} says that {tensor} is in {name!r}, which is no safetensors file of this folder.")
        shards.setdefault(name, set()).add(tensor)
    return shards


def file_names(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir() if file.is_file()]  # not a link to a file that is gone


def not_a_checkpoint(names: Iterable[str], where: str) -> ValueError:
    """Why there is nothing to load where there are files with these `names`, and what to do instead."""

    def ending(*suffixes: str) -> str | None:
        return min((name for name in names if name.lower().endswith(suffixes)), default=None)

    names, gguf, pickle = set(names), ending(".gguf"), ending(".bin", ".pth", ".pt", ".pkl", ".ckpt")
    safetensors = ending(".safetensors")
    if "adapter_config.json" in names:
        return ValueError(
            f"{where} holds an adapter (adapter_config.json): changes to another model's weights. Merge it into that "
            "model first (`merge_and_unload` of the peft library) and give the merged model's folder."
        )
    if gguf and SINGLE not in names:
        return ValueError(f"{where} holds a GGUF file: give the path of that file, {gguf} (download it if need be).")
    if pickle and not safetensors:
        return ValueError(
            f"{where} has its weights in {pickle}, a pickle file. Opening it could run any code, so that is refused. "
            "If you trust its source, convert it with the transformers library: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder) writes safetensors."
        )
    if "config.json" not in names:
        return ValueError(f"{where} has no config.json: a checkpoint has that and {SINGLE}.")
    if safetensors:
        return ValueError(f"{where} has {safetensors}, but neither {SINGLE} nor {INDEX}, so it is not complete.")
    return ValueError(f"{where} has no weights: neither {SINGLE} nor {INDEX} is there.")


def open_safetensors(path: Path):
    """The file, opened to read (a context manager)."""
    refuse_pointer(path)
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or was cut short: fetch or copy it again. ({error})") from error


def check_stored(stored: dict[str, Stored], config: ModelConfig, folder: Path) -> None:
    """Raise `ValueError` unless the tensors are exactly the model's, in shape too, and floating point. The head of a
    tied model, stored a second time, is taken out of `stored`."""
    head = stored.pop(HEAD, None) if config.tie_embeddings else None
    if not config.tie_embeddings and HEAD not in stored and EMBEDDING in stored:
        raise ValueError(f"{folder} lacks {HEAD}, or else config.json should say tie_word_embeddings = true.")
    shapes = model_shapes(config, str(folder / "config.json")).items()
    names = {name: tensor.name for name, tensor in stored.items()}
    wanted = {names.get(name, name if name == HEAD else f"model.{name}"): shape for name, shape in shapes}
    check_tensors({tensor.name: tensor.shape for tensor in stored.values()}, wanted, str(folder), "config.json")
    for tensor in stored.values():
        if tensor.dtype not in ("F64", "F32", "F16", "BF16"):
            raise ValueError(
                f"{tensor.file}: tensor {tensor.name} is of type {tensor.dtype}; only floating point of 16 bits or "
                "more is supported. Take the model that was not quantized."
            )
    if head is not None:
        embedding = stored[EMBEDDING]
        if head.dtype != embedding.dtype or not torch.equal(read_one(head), read_one(embedding)):
            raise ValueError(
                f"{folder}: config.json says tie_word_embeddings = true, but {head.name} is there and differs from "
                f"{embedding.name}; one of the two is wrong."
            )


def read_one(tensor: Stored) -> Tensor:
    with open_safetensors(tensor.file) as opened:
        return opened.get_tensor(tensor.name)
