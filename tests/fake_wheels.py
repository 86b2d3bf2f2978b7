"""Tiny wheels, for tests of what downloads and installs them."""

import zipfile
from pathlib import Path


def make_wheel(
    folder: Path, name: str, version: str = "1.0", requires=(), tag: str = "py3-none-any", files=None
) -> Path:
    """A wheel that pip installs, with these requirements and these files, `{path: text}`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-{tag}.whl"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
    metadata += ["Provides-Extra: peers\n"]
    members = {**(files or {f"{name}.py": ""}), f"{name}-{version}.dist-info/METADATA": "\n".join(metadata)}
    wheel = f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n"
    members[f"{name}-{version}.dist-info/WHEEL"] = wheel
    record = f"{name}-{version}.dist-info/RECORD"
    members[record] = "".join(f"{member},,\n" for member in [*members, record])
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in members.items():
            archive.writestr(member, text)
    return path
