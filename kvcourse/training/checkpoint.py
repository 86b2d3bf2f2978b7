"""The state of a training run in one file: weights, optimizer, and a record of everything else.

The file is in safetensors format (https://huggingface.co/docs/safetensors), so opening it cannot run code. Its
metadata holds the record as JSON, and a digest of record and tensors, so that a file that was cut short or changed
anywhere is found out.
"""

import json
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvcourse.model_folder import write_whole

CHECKPOINT = "checkpoint.safetensors"  # its name in the folder of a run


def save_checkpoint(path: Path, tensors: dict[str, Tensor], record: dict) -> None:
    """Write the file, whole or not at all. `record` is what JSON can hold, in finite numbers.

    Raises `RuntimeError` when it cannot be written; an earlier file is then still there.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(record, allow_nan=False)
    write_whole(path, save(tensors, {"record": text, "sha256": digest(text, tensors)}))


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict]:
    """Tensors, on the CPU, and record. Raises `ValueError` when the file cannot be read or is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, UnicodeDecodeError) as error:
        raise damaged(path) from error
    except OSError as error:
        reason = "it is a folder" if path.is_dir() else error
        raise ValueError(
            f"The checkpoint {path} cannot be read ({reason}): put that right, or move it away."
        ) from error
    text = metadata.get("record", "")
    if metadata.get("sha256") != digest(text, tensors):
        raise damaged(path)
    try:
        return tensors, json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(path) from error


def digest(text: str, tensors: dict[str, Tensor]) -> str:
    """Of the record, and of each tensor's name, type, shape and numbers."""
    whole = sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        whole.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return whole.hexdigest()


def damaged(path: Path) -> ValueError:
    return ValueError(
        f"{path} is damaged or no checkpoint of this version of kvcourse, so the training cannot go on from it: delete "
        "the file, or give --restart (resume=False in Python), to begin again."
    )
