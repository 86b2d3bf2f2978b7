"""Where a model comes from: enough to make it again, and to know what to expect when doing so."""

import shlex
import subprocess
from datetime import datetime
from pathlib import Path

import psutil
import torch

import kvcourse
from kvcourse.device import device_name
from kvcourse.training.history import History


def make_provenance(plan: dict, history: History, command: list[str]) -> dict:
    """Everything but the checksums. `plan` is that of `make_plan`, and `command` makes the model again.

    The `origin` is that of the first step. Where another one computed after a stop, `resumed` has it, and its `step`.
    """
    last = history.points[-1]
    begun, *resumed = history.parts
    made = plan | {
        "command": shlex.join(command),
        "seed": plan["recipe"]["seed"],
        **{name: value for name, value in begun.items() if name != "step"},
        "steps": last["step"],
        "tokens": last["tokens"],
        "loss": last["loss"],
        "validation_loss": last["validation_loss"],
        "minutes": round(history.seconds / 60, 1),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    return made | ({"resumed": resumed} if resumed else {})


def origin(device: torch.device) -> dict:
    """What computes a part of a run: the version and the commit of the package, and the machine."""
    return {"kvcourse": kvcourse.__version__, **commit(), "machine": machine(device)}


def machine(device: torch.device) -> dict:
    """What computed, and how many threads did."""
    return {
        "device": device_name(device),
        "cores": psutil.cpu_count(logical=False),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def commit() -> dict:
    """The commit of the checkout that this package is in, and whether the package's files were as in that commit; None
    where there is no checkout (an installed package)."""
    package = Path(kvcourse.__file__).resolve().parent
    try:
        if git(package, "rev-parse", "--show-prefix") != f"{package.name}/":  # inside of another project's checkout
            return {"commit": None, "clean": None}
        return {"commit": git(package, "rev-parse", "HEAD"), "clean": not git(package, "status", "--porcelain", ".")}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "clean": None}


def git(folder: Path, *arguments: str) -> str:
    whole = ["git", "-C", str(folder), *arguments]
    return subprocess.run(whole, capture_output=True, text=True, check=True).stdout.strip()
