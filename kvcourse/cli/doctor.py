"""Check whether everything the course needs is there, and say what to do where it is not."""

import os
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

HELP = "check Python, packages, device, models, memory, disk and notebook kernel"

MODEL = "smollm2-135m"
MEMORY_NEEDED = 3.5e9  # what the hungriest notebook may take
PYTHON_NEEDED = (3, 11)


class Line(NamedTuple):
    """One finding: `status` is "ok", "look" (the course works, but read this) or "fix" (it will not work)."""

    status: str
    topic: str
    text: str

    def __str__(self):
        return f"{self.status:<5} {self.topic:<9} {self.text}"


def add_arguments(parser) -> None:
    pass


def main(arguments) -> int:
    lines = examine()
    print(*lines, sep="\n")
    return int(any(line.status == "fix" for line in lines))


def examine() -> list[Line]:
    """Everything that is checked, in the order in which it would have to be put right."""
    lines = [python(), *packages()]
    if any(line.status == "fix" for line in lines):
        return lines  # without the right packages the other checks could not even be made
    return [*lines, device(), threads(), memory(), data(), model(), disk(), kernel()]


def python() -> Line:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] >= PYTHON_NEEDED:
        return Line("ok", "python", f"{version} at {sys.executable}")
    return Line("fix", "python", f"{version} is too old: the course needs {_dotted(PYTHON_NEEDED)} or later")


def packages() -> list[Line]:
    """One line for each package that is missing or too old, or one line with all versions."""
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        return [Line("fix", "packages", "packaging is missing: pip install packaging")]
    wrong, versions = [], []
    for requirement in map(Requirement, metadata.requires("kvcourse")):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        command = f'pip install "{requirement}"'
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(Line("fix", "packages", f"{requirement.name} is missing: {command}"))
            continue
        versions.append(f"{requirement.name} {version}")
        if not requirement.specifier.contains(version, prereleases=True):
            text = f"{requirement.name} {version} does not fit {requirement.specifier}: {command}"
            wrong.append(Line("fix", "packages", text))
    return wrong or [Line("ok", "packages", ", ".join(versions))]


def device() -> Line:
    from kvcourse.device import placement

    place = placement()
    return Line("ok", "device", f"{place.device} in {str(place.dtype).removeprefix('torch.')}: {place.reason}")


def threads() -> Line:
    import psutil
    import torch

    used, cores = torch.get_num_threads(), psutil.cpu_count(logical=False) or os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    limit = os.environ.get("OMP_NUM_THREADS")
    if used < cores and limit:
        text = f"{used} of {cores} cores, because OMP_NUM_THREADS is {limit}: times on the CPU will be longer"
        return Line("look", "threads", text)
    return Line("ok", "threads", f"{used} on {cores} cores")


def memory() -> Line:
    import psutil

    free = psutil.virtual_memory().available
    if free >= MEMORY_NEEDED:
        return Line("ok", "memory", f"{_gb(free)} free; a notebook takes at most {_gb(MEMORY_NEEDED)}")
    text = f"{_gb(free)} free, but a notebook takes up to {_gb(MEMORY_NEEDED)}: close other programs and notebooks"
    return Line("look", "memory", text)


def data() -> Line:
    """Whether the models that came with the course are as they were shipped: loading one does not look."""
    from kvcourse.weights.shipped import SHIPPED, altered

    try:
        wrong = [file for name in SHIPPED for file in altered(name)]
    except FileNotFoundError as error:
        return Line("fix", "data", str(error))
    if not wrong:
        return Line("ok", "data", f"{', '.join(SHIPPED)}: as they were shipped")
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return Line("fix", "data", f"{wrong[0]}{more} is missing or not as it was shipped: install the course again")


def model() -> Line:
    from kvcourse.weights.fetch import fetched, find_source, stand_in

    path = find_source(MODEL).path
    if fetched(MODEL):
        return Line("ok", "model", f"{MODEL} at {path}")
    if path.is_dir():
        return Line("fix", "model", f"{path} is a folder: remove it or give it another name, then run `kvcourse fetch`")
    if path.exists():
        return Line("fix", "model", f"{path} is damaged or not complete: run `kvcourse fetch`, which replaces it")
    if stand_in(MODEL) != MODEL:
        text = f"{MODEL} is not on this computer, and KVCOURSE_OFFLINE is set: the course runs on {stand_in(MODEL)}"
        return Line("look", "model", text)
    return Line("fix", "model", f"{MODEL} is not on this computer: run `kvcourse fetch` once, with a network")


def disk() -> Line:
    import psutil

    from kvcourse.weights.fetch import fetched, find_source, stand_in

    source = find_source(MODEL)
    folder = source.path.parent
    free = psutil.disk_usage(next(str(path) for path in (folder, *folder.parents) if path.exists())).free
    needed = source.disk_needed
    have, need = f"{_gb(free)} free at {folder}", f"fetching the model needs {_gb(needed)}"
    if fetched(MODEL) or stand_in(MODEL) != MODEL:
        return Line("ok", "disk", f"{have}; nothing more is needed")
    if free >= needed:
        return Line("ok", "disk", f"{have}; {need}")
    return Line("fix", "disk", f"{have}, but {need}: make room, or set KVCOURSE_MODELS to a folder on another disk")


def kernel() -> Line:
    """Whether notebooks, which ask for the kernel `python3`, get the Python that has the course installed."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    try:
        command = KernelSpecManager().get_kernel_spec("python3").argv[0]
    except NoSuchKernel:
        return Line("fix", "kernel", f"python3 is missing: {sys.executable} -m pip install ipykernel")
    except RuntimeError:
        return Line("fix", "kernel", "Jupyter found no home folder: set HOME to a folder that you may write to")
    # Jupyter runs a bare "python" as the Python it runs in itself.
    if Path(command).parent in (Path("."), Path(sys.executable).parent):
        return Line("ok", "kernel", f"python3 starts {sys.executable}")
    text = f"python3 starts {command}, not {sys.executable}: {sys.executable} -m ipykernel install --sys-prefix"
    return Line("fix", "kernel", text)


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
