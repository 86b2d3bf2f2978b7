"""`kvcourse workshop bundle`: a stick from which computers without a network install the course.

Most of it runs on tiny wheels and a package index that is a folder; the `slow` test makes the real stick and installs
it with the network refused.
"""

import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from fake_wheels import make_wheel
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

from kvcourse import __version__
from kvcourse.cli.main import main as kvcourse
from kvcourse.model_folder import APART
from kvcourse.workshop import bundle as stick
from kvcourse.workshop import wheels
from kvcourse.workshop.target import Target, target, this_computer

ROOT = Path(__file__).parent.parent
INSTALLER = ROOT / "kvcourse" / "workshop" / "stick" / "install.py"
HERE = this_computer()
WINDOWS = Target("windows", "amd64", "3.12")
FETCH = "class Source: path = {path!r}\ndef find_source(name): return Source\n"
COMMAND = "import sys; print('doctor says ok:', *sys.argv[1:])"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index in a folder, which is all that pip may use."""
    folder = tmp_path / "index"
    make_wheel(folder, "alpha", requires=["delta>=2"])
    make_wheel(folder, "winpty", tag="cp312-cp312-win_amd64")
    make_wheel(folder, "gamma")
    make_wheel(folder, "delta", "2.0")
    make_wheel(folder, "delta", "3.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def course(tmp_path, monkeypatch, index):
    """A small course, whose wheel is not built but made here, and a chat model of 5 bytes."""
    root = tmp_path / "course"
    (root / "notebooks").mkdir(parents=True)
    shutil.copy(ROOT / "notebooks" / "00_start_here.ipynb", root / "notebooks")
    (root / "pyproject.toml").write_text("")
    (root / "constraints.txt").write_text("# pinned\ndelta==2.0\n")
    (tmp_path / "here").mkdir()
    model = tmp_path / "here" / "chat.gguf"
    model.write_bytes(b"model")

    def build(course, folder):
        seats = tmp_path / "seat" / "models" / "chat.gguf"
        files = {"kvcourse/__init__.py": "", "kvcourse/weights/fetch.py": FETCH.format(path=str(seats))}
        needs = ["alpha", 'winpty; sys_platform == "win32"', 'gamma; extra == "peers"']
        return make_wheel(folder, "kvcourse", __version__, needs, files=files | {"kvcourse/cli/main.py": COMMAND})

    monkeypatch.setattr(stick, "build", build)
    monkeypatch.setattr(stick, "fetch", lambda name: model)
    monkeypatch.chdir(root)
    return root


def names(paths):
    return [path.name for path in paths]


# --- which wheels ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wheel", "fits"),
    [
        ("numpy-2.4.6-cp319-cp319-win_amd64.whl", ["windows"]),
        ("torch-2.13.0-cp319-none-macosx_11_0_arm64.whl", ["macos"]),
        ("torch-2.13.0+cpu-cp319-cp319-manylinux_2_28_x86_64.whl", ["linux"]),
        ("psutil-7.2.2-cp36-abi3-manylinux2014_aarch64.manylinux_2_17_aarch64.whl", ["linux-aarch64"]),
        ("numpy-2.4.6-cp319-cp319-musllinux_1_2_x86_64.whl", []),
        ("numpy-2.4.6-cp319-cp319-manylinux_2_39_x86_64.whl", []),
        ("numpy-2.4.6-cp319-cp319-macosx_15_0_arm64.whl", []),
        ("numpy-2.4.6-cp318-cp318-win_amd64.whl", []),
        ("six-1.17.0-py2.py3-none-any.whl", ["windows", "macos", "linux", "linux-aarch64"]),
    ],
)
def test_which_wheels_run_where(wheel, fits):
    """Names of wheels that the index has, for a Python that no computer has yet, so that none of these is this one."""
    _, _, _, tags = parse_wheel_filename(wheel)
    assert [s for s in ("windows", "macos", "linux", "linux-aarch64") if tags & target(s, "3.19").tags] == fits


@pytest.mark.parametrize(
    ("marker", "windows", "macos"),
    [
        ('sys_platform == "win32" and os_name == "nt"', True, False),
        ('platform_system == "Darwin" and platform_machine == "arm64"', False, True),
        ('platform_machine == "AMD64"', True, False),
        ('python_version < "3.13" and python_full_version >= "3.12.5"', True, True),
        ('python_version < "3.12"', False, False),
    ],
)
def test_which_requirements_hold_where(marker, windows, macos):
    assert Marker(marker).evaluate(WINDOWS.environment) == windows
    assert Marker(marker).evaluate(target("macos", "3.12").environment) == macos


def test_this_computer_is_what_python_says():
    assert HERE.python == ".".join(platform.python_version_tuple()[:2])
    assert HERE.full_python == platform.python_version()
    assert target() == HERE and target(python="3.13") == HERE._replace(python="3.13")
    assert HERE.platforms[0] in {tag.platform for tag in HERE.tags}


@pytest.mark.parametrize(
    ("system", "python", "words"),
    [
        ("beos", None, "--platform beos must be one of: linux, macos, windows, linux-x86_64"),
        ("windows-x86_64", None, "must be one of"),
        (None, "3.10", "must be 3.11 or later"),
        (None, "4", "must be 3.11 or later"),
        (None, "3.12.1", "must be 3.11 or later, such as 3.12"),
    ],
)
def test_kinds_of_seats_that_there_are_not(system, python, words):
    with pytest.raises(ValueError, match=words):
        target(system, python)


def test_wheels_of_another_system_and_what_only_it_needs(course, tmp_path, monkeypatch):
    """pip alone would judge `sys_platform` by this computer, and leave winpty out."""
    folder = tmp_path / "wheels"
    stick.build(course, folder)
    found = wheels.gather("kvcourse", WINDOWS, folder, course / "constraints.txt")
    own = f"kvcourse-{__version__}-py3-none-any.whl"
    assert names(found) == ["alpha-1.0-py3-none-any.whl", "delta-2.0-py3-none-any.whl", own, found[-1].name]
    assert found[-1].name == "winpty-1.0-cp312-cp312-win_amd64.whl"
    found = wheels.gather("kvcourse[peers]", HERE, folder, course / "constraints.txt")
    assert names(found) == [*names(found)[:2], "gamma-1.0-py3-none-any.whl", own]
    assert not (folder / wheels.SCRATCH).exists()

    monkeypatch.setattr(wheels, "run_pip", None)  # all is there: pip is not asked again
    assert names(wheels.gather("kvcourse[peers]", HERE, folder, course / "constraints.txt")) == names(found)
    (course / "constraints.txt").write_text("delta==3.0\n")
    with pytest.raises(TypeError):  # it would be asked for the other version
        wheels.gather("kvcourse", HERE, folder, course / "constraints.txt")


def test_a_wheel_that_cannot_be_had(course, index, tmp_path):
    folder = tmp_path / "wheels"
    stick.build(course, folder)
    (index / "delta-2.0-py3-none-any.whl").unlink()
    with pytest.raises(RuntimeError, match="pip could not download for the stick: .*No matching distribution.*delta"):
        wheels.gather("kvcourse", HERE, folder, course / "constraints.txt")
    assert not (folder / wheels.SCRATCH).exists()


def test_torch_for_linux_comes_from_the_index_of_builds_for_cpus(course, tmp_path, monkeypatch):
    asked = []

    def download(wanted, kind, folder, options=()):
        asked.append((wanted, [*options]))
        for each in map(Requirement, wanted):
            make_wheel(folder, each.name)

    monkeypatch.setattr(wheels, "download", download)
    make_wheel(tmp_path / "wheels", "kvcourse", requires=["torch>=1", "alpha"])
    (course / "constraints.txt").write_text("")
    linux = Target("linux", "aarch64", "3.13")
    wheels.gather("kvcourse", linux, tmp_path / "wheels", course / "constraints.txt", "https://example.org/cpu")
    assert asked == [(["torch>=1"], ["--index-url", "https://example.org/cpu"]), (["alpha"], [])]


# --- the stick ------------------------------------------------------------------------------------------------


def test_a_stick_for_two_kinds_of_seats(course, tmp_path, capsys):
    folder = tmp_path / "stick"
    assert kvcourse(["workshop", "bundle", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "MB  wheels" in out and "MB  in all" in out and "The stick is complete" in out
    sums = (folder / "SHA256SUMS").read_text().splitlines()
    listed = {line.split("  ")[1]: line.split("  ")[0] for line in sums}
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert set(listed) == there - {"SHA256SUMS"}
    assert listed["models/chat.gguf"] == hashlib.sha256(b"model").hexdigest()
    top = {
        "README.txt",
        "SHA256SUMS",
        "course",
        "install.bat",
        "install.py",
        "install.sh",
        "models",
        "stick.json",
        "wheels",
    }
    assert set(names(folder.iterdir())) == top and "course/notebooks/00_start_here.ipynb" in there
    script = (folder / "install.sh").read_text()
    assert "@" not in script.replace('"$@"', "") and f"python{HERE.python}" in script
    assert b"\r\n" in (folder / "install.bat").read_bytes()

    (folder / "wheels" / "stale-1.0-py3-none-any.whl").write_bytes(b"")
    with pytest.raises(wheels.zipfile.BadZipFile):  # an empty file is never taken for a wheel that is needed
        wheels.requirements(folder / "wheels" / "stale-1.0-py3-none-any.whl", "", HERE)
    assert kvcourse(["workshop", "bundle", str(folder), "--platform", "windows", "--python-version", "3.12"]) == 0
    seats = json.loads((folder / "stick.json").read_text())["seats"]
    assert set(seats) == {HERE.name, WINDOWS.name}
    assert "winpty-1.0-cp312-cp312-win_amd64.whl" in seats[WINDOWS.name]["wheels"]
    wanted = {name for seat in seats.values() for name in seat["wheels"]}
    assert {path.name for path in (folder / "wheels").iterdir()} == wanted


def test_a_stick_that_broke_off_says_so_and_is_gone_on_with(course, tmp_path, monkeypatch, capsys):
    def refused(*args):
        raise wheels.subprocess.SubprocessError("the network went away")

    folder = tmp_path / "stick"
    with monkeypatch.context() as patch, pytest.raises(wheels.subprocess.SubprocessError):
        patch.setattr(stick, "gather", refused)
        kvcourse(["workshop", "bundle", str(folder)])
    assert install(folder, tmp_path / "seat").stderr.startswith("install: this stick is not complete")
    (folder / "models" / APART).mkdir(parents=True)
    (folder / "models" / APART / "chat.gguf").write_bytes(b"mo")  # of a program that was killed
    assert kvcourse(["workshop", "bundle", str(folder)]) == 0
    assert names((folder / "models").iterdir()) == ["chat.gguf"]


def test_a_folder_that_holds_something_else_is_refused(course, tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "thesis.txt").write_text("")
    assert kvcourse(["workshop", "bundle", str(tmp_path / "docs")]) == 1
    assert "is not empty" in capsys.readouterr().err
    assert names((tmp_path / "docs").iterdir()) == ["thesis.txt"]


def test_an_extra_that_the_course_does_not_have(course, tmp_path, monkeypatch, capsys):
    (course / "pyproject.toml").write_text("[project.optional-dependencies]\nsite = []\npeer_s = []\n")
    with monkeypatch.context() as patch:
        patch.setattr(stick, "build", None)  # nothing is begun
        assert kvcourse(["workshop", "bundle", str(tmp_path / "stick"), "--extra", "nope"]) == 1
    assert "--extra nope is none of the extras that kvcourse has: peer_s, site." in capsys.readouterr().err
    assert not (tmp_path / "stick").exists()
    assert kvcourse(["workshop", "bundle", str(tmp_path / "stick"), "--extra", "Peer-S"]) == 0  # as pip reads names


def test_what_a_mac_leaves_on_a_stick_does_not_become_part_of_it(course, tmp_path):
    folder = tmp_path / "stick"
    assert kvcourse(["workshop", "bundle", str(folder)]) == 0
    before = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    leave_as_a_mac(folder)
    assert kvcourse(["workshop", "bundle", str(folder)]) == 0
    listed = {line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text().splitlines()}
    assert listed == before - {"SHA256SUMS"}


def test_a_stick_of_another_version_is_made_anew(course, tmp_path, capsys):
    (tmp_path / "stick").mkdir()
    old = {"kvcourse": "0.0.1", "seats": {"linux-x86_64-3.9": {"wheels": ["old.whl"], "bytes": 1}}}
    (tmp_path / "stick" / "stick.json").write_text(json.dumps(old))
    assert stick.begin(tmp_path / "stick") == {}
    assert "this stick has kvcourse 0.0.1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "seats",
    [None, "", "{", "[]", "{}", '"seats": 5', '"seats": {"linux-x86_64-3.9": {"bytes": 1}}']
    + ['"seats": {"linux": {"wheels": [], "bytes": 1}}', '"seats": {"linux-3.9": {"wheels": [1], "bytes": 1}}'],
)
def test_a_stick_with_damaged_contents_is_refused_by_name(tmp_path, seats):
    contents = tmp_path / "stick.json"
    whole = f'{{"kvcourse": "{stick.__version__}"' + (f", {seats}}}" if seats else "}")
    contents.write_text(whole if seats is None or seats.startswith('"') else seats)
    before = contents.read_text()
    with pytest.raises(ValueError, match=r"stick.json is damaged .*: the stick cannot be gone on with. Empty"):
        stick.begin(tmp_path)
    assert contents.read_text() == before


# --- installing -----------------------------------------------------------------------------------------------


def load_installer():
    spec = importlib.util.spec_from_file_location("installer", INSTALLER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def install(folder: Path, seat: Path, *arguments, **environment):
    seat.mkdir(exist_ok=True)
    if not (folder / "install.py").exists():  # on a stick that broke off
        shutil.copy(INSTALLER, folder)
    command = [sys.executable, str(folder / "install.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=offline_home(seat) | environment)


def offline_home(seat: Path) -> dict[str, str]:
    """The environment of a user whose home is `seat` and whose network leads nowhere."""
    users = ("PIP_", "PYTHON", "KVCOURSE_", "XDG_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(users)}
    nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    return (
        clean | nowhere | {"no_proxy": "127.0.0.1", **dict.fromkeys(("HOME", "USERPROFILE", "LOCALAPPDATA"), str(seat))}
    )


def test_installing_without_a_network(course, tmp_path):
    folder, seat = tmp_path / "stick", tmp_path / "seat"
    assert kvcourse(["workshop", "bundle", str(folder)]) == 0
    done = install(folder, seat, str(seat / "course"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "doctor says ok: doctor" in done.stdout and "lab" in done.stdout.splitlines()[-2]
    assert (seat / "models" / "chat.gguf").read_bytes() == b"model"
    notebook = seat / "course" / "notebooks" / "00_start_here.ipynb"
    assert notebook.read_bytes() == (course / "notebooks" / "00_start_here.ipynb").read_bytes()


@pytest.fixture
def small_stick(tmp_path):
    """A stick without wheels, whole as far as its sums say."""
    folder = tmp_path / "small"
    for name in ("course/notebooks/a.ipynb", "models/chat.gguf", "README.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    (folder / "wheels").mkdir()
    stick.finish(folder, {HERE.name: {"wheels": [], "bytes": 0}})
    return folder


def test_a_damaged_or_missing_file_is_named(small_stick):
    installer = load_installer()
    installer.verify(small_stick)
    with open(small_stick / "models" / "chat.gguf", "r+b") as file:
        file.write(b"M")
    with pytest.raises(installer.Refused, match="models/chat.gguf is damaged"):
        installer.verify(small_stick)
    (small_stick / "course" / "notebooks" / "a.ipynb").unlink()
    with pytest.raises(installer.Refused, match="course/notebooks/a.ipynb is missing"):
        installer.verify(small_stick)


def test_a_computer_that_the_stick_was_not_made_for(small_stick, monkeypatch):
    installer = load_installer()
    assert installer.this_seat(small_stick) == {"wheels": [], "bytes": 0}
    monkeypatch.setattr(installer.sys, "version_info", (3, 99, 0))
    with pytest.raises(installer.Refused, match=f"was made for {HERE.name} .*; this is .*-3.99"):
        installer.this_seat(small_stick)


def test_a_full_disk_is_seen_before_anything_is_written(small_stick, tmp_path, monkeypatch):
    installer = load_installer()
    Usage = namedtuple("Usage", "free")
    monkeypatch.setattr(installer.shutil, "disk_usage", lambda place: Usage(3))
    with pytest.raises(installer.Refused, match="0.0 GB are free: make room"):
        installer.require_room(small_stick, {"wheels": []}, tmp_path / "new" / "course")
    assert not (tmp_path / "new").exists()


def test_work_that_is_there_is_left_alone(small_stick, tmp_path):
    installer = load_installer()
    assert installer.copy_course(small_stick, tmp_path / "mine") == 0
    (tmp_path / "mine" / "notebooks" / "a.ipynb").write_text("my answers")
    assert installer.copy_course(small_stick, tmp_path / "mine") == 1
    assert (tmp_path / "mine" / "notebooks" / "a.ipynb").read_text() == "my answers"


def leave_as_a_mac(folder: Path) -> None:
    """Beside each file its twin with a Mac's notes, and what the Finder keeps, as on any disk that is not a Mac's."""
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        path.with_name(f"._{path.name}").write_bytes(b"\0\5\x16\7")
    (folder / ".DS_Store").write_bytes(b"Bud1")


def test_a_stick_that_a_mac_has_copied(small_stick, tmp_path, monkeypatch):
    installer = load_installer()
    leave_as_a_mac(small_stick)
    monkeypatch.setenv("KVCOURSE_MODELS", str(tmp_path / "models"))
    installer.verify(small_stick)
    assert installer.copy_course(small_stick, tmp_path / "mine") == 0
    installer.place_model(small_stick, sys.executable)
    assert names(path for path in (tmp_path / "mine").rglob("*") if path.is_file()) == ["a.ipynb"]
    [model] = (tmp_path / "models").iterdir()
    assert model.read_bytes() == b"models/chat.gguf"


@pytest.mark.parametrize("environment", ["the user's", "none of the user's"])
def test_a_user_whose_name_is_not_ascii(small_stick, tmp_path, monkeypatch, environment):
    """The child prints in the code page of Windows, whether its environment was cleaned or not."""
    installer = load_installer()
    if environment == "the user's":
        monkeypatch.setattr(installer, "settings", lambda: dict(os.environ), raising=False)
    monkeypatch.setenv("PYTHONIOENCODING", "cp1252")
    monkeypatch.setenv("KVCOURSE_MODELS", str(tmp_path / "Jürgen" / "models"))
    installer.place_model(small_stick, sys.executable)
    [model] = (tmp_path / "Jürgen" / "models").iterdir()
    assert model.read_bytes() == b"models/chat.gguf"
    with pytest.raises(installer.Refused, match="no way:"):
        installer.run([sys.executable, "-c", "import sys; sys.exit('ü')"], "no way")


def test_settings_of_the_user_reach_no_child(small_stick, tmp_path, monkeypatch):
    """Neither the one that puts the model in its place nor `kvcourse doctor`."""
    installer, found = load_installer(), []
    monkeypatch.setattr(installer, "STICK", small_stick)
    monkeypatch.setattr(installer, "install", lambda stick, seat, environment: sys.executable)
    monkeypatch.setattr(installer.subprocess, "call", lambda command, **options: found.append(options["env"]))
    really = installer.subprocess.run
    monkeypatch.setattr(
        installer.subprocess, "run", lambda command, **o: found.append(o["env"]) or really(command, **o)
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "somewhere else"))
    monkeypatch.setenv("PIP_INDEX_URL", "https://example.org")
    monkeypatch.setenv("KVCOURSE_MODELS", str(tmp_path / "models"))
    assert installer.main([str(tmp_path / "mine")]) == 0
    assert len(found) == 2
    for env in found:
        own = {name: value for name, value in env.items() if name.startswith(("PIP_", "PYTHON"))}
        assert own == {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PYTHONUTF8": "1"}


@pytest.mark.slow
def test_the_real_stick_with_the_network_refused(tmp_path, monkeypatch):
    """Installed from the stick alone, the course finds itself ready, and a notebook runs on the chat model."""
    monkeypatch.chdir(ROOT)
    folder, seat = tmp_path / "stick", tmp_path / "seat"
    assert kvcourse(["workshop", "bundle", str(folder)]) == 0
    done = install(folder, seat)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok    model     smollm2-135m" in done.stdout
    scripts = seat / "kvcourse" / ".venv" / ("Scripts" if os.name == "nt" else "bin")
    for command in (["doctor"], ["run", "00"]):
        run = [str(scripts / "kvcourse"), *command]
        done = subprocess.run(run, cwd=seat / "kvcourse", env=offline_home(seat), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "00_start_here" in done.stdout
