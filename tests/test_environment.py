"""environment.yml, for conda and Binder, says what pyproject.toml says, and nothing besides."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PYPI_NAMES = {"pytorch": "torch"}  # conda-forge calls some packages by another name


def faults(text: str) -> list[str]:
    environment = yaml.safe_load(text)
    asked = [each for each in environment["dependencies"] if isinstance(each, str)]
    by_pip = [each["pip"] for each in environment["dependencies"] if isinstance(each, dict)]
    found = []
    if environment["name"] != PROJECT["name"] or environment["channels"] != ["conda-forge"]:
        found.append("name or channels")
    if by_pip != [["-e ."]] or "pip" not in asked:
        found.append("pip must install this folder, and only that")
    return found + [fault for each in asked if each != "pip" for fault in unlike_pyproject(each)]


def unlike_pyproject(asked: str) -> list[str]:
    if asked.startswith("python="):
        allowed = Requirement(f"python{PROJECT['requires-python']}").specifier
        version = asked.removeprefix("python=")
        return [] if version.count(".") == 1 and allowed.contains(version) else [asked]
    requirements = {each.name: each for each in map(Requirement, PROJECT["dependencies"])}
    name = Requirement(asked).name
    wanted = requirements.get(PYPI_NAMES.get(name, name))
    return [] if wanted and wanted.specifier == Requirement(asked).specifier else [asked]


def test_it_agrees_with_pyproject():
    assert faults((ROOT / "environment.yml").read_text(encoding="utf-8")) == []


def test_readmes_link_to_binder_opens_a_notebook_of_this_repository():
    repository = PROJECT["urls"]["Repository"].removeprefix("https://github.com/")
    first = "notebooks/00_start_here.ipynb"
    links = re.findall(r"https://mybinder\.org/[^)]*", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert links == [f"https://mybinder.org/v2/gh/{repository}/main?labpath={first}"]
    assert (ROOT / first).is_file()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("python=3.12", "python=3.10"),
        ("python=3.12", "python>=3.11"),  # repo2docker would begin with 3.10, its default
        ("pytorch>=2.5", "pytorch>=2.4"),
        ("pytorch>=2.5", "pytorch==2.5"),
        ("pytorch>=2.5", "pandas"),
        ("- -e .", "- -e .\n      - pandas"),
        ("  - pip\n", ""),
        ("conda-forge", "defaults"),
    ],
)
def test_a_difference_is_seen(old, new):
    text = (ROOT / "environment.yml").read_text(encoding="utf-8")
    assert old in text
    assert len(faults(text.replace(old, new, 1))) == 1
