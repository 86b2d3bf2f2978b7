"""The kind of computer that wheels are meant for: which of them run there, and which requirements hold there."""

import platform
import sys
from typing import NamedTuple

from packaging import tags
from packaging.markers import default_environment

MACHINES = {"linux": ("x86_64", "aarch64"), "macos": ("arm64", "x86_64"), "windows": ("amd64", "arm64")}  # usual first
OLDEST_GLIBC, NEWEST_GLIBC = 17, 28  # 2.17 to 2.28: any Linux of the last years
OLDEST_MACOS = (14, 0)
PATCH = 9  # of Python on other seats: 3.11.9, 3.12.9
NAMES = {
    "linux": ("posix", "linux", "Linux"),
    "macos": ("posix", "darwin", "Darwin"),
    "windows": ("nt", "win32", "Windows"),
}


class Target(NamedTuple):
    """`system` and `machine` as in `MACHINES`; `python` is "3.12"."""

    system: str
    machine: str
    python: str

    @property
    def name(self) -> str:
        """How the stick, and its installer, call this kind of seat."""
        return f"{self.system}-{self.machine}-{self.python}"

    @property
    def full_python(self) -> str:
        """Its Python with the patch release, which some packages ask for: of other seats a late one is expected."""
        return platform.python_version() if self == this_computer() else f"{self.python}.{PATCH}"

    @property
    def platforms(self) -> list[str]:
        """The platform tags of wheels that run there, the most particular first."""
        if self == this_computer():
            return list(tags.platform_tags())
        if self.system == "macos":
            return list(tags.mac_platforms(OLDEST_MACOS, self.machine))
        if self.system == "windows":
            return [f"win_{self.machine}"]
        glibc = range(NEWEST_GLIBC, OLDEST_GLIBC - 1, -1)
        old = ["manylinux2010", "manylinux1"] if self.machine == "x86_64" else []
        families = [*(f"manylinux_2_{minor}" for minor in glibc), "manylinux2014", *old, "linux"]
        return [f"{family}_{self.machine}" for family in families]

    @property
    def tags(self) -> set[tags.Tag]:
        version = tuple(map(int, self.python.split(".")))
        interpreter = f"cp{version[0]}{version[1]}"
        own = tags.cpython_tags(version, platforms=self.platforms)
        return {*own, *tags.compatible_tags(version, interpreter, self.platforms)}

    @property
    def environment(self) -> dict[str, str]:
        """What the markers of requirements (`; sys_platform == "win32"`) ask about."""
        if self == this_computer():
            return default_environment()
        os_name, sys_platform, system = NAMES[self.system]
        machine = self.machine.upper() if self.system == "windows" else self.machine
        return default_environment() | {
            "os_name": os_name,
            "sys_platform": sys_platform,
            "platform_system": system,
            "platform_machine": machine,
            "platform_release": "",
            "platform_version": "",
            "python_version": self.python,
            "python_full_version": self.full_python,
            "implementation_version": self.full_python,
        }


def this_computer() -> Target:
    system = {"darwin": "macos", "win32": "windows"}.get(sys.platform, sys.platform)
    return Target(system, platform.machine().lower(), f"{sys.version_info[0]}.{sys.version_info[1]}")


def target(system: str | None = None, python: str | None = None) -> Target:
    """The target that a command line names: `system` is "windows" or "linux-aarch64" (default: this computer's),
    `python` "3.12" (default: this one's). Raises `ValueError` for anything else."""
    here = this_computer()
    python = python or here.python
    major, _, minor = python.partition(".")
    if (major, minor.isdecimal()) != ("3", True) or int(minor) < 11:
        raise ValueError(f"--python-version {python} must be 3.11 or later, such as 3.12.")
    if not system:
        return here._replace(python=python)
    known = [f"{name}-{machine}" for name, machines in MACHINES.items() for machine in machines]
    if system not in (*MACHINES, *known):
        raise ValueError(f"--platform {system} must be one of: {', '.join([*MACHINES, *known])}.")
    name, _, machine = system.partition("-")
    return Target(name, machine or MACHINES[name][0], python)
