"""The course on a stick: everything to install it from, on computers without a network."""

import json
import re
import shutil
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

from packaging.utils import canonicalize_name

from kvcourse import __version__
from kvcourse.model_folder import as_text, place, write_whole
from kvcourse.notebooks.source import read_text
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
    else, and for an extra that the course does not have; `RuntimeError` when something cannot be had: then the stick
    stays incomplete, and says so when used.
    """
    require_extras(course, extras)
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


def require_extras(course: Path, extras: Iterable[str]) -> None:
    """Raise `ValueError` for an extra that the course does not provide: it would add no wheel, in silence."""
    provided = tomllib.loads(read_text(course / "pyproject.toml")).get("project", {}).get("optional-dependencies", {})
    for extra in extras:
        if canonicalize_name(extra) not in map(canonicalize_name, provided):
            allowed = ", ".join(sorted(provided)) or "none"
            raise ValueError(f"--extra {extra} is none of the extras that kvcourse has: {allowed}.")


def begin(folder: Path) -> dict[str, dict]:
    """The seats that a stick already has wheels for, `{name: contents}`; those of another version of the course do not
    count. Raises `ValueError` when the folder holds anything but a stick, or a stick whose contents cannot be read."""
    contents = folder / CONTENTS
    if contents.is_file():
        version, seats = read_contents(contents)
        if version == __version__:
            return seats
        print(f"this stick has kvcourse {version}: it is made anew with {__version__}")
    else:
        require_empty(folder)
        folder.mkdir(parents=True, exist_ok=True)
    write_whole(contents, as_text({"kvcourse": __version__, "seats": {}}))
    return {}


def read_contents(path: Path) -> tuple[str, dict[str, dict]]:
    """The version of the course on a stick, and its seats; none of another version, which may have kept them otherwise.
    Raises `ValueError` naming the file when it is damaged."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        version = known["kvcourse"]
        seats = known["seats"] if version == __version__ else {}
        for name, seat in seats.items():
            if not re.fullmatch(r".+-\d+\.\d+", name) or not isinstance(seat["bytes"], int):
                raise ValueError(f"{name!r} is no kind of seat, or has no size")
            if not all(isinstance(wheel, str) for wheel in seat["wheels"]):
                raise ValueError(f"the wheels of {name} have no names")
        return version, seats
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        said = f"{path} is damaged ({error}): the stick cannot be gone on with"
        raise ValueError(f"{said}. Empty {path.parent}, or give another folder.") from None


def place_model(folder: Path) -> None:
    """The chat model, fetched if it is not on this computer, its sum verified."""
    source = fetch(MODEL)
    folder.mkdir(exist_ok=True)
    target = folder / source.name
    if not target.is_file() or sha256(target) != sha256(source):
        place({source.name: lambda path: shutil.copyfile(source, path)}, folder)


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
    """What belongs to the stick: all but the sums, and what a system (`._` files of a Mac) or a killed program left."""
    inside = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / SUMS]
    return [path for path in inside if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of each part of the stick."""
    return {path.name: size(path) for path in sorted(folder.iterdir()) if not path.name.startswith(".")}


def size(path: Path) -> int:
    return sum(each.stat().st_size for each in files(path)) if path.is_dir() else path.stat().st_size


def unpacked(wheel: Path) -> int:
    with zipfile.ZipFile(wheel) as archive:
        return sum(member.file_size for member in archive.infolist())
