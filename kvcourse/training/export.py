"""A trained model as a folder that other programs read: a Hugging Face checkpoint in float16, and where it comes from.

| file | what it holds |
|---|---|
| `model.safetensors` | the weights in float16 |
| `config.json` | the shape: a Llama model, or a Mistral model where there is a window |
| `tokenizer.json`, `tokenizer_config.json` | the tokenizer |
| `generation_config.json` | the token that ends a text |
| `curve.json` | losses and recall during the training |
| `provenance.json` | how it was made, and the SHA-256 of each other file |
"""

import os
from hashlib import sha256
from pathlib import Path

import torch
from safetensors.torch import save
from tokenizers import Tokenizer
from torch import Tensor

from kvcourse.model import Transformer
from kvcourse.model_folder import as_text, place, usable
from kvcourse.text_files import read_object
from kvcourse.tokenizer.json_write import library_files
from kvcourse.training.vocabulary import END
from kvcourse.weights.hf_write import as_stored, hf_config, hf_name
from kvcourse.weights.shipped import altered_in

PROVENANCE, CURVE = "provenance.json", "curve.json"
FILES = (PROVENANCE, "model.safetensors", "config.json", "generation_config.json", "tokenizer.json")
FILES += ("tokenizer_config.json", CURVE)


def export(model: Transformer, tokenizer: Tokenizer, folder: str | os.PathLike, provenance: dict, curve: list) -> Path:
    """Write the model as a Hugging Face folder, which `kvcourse.load_model` and `transformers` read; return the folder.

    `provenance` is what is known about the model; checksums are added. `curve` are the points of its `History`. All
    files are written apart first and then moved to their places, so that a full disk leaves an earlier model as it was.
    Raises `ValueError` for weights that float16 cannot hold or a model that is neither Llama nor Mistral,
    `RuntimeError` when the files cannot be written.
    """
    end = tokenizer.token_to_id(END)
    if end is None:
        raise ValueError(f"The tokenizer has no token {END}, which begins and ends every text.")
    named = {"bos_token": END, "eos_token": END}
    family = "llama" if model.config.window is None else "mistral"
    files = {
        "model.safetensors": save(half_weights(model), {"format": "pt"}),
        "config.json": as_text(hf_config(model.config, torch.float16, end, end, family)),
        **library_files(tokenizer, named, model.config.max_seq_len, {"bos_token_id": end, "eos_token_id": end}),
        CURVE: as_text(curve),
    }
    sums = {name: sha256(data).hexdigest() for name, data in files.items()}
    # First: a folder that has any of these files is then known to be ours, and the checksums tell which are missing.
    return place({PROVENANCE: as_text(provenance | {"sha256": sums})} | files, usable(folder))


def half_weights(model: Transformer) -> dict[str, Tensor]:
    """{name in Hugging Face's Llama: weight in float16}. Raises `ValueError` naming a weight that overflows."""
    advice = "The training has diverged: lower the learning rate and train again."
    state = model.state_dict().items()
    return {hf_name(name): as_stored(name, weight, torch.float16, advice) for name, weight in state}


def read_provenance(folder: str | os.PathLike) -> dict:
    """The provenance of the model in `folder`, after comparing the SHA-256 of each file. Raises `ValueError` when a
    file is missing or damaged."""
    folder = Path(folder)
    if wrong := altered_in(folder):
        raise ValueError(f"{wrong[0]} is missing or damaged: put the file back, or train the model again (--restart).")
    return read_object(folder / PROVENANCE)
