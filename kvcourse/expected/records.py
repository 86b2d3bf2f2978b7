"""What the notebooks measured on other machines: one JSON file for each class of devices in `data/expected`.

`kvcourse run --record` adds a run to the file of this machine's class (see `device.device_class`).
"""

import json
import os
import platform
import re
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from kvcourse.device import device_class, device_name, placement
from kvcourse.model_folder import write_whole
from kvcourse.paths import data_folder
from kvcourse.text_files import read_object


class Figure(NamedTuple):
    """One number that a run measured; `counted` where it comes from a count, and so is the same on every machine."""

    value: float
    unit: str
    counted: bool


class Run(NamedTuple):
    """What one machine measured at one time: `environment` describes it, without names of hosts or users."""

    environment: dict
    figures: dict[str, Figure]

    @property
    def model(self) -> str:
        return self.environment["model"]


def folder() -> Path:
    """Where the files lie."""
    return data_folder() / "expected"


def recorded_classes() -> list[str]:
    """The classes of devices that have a file."""
    return sorted(path.stem for path in folder().glob("*.json"))


def read_runs(class_name: str) -> list[Run]:
    """All runs recorded on machines of a class; none where there is no file.

    Raises `ValueError` naming the file when it is damaged.
    """
    path = folder() / f"{class_name}.json"
    if not path.is_file():
        return []
    content = read_object(path)
    try:
        return [_run(run) for run in content["runs"]]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}): restore it, or remove it and record again.") from None


def _run(content: dict) -> Run:
    figures = {key: Figure(**fields) for key, fields in content["figures"].items()}
    for key, (value, unit, counted) in figures.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= sys.float_info.max:  # so nan and inf are none, nor is a longer integer
            raise ValueError(f"{key} must be a finite number that a float can hold, not {str(value)[:40]}")
        if not isinstance(unit, str) or not isinstance(counted, bool):
            raise ValueError(f"{key} must have a text as unit, and counted must be true or false")
    if not isinstance(content["environment"]["model"], str):
        raise ValueError("a run does not name its model")
    return Run(content["environment"], figures)


def require_recordable() -> None:
    """Raise `ValueError` or `OSError` unless a run can be added to this machine's file: to be asked before the run."""
    read_runs(device_class())
    folder().mkdir(exist_ok=True)
    if not os.access(folder(), os.W_OK):
        raise PermissionError(f"{folder()} cannot be written to: record in a checkout of the course that is yours.")


def record(figures: dict[str, Figure], model: str) -> Path:
    """Add a run of this machine to the file of its class, and return the file's path.

    Raises `ValueError`, and writes nothing, for figures that could not be read again.
    """
    added = _run(_plain(Run(environment(model), figures)))
    runs = [*read_runs(device_class()), added]
    text = json.dumps({"device_class": device_class(), "runs": [_plain(run) for run in runs]}, indent=1)
    # A figure takes one line, not five.
    text = re.sub(r'\{\s*("value": .*)\s*("unit": .*)\s*("counted": .*)\s*\}', r"{\1 \2 \3}", text)
    path = folder() / f"{device_class()}.json"
    write_whole(path, f"{text}\n".encode())
    return path


def _plain(run: Run) -> dict:
    return {
        "environment": run.environment,
        "figures": {key: figure._asdict() for key, figure in run.figures.items()},
    }


def environment(model: str) -> dict[str, str | float]:
    """What may move the figures of this machine, and when."""
    device = placement().device
    gpu = {"gpu": device_name(device)} if device.type == "cuda" else {}
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "model": model,
        "processor": device_name(torch.device("cpu")),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        **gpu,
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "kvcourse": version("kvcourse"),
    }
