"""Every wheel that a kind of computer needs, its own and those of other kinds than this one.

pip downloads for another platform, but decides by *this* one which requirements hold (`pywinpty` is needed on Windows
only). So we read the wheels' own requirements, judge them by the target, and ask pip for what is missing, until nothing
is.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import BytesParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename

from kvcourse.workshop.target import Target

SCRATCH = ".downloading"  # beside the wheels; what pip has not finished is never among them
CPU_TORCH = "https://download.pytorch.org/whl/cpu"  # on Linux the package index has the build for GPUs, with gigabytes


def gather(root: str, target: Target, folder: Path, constraints: Path, torch_index: str = CPU_TORCH) -> list[Path]:
    """The wheels in `folder` that `root` needs on the target, `root` itself too; those that are missing are downloaded.

    Versions are those of `constraints`, the newest where it names none. Raises `RuntimeError` with pip's reason when a
    wheel cannot be had, and where two packages want versions that do not go together.
    """
    pins = read_pins(constraints)
    while True:
        held = wheels_for(target, folder)
        reached, missing = closure(Requirement(root), held, target, pins)
        if not missing:
            return reached
        print(f"  {target.name}: {', '.join(sorted(missing))}", flush=True)
        from_cpu_index = {"torch"} & set(missing) if target.system == "linux" and torch_index else set()
        for names, options in ((from_cpu_index, ["--index-url", torch_index]), (set(missing) - from_cpu_index, [])):
            if names:
                download([f"{name}{missing[name]}" for name in sorted(names)], target, folder, options)
        _, still = closure(Requirement(root), wheels_for(target, folder), target, pins)
        if unfit := sorted(set(still) & set(missing)):
            raise RuntimeError(f"pip brought no wheel that fits {target.name} for: {', '.join(unfit)}.")


def closure(
    root: Requirement, held: dict[str, list[tuple]], target: Target, pins: dict[str, SpecifierSet]
) -> tuple[list[Path], dict[str, SpecifierSet]]:
    """Which of the wheels `held` are needed, and which packages are missing, with the versions that will do."""
    wanted: dict[str, SpecifierSet] = {}
    todo, seen, found = [root], set(), {}
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        wanted[name] = wanted.get(name, pins.get(name, SpecifierSet())) & requirement.specifier
        fitting = [each for each in held.get(name, []) if wanted[name].contains(each[0], prereleases=True)]
        found[name] = max(fitting)[1] if fitting else None
        for extra in ("", *requirement.extras):
            if fitting and (found[name], extra) not in seen:
                seen.add((found[name], extra))
                todo += requirements(found[name], extra, target)
    missing = {name: wanted[name] for name, path in found.items() if path is None}
    return sorted(path for path in found.values() if path), missing


def requirements(wheel: Path, extra: str, target: Target) -> list[Requirement]:
    """What a wheel requires on the target: without extras, or only because of one."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [each for each in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", each)]
        lines = BytesParser().parsebytes(archive.read(name), headersonly=True).get_all("Requires-Dist", [])
    environment = target.environment | {"extra": extra}
    every = [Requirement(line) for line in lines]
    return [each for each in every if each.marker is None or each.marker.evaluate(environment)]


def wheels_for(target: Target, folder: Path) -> dict[str, list[tuple]]:
    """The wheels in `folder` that run on the target: `{package: [(version, path)]}`."""
    held: dict[str, list[tuple]] = {}
    fitting = target.tags
    for path in sorted(folder.glob("*.whl")):
        name, version, _, tags = parse_wheel_filename(path.name)
        if tags & fitting:
            held.setdefault(name, []).append((version, path))
    return held


def read_pins(constraints: Path) -> dict[str, SpecifierSet]:
    lines = [line.split("#")[0].strip() for line in constraints.read_text(encoding="utf-8").splitlines()]
    pins = [Requirement(line) for line in lines if line]
    return {canonicalize_name(pin.name): pin.specifier for pin in pins}


def download(wanted: list[str], target: Target, folder: Path, options: list[str] = ()) -> None:
    """Let pip bring these wheels, without what they require, and move them among the others once all are whole."""
    command = ["download", *wanted, "--no-deps", "--only-binary", ":all:", *options, "--dest", str(folder / SCRATCH)]
    command += ["--python-version", target.full_python, "--implementation", "cp"]
    for platform in target.platforms:
        command += ["--platform", platform]
    run_pip(command, folder)


def build(course: Path, folder: Path) -> Path:
    """The course's own wheel, built as pyproject.toml says."""
    [wheel] = run_pip(["wheel", str(course), "--no-deps", "--wheel-dir", str(folder / SCRATCH)], folder)
    return wheel


def run_pip(command: list[str], folder: Path) -> list[Path]:
    """Run pip, whose wheels go into `folder / SCRATCH`, and then to their places; return these. Raises `RuntimeError`
    when pip fails."""
    scratch = folder / SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    quiet = ["--quiet", "--progress-bar", "off", "--disable-pip-version-check", "--no-input", "--retries", "1"]
    done = subprocess.run([sys.executable, "-m", "pip", *command, *quiet], capture_output=True, text=True)
    try:
        if done.returncode:
            raise RuntimeError(f"pip could not {command[0]} for the stick: {reason(done.stderr)}")
        brought = sorted(scratch.glob("*.whl"))
        for path in brought:
            os.replace(path, folder / path.name)
        return [folder / path.name for path in brought]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def reason(said: str) -> str:
    """pip's last errors, in one line; where it only warned of a broken connection, that."""
    errors = (
        re.findall(r"ERROR: (.+)", re.sub(r" \(from versions: .*?\)", "", said))[-2:]
        or said.strip().splitlines()[-1:]
        or ["it gave no reason"]
    )
    broken = re.findall(r"connection broken by '(\w+)", said)
    return " ".join(errors) + (" (a network connection was refused or broken)" if broken else "")
