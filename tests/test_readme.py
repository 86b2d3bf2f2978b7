"""What the README promises: its commands are the ones that CI runs, and every lesson is in its table."""

import re
import tomllib
from itertools import chain
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TEST_COMMAND = ['pip install -c constraints.txt -e ".[test]"', "pytest"]


def commands() -> list[list[str]]:
    """The commands of the README's fenced blocks without a language, split at &&."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
    lines = [line for language, block in blocks if not language for line in block.strip().splitlines()]
    return [[part.strip() for part in line.split("&&")] for line in lines]


def test_the_two_commands():
    assert commands() == [["pip install -c constraints.txt -e .", "kvcourse lab"], TEST_COMMAND]


def test_ci_and_workflow_run_the_readmes_test_command():
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert lines[-2:] == TEST_COMMAND
    assert f"run: {' && '.join(TEST_COMMAND)}" in (ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8")


def test_every_lesson_is_in_the_table_and_every_link_leads_somewhere():
    linked = re.findall(r"\]\(([^)#:]+)\)", README)
    assert all((ROOT / link).exists() for link in linked), linked
    lessons = {f"notebooks/{path.stem}.ipynb" for path in (ROOT / "notebooks" / "src").glob("*.py")}
    pages = {"notebooks/glossary.ipynb", "notebooks/bibliography.ipynb"}
    assert lessons | pages == {link for link in linked if link.endswith(".ipynb")}


def test_every_room_is_on_the_map():
    """kvcourse/README.md names each module and folder of the package."""
    package = ROOT / "kvcourse"
    text = (package / "README.md").read_text(encoding="utf-8")
    rooms = {path.stem for path in package.glob("*.py")} | {path.parent.name for path in package.glob("*/__init__.py")}
    missing = [room for room in rooms - {"__init__"} if not re.search(rf"`{room}/?`", text)]
    assert not missing


def torches(texts: dict[str, str]) -> dict[str, set[str]]:
    """The versions of PyTorch that each text has pip install."""
    return {name: set(re.findall(r"torch==([\d.]*\d)", text)) for name, text in texts.items()}


def test_the_small_build_of_pytorch_is_that_of_the_constraints():
    """It is installed first, by its number, from an index that has not the other pins."""
    [pin] = torches({"": (ROOT / "constraints.txt").read_text(encoding="utf-8")})[""]
    names = ["README.md", ".github/workflows/site.yml"]
    assert torches({name: (ROOT / name).read_text(encoding="utf-8") for name in names}) == dict.fromkeys(names, {pin})
    places = [*ROOT.glob("notebooks/instructor/*.md"), *ROOT.glob("data/*.md"), *(ROOT / ".ci").iterdir()]
    assert not [path for path in places if torches({"": path.read_text(encoding="utf-8")})[""] - {pin}]
    assert torches({"x": f"torch=={pin} torch==2.0.1"})["x"] == {pin, "2.0.1"}


def test_the_workflow_of_the_tests_can_be_started_by_hand():
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        triggers = yaml.safe_load(path.read_text(encoding="utf-8"))[True]  # YAML 1.1 reads the key `on` as true
        assert "workflow_dispatch" in triggers, path


def test_each_marker_is_registered_once(pytestconfig):
    names = [re.match(r"\w+", line)[0] for line in pytestconfig.getini("markers")]
    assert names.count("slow") == names.count("smollm2") == 1


def test_constraints_fit_the_lower_bounds_and_pin_no_platform_package():
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.lower().replace("_", "-").split("==") for line in lines if line and not line.startswith("#"))
    wanted = map(Requirement, chain(project["dependencies"], *project["optional-dependencies"].values()))
    for requirement in wanted:
        if requirement.name == "kvcourse":  # other groups of its own
            continue
        assert requirement.specifier.contains(pins[requirement.name.lower().replace("_", "-")]), requirement
    assert not [name for name in pins if name.startswith(("nvidia", "triton"))]
