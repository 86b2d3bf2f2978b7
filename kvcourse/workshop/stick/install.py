"""Install the course from this folder, without a network: `python3 install.py [FOLDER]` (default: ~/kvcourse).

Checks every file of the stick against SHA256SUMS, makes a virtual environment in FOLDER/.venv, installs the wheels into
it with pip told that there is no package index, copies the course and the chat model, and runs `kvcourse doctor`. Safe
to run again: what is there is kept, above all notebooks that somebody has worked in. Needs nothing but Python.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

STICK = Path(__file__).resolve().parent
# Run by the installed Python, which knows where the model belongs; its arguments are this file and the model's.
PLACE_MODEL = """
import runpy, sys
from kvcourse.weights.fetch import find_source
runpy.run_path(sys.argv[1])["place"](sys.argv[2], find_source("smollm2-135m").path)
"""


def main(arguments):
    if len(arguments) > 1 or arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 2
    folder = Path(arguments[0] if arguments else "~/kvcourse").expanduser().absolute()
    try:
        print("Checking the stick ...", flush=True)
        verify(STICK)
        seat = this_seat(STICK)
        require_room(STICK, seat, folder)
        print(f"Installing into {folder} ...", flush=True)
        python = install(STICK, seat, folder / ".venv")
        kept = copy_course(STICK, folder)
        place_model(STICK, python)
    except Refused as error:
        print(f"install: {error}", file=sys.stderr)
        return 1
    if kept:
        print(f"{kept} files of the course were there already and are left as they were.")
    if subprocess.call([python, "-m", "kvcourse.cli.main", "doctor"], cwd=folder, env=settings()):
        print("install: kvcourse doctor says above what is to be put right", file=sys.stderr)
        return 1
    print(f"\nInstalled. Now, and each time that you begin:\n\n    {start_line(folder)}\n")
    return 0


class Refused(Exception):
    """A reason not to install, in one sentence that says what to do."""


def verify(stick):
    """Compare every file with its sum. Raises `Refused` when one is missing or damaged, or the stick not complete."""
    if not (stick / "SHA256SUMS").is_file():
        raise Refused(
            "this stick is not complete: run `kvcourse workshop bundle` on it again, where there is a network"
        )
    for name, expected in listed(stick).items():
        path = stick / name
        if not path.is_file():
            raise Refused(f"{name} is missing on this stick: copy it again")
        if sha256(path) != expected:
            raise Refused(f"{name} is damaged on this stick: copy it again")


def listed(stick, part=""):
    """The sums of the stick's own files in `part`, by their names. Whatever else lies in its folders is not the
    course's: a Mac puts a `._` file beside each file that it copies."""
    lines = (stick / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    sums = {name: expected for expected, _, name in (line.partition("  ") for line in lines)}
    return {name: expected for name, expected in sums.items() if name.startswith(part)}


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def this_seat(stick):
    """What the stick has for this computer and Python. Raises `Refused`, naming what there is, when it has nothing."""
    system = {"darwin": "macos", "win32": "windows"}.get(sys.platform, sys.platform)
    name = f"{system}-{platform.machine().lower()}-{sys.version_info[0]}.{sys.version_info[1]}"
    seats = json.loads((stick / "stick.json").read_text(encoding="utf-8"))["seats"]
    if name not in seats:
        raise Refused(
            f"this stick was made for {', '.join(sorted(seats))} (the last number is Python's); this is {name}"
        )
    return seats[name]


def require_room(stick, seat, folder):
    """Raise `Refused` unless the disk has room for what the wheels unpack to, the course and the model."""
    needed = sum((stick / name).stat().st_size for part in ("course/", "models/") for name in listed(stick, part))
    for wheel in seat["wheels"]:
        with zipfile.ZipFile(stick / "wheels" / wheel) as archive:
            needed += sum(member.file_size for member in archive.infolist())
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise Refused(f"{needed / 1e9:.1f} GB are needed in {folder}, and {free / 1e9:.1f} GB are free: make room")


def install(stick, seat, environment):
    """Install this seat's wheels into a virtual environment; return its Python. Raises `Refused` when that fails."""
    scripts, suffix = ("Scripts", ".exe") if os.name == "nt" else ("bin", "")
    python = str(environment / scripts / f"python{suffix}")
    hint = " (on Debian and Ubuntu: apt install python3-venv)" if sys.platform == "linux" else ""
    run([sys.executable, "-m", "venv", str(environment)], f"Python could not make {environment}{hint}")
    wheels = [str(stick / "wheels" / name) for name in seat["wheels"]]
    pip = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", *wheels]
    run(pip, "pip could not install the wheels")
    run([python, "-m", "pip", "check", "--disable-pip-version-check"], "the installed packages do not fit together")
    return python


def settings():
    """The environment of every program that is started here: none of the user's settings for Python and pip, no way to
    a network through pip, and UTF-8 on Windows too, so that what a program prints is read as it was meant."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    return {**clean, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PYTHONUTF8": "1"}


def run(command, failure):
    """Run a command. Raises `Refused` with what it printed when it fails."""
    said = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8", "errors": "replace"}
    done = subprocess.run(command, env=settings(), **said)
    if done.returncode:
        raise Refused(f"{failure}:\n{done.stdout.strip()}")


def copy_course(stick, folder):
    """Copy what is not there yet; return how many files were, and are left alone: they may be somebody's work."""
    kept = 0
    for name in listed(stick, "course/"):
        target = folder / name[len("course/") :]
        if target.exists():
            kept += 1
        else:
            copy_whole(stick / name, target)
    return kept


def place_model(stick, python):
    """Let the installed course put the chat model where it looks for it."""
    [name] = listed(stick, "models/")
    run([python, "-c", PLACE_MODEL, __file__, str(stick / name)], "the chat model could not be copied")


def place(model, target):
    """Copy the model to its place, unless it is there."""
    model, target = Path(model), Path(target)
    if not target.is_file() or target.stat().st_size != model.stat().st_size:
        copy_whole(model, target)


def copy_whole(path, target):
    """Copy beside the target and then move, so that an interrupted copy is never taken for a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    half = target.with_name(f".{target.name}.half")
    shutil.copyfile(path, half)
    os.replace(half, target)


def start_line(folder):
    if os.name == "nt":
        return f'cd /d "{folder}" && .venv\\Scripts\\kvcourse lab'
    return f"cd '{folder}' && .venv/bin/kvcourse lab"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
