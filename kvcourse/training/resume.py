"""What an earlier run left: what its checkpoint holds, and whether that belongs to the run that is asked for."""

import json
import os
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from kvcourse.model import Transformer
from kvcourse.text_files import read_object
from kvcourse.training.checkpoint import CHECKPOINT, damaged, load_checkpoint
from kvcourse.training.export import FILES, PROVENANCE, read_provenance
from kvcourse.training.history import History


def make_plan(recipe, variant: str, tokens: Tensor | None = None) -> dict:
    """What fixes a run, as it comes back from a file. `tokens` are those of its first step: they tell two runs apart
    when the corpus or the tokenizer has changed between them. Without them, the plan says nothing of the data."""
    plan = {"variant": variant, "recipe": asdict(recipe)}
    if tokens is not None:
        plan["data"] = sha256(json.dumps(tokens.tolist()).encode()).hexdigest()[:16]
    return json.loads(json.dumps(plan))


def find_earlier(folder: Path, restart: bool = False) -> tuple[Path, dict] | None:
    """The file in which an earlier run left its record, and the record: its checkpoint, else the provenance of its
    model. None when there is neither, or `restart` begins again.

    Raises `ValueError` when the file is damaged, or files are there that a new model would replace, and which are not
    those of a model made by this program.
    """
    folders = [name for name in (CHECKPOINT, *FILES) if (folder / name).is_dir()]
    if folders:
        raise ValueError(f"{folder / folders[0]} is a folder, where a file belongs: move it away, or give another.")
    taken = [name for name in FILES if os.path.lexists(folder / name)]
    if taken and not made_here(folder):
        raise ValueError(
            f"{folder} has a {taken[0]}, but no {PROVENANCE} of a model made by `kvcourse train`, so nothing there is "
            "replaced: give another folder, or move the model away."
        )
    checkpoint = folder / CHECKPOINT
    if restart:
        return None
    if checkpoint.exists():
        return checkpoint, read_run(checkpoint)[1]
    return (folder / PROVENANCE, read_provenance(folder)) if taken else None


def made_here(folder: Path) -> bool:
    """Whether the model there is one of this program, be it complete or not."""
    try:
        record = read_object(folder / PROVENANCE)
    except (OSError, ValueError):
        return False
    return "variant" in record and all(isinstance(record.get(name), dict) for name in ("recipe", "sha256"))


def state_of(model: Transformer, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights as `model.NAME`, what the optimizer knows of the i-th weight as `optimizer.i.NAME`."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for index, known in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": tensor for name, tensor in known.items()}
    return tensors


def restore(path: Path, model: Transformer, optimizer: torch.optim.Optimizer, plan: dict) -> tuple[int, History]:
    """Put the checkpoint into model and optimizer; return the steps done and the history. Raises `ValueError` when the
    file is damaged or belongs to another run."""
    tensors, record, history = read_run(path)
    compare(path, record, plan)
    if {name: tensor.shape for name, tensor in tensors.items()} != shapes_after(record["step"], model, optimizer):
        raise damaged(path)
    weights, state = {}, {}
    for name, tensor in tensors.items():
        part, rest = name.split(".", 1)
        if part == "model":
            weights[rest] = tensor
        else:
            index, key = rest.split(".")
            state.setdefault(int(index), {})[key] = tensor
    model.load_state_dict(weights)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return record["step"], history


def read_run(path: Path) -> tuple[dict[str, Tensor], dict, History]:
    """Tensors and record of a checkpoint, and the history in the record. Raises `ValueError` when it is damaged."""
    tensors, record = load_checkpoint(path)
    try:
        history = History.read(record["history"])
        step, steps = record["step"], record["recipe"]["steps"]
        sound = type(step) is int and 0 <= step <= steps and (step < steps or history.points[-1]["step"] == steps)
    except (LookupError, TypeError):
        sound = False
    if not sound:  # whole, but not written by this program
        raise damaged(path)
    return tensors, record, history


def shapes_after(step: int, model: Transformer, optimizer: torch.optim.Optimizer) -> dict[str, torch.Size]:
    """The shape of each tensor in `state_of` when so many steps are done: AdamW knows nothing before the first."""
    shapes = {f"model.{name}": tensor.shape for name, tensor in model.state_dict().items()}
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for index, weight in enumerate(weights if step else []):
        known = {"step": torch.Size(), "exp_avg": weight.shape, "exp_avg_sq": weight.shape}
        shapes |= {f"optimizer.{index}.{name}": shape for name, shape in known.items()}
    return shapes


def compare(path: Path, record: dict, plan: dict) -> None:
    """Raise `ValueError` naming the first thing in which a record, of a checkpoint or a model, is not as planned."""
    there, wanted = ({"variant": each.get("variant")} | each["recipe"] for each in (record, plan))
    instead = "give --restart (resume=False in Python) to begin again, or another folder."
    for name in wanted | there:
        if there.get(name) != wanted.get(name):
            raise ValueError(
                f"{path} is of a run with {name}={there.get(name)!r}, and {name}={wanted.get(name)!r} is asked for: "
                + instead
            )
    if "data" in plan and record.get("data") != plan["data"]:
        raise ValueError(f"{path} is of a run with other data, though of the same recipe: {instead}")
