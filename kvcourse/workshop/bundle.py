"""The course on a stick: everything to install it from, on computers without a network."""

import json
import os
import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path

from kvcourse import __version__
from kvcourse.model_folder import as_text, write_whole
from kvcourse.weights.fetch import fetch
from kvcourse.weights.shipped import sha256
from kvcourse.workshop.learner_copy import copy, require_empty
from kvcourse.workshop.slides import slides
from kvcourse.workshop.target import Target
from kvcourse.workshop.wheels import CPU_TORCH, build, gather

MODEL = "smollm2-135m"
SCRIPTS = tuple(Path(__file__).parent / "stick" / f for f in ("README.txt", "install.bat", "install.py", "install.sh"))
CONTENTS = "stick.json"  # for which seats, and the wheels of each
SUMS = "SHA256SUMS"  # written last: a stick without it is not complete


def bundle(
    course: Path,
    folder: Path,
    target: Target,
    extras: Iterable[str] = (),
    torch_index: str = CPU_TORCH,
    with_slides: bool = False,
) -> dict[str, int]:
    """Write everything that a seat of the kind `target` needs into `folder`; return the bytes of each part.

    A folder that was begun before is gone on with, and another kind of seat added to it: wheels that are there are not
    downloaded again, whole files never replaced by half ones. Raises `ValueError` for a folder that holds something
    else, `RuntimeError` when something cannot be had; then the stick stays incomplete, and says so when used.
    """
    seats = begin(folder)
    course = course.resolve()
    (folder / SUMS).unlink(missing_ok=True)
    wheels = folder / "wheels"
    wheels.mkdir(exist_ok=True)
    print("building the course's own wheel", flush=True)
    build(course, wheels)
    print("asking pip for wheels", flush=True)
    named = f"kvcourse[{','.join(extras)}]" if extras else "kvcourse"
    paths = gather(f"{named}=={__version__}", target, wheels, course / "constraints.txt", torch_index)
    print("copying the model and the course", flush=True)
    place_model(folder / "models")
    shutil.rmtree(folder / "course", ignore_errors=True)
    copy(course, folder / "course")
    if with_slides:
        slides(course, folder / "slides")
    seats[target.name] = {"wheels": [path.name for path in paths], "bytes": sum(map(unpacked, paths))}
    finish(folder, seats)
    return sizes(folder)


def begin(folder: Path) -> dict[str, dict]:
    """The seats that a stick already has wheels for, `{name: contents}`; those of another version of the course do not
    count. Raises `ValueError` when the folder holds anything but a stick."""
    contents = folder / CONTENTS
    if contents.is_file():
        known = json.loads(contents.read_text(encoding="utf-8"))
        if known.get("kvcourse") == __version__:
            return known["seats"]
        print(f"this stick has kvcourse {known.get('kvcourse')}: it is made anew with {__version__}")
    else:
        require_empty(folder)
        folder.mkdir(parents=True, exist_ok=True)
    write_whole(contents, as_text({"kvcourse": __version__, "seats": {}}))
    return {}


def place_model(folder: Path) -> None:
    """The chat model, fetched if it is not on this computer, its sum verified."""
    source = fetch(MODEL)
    folder.mkdir(exist_ok=True)
    for left in folder.glob(".*"):  # a program that was killed has left it
        left.unlink()
    target = folder / source.name
    if not target.is_file() or sha256(target) != sha256(source):
        half = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            shutil.copyfile(source, half)
            half.replace(target)
        finally:
            half.unlink(missing_ok=True)


def finish(folder: Path, seats: dict[str, dict]) -> None:
    """Take away wheels that no seat needs any more; write the scripts, the contents and, last, the sums."""
    wanted = {name for seat in seats.values() for name in seat["wheels"]}
    for path in (folder / "wheels").iterdir():
        if path.name not in wanted:
            path.unlink()
    write_whole(folder / CONTENTS, as_text({"kvcourse": __version__, "seats": seats}))
    versions = sorted({name.rsplit("-", 1)[1] for name in seats})
    needed = max(seat["bytes"] for seat in seats.values()) + size(folder / "course") + size(folder / "models")
    words = {
        "@KVCOURSE@": __version__,
        "@SEATS@": ", ".join(sorted(seats)),
        "@VERSIONS@": " ".join(versions),
        "@PYTHONS@": " ".join(f"python{version}" for version in versions),
        "@NEEDED@": f"{needed / 1e9:.1f}",
    }
    for script in SCRIPTS:
        text = script.read_text(encoding="utf-8")
        for word, value in words.items():
            text = text.replace(word, value)
        ends = "\r\n" if script.suffix in (".bat", ".txt") else "\n"
        write_whole(folder / script.name, text.replace("\n", ends).encode())
    lines = [f"{sha256(path)}  {path.relative_to(folder).as_posix()}" for path in files(folder)]
    write_whole(folder / SUMS, ("\n".join(lines) + "\n").encode())


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / SUMS)


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of each part of the stick."""
    return {path.name: size(path) for path in sorted(folder.iterdir())}


def size(path: Path) -> int:
    return sum(each.stat().st_size for each in files(path)) if path.is_dir() else path.stat().st_size


def unpacked(wheel: Path) -> int:
    with zipfile.ZipFile(wheel) as archive:
        return sum(member.file_size for member in archive.infolist())
