"""What the README promises: its commands are the ones that CI runs, and every lesson is in its table."""

import re
import tomllib
from itertools import chain
from pathlib import Path

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
    assert pins["torch"] == "2.13.0"
    assert not [name for name in pins if name.startswith(("nvidia", "triton"))]
