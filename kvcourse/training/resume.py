"""Going on with a stopped run: what a checkpoint holds, and whether it belongs to the run that is asked for."""

import json
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from kvcourse.model import Transformer
from kvcourse.training.checkpoint import damaged, load_checkpoint
from kvcourse.training.history import History


def make_plan(recipe, variant: str, tokens: Tensor) -> dict:
    """What fixes a run, as it comes back from a file. `tokens` are those of its first step: they tell two runs apart
    when the corpus or the tokenizer has changed between them."""
    data = sha256(json.dumps(tokens.tolist()).encode()).hexdigest()[:16]
    return json.loads(json.dumps({"variant": variant, "recipe": asdict(recipe), "data": data}))


def state_of(model: Transformer, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights as `model.NAME`, what the optimizer knows of the i-th weight as `optimizer.i.NAME`."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for index, known in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": tensor for name, tensor in known.items()}
    return tensors


def restore(path: Path, model: Transformer, optimizer: torch.optim.Optimizer, plan: dict) -> tuple[int, History]:
    """Put the checkpoint into model and optimizer; return the steps done and the history. Raises `ValueError` when the
    file is damaged or belongs to another run."""
    tensors, record = load_checkpoint(path)
    compare(path, record, plan)
    weights, state = {}, {}
    for name, tensor in tensors.items():
        part, rest = name.split(".", 1)
        if part == "model":
            weights[rest] = tensor
        else:
            index, key = rest.split(".")
            state.setdefault(int(index), {})[key] = tensor
    try:
        model.load_state_dict(weights)
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        return record["step"], History(**record["history"])
    except (RuntimeError, ValueError, KeyError, TypeError) as error:  # whole, but not written by this program
        raise damaged(path) from error


def compare(path: Path, record: dict, plan: dict) -> None:
    """Raise `ValueError` naming the first thing in which a record, of a checkpoint or a model, is not as planned."""
    there, wanted = ({"variant": r.get("variant")} | (r.get("recipe") or {}) for r in (record, plan))
    instead = "give --restart (resume=False in Python) to begin again, or another folder."
    for name in wanted | there:
        if there.get(name) != wanted.get(name):
            raise ValueError(
                f"{path} is of a run with {name}={there.get(name)!r}, and {name}={wanted.get(name)!r} is asked for: "
                + instead
            )
    if record.get("data") != plan["data"]:
        raise ValueError(f"{path} is of a run with other data, though of the same recipe: {instead}")
