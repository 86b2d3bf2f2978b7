"""The instructor's pages: one for each notebook, in one form, naming only what exists, and routes whose minutes add up.

A rule takes a page's name and text and returns what it finds wrong; each is also seen to say no.
"""

import argparse
import ast
import json
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from kvcourse.cli import workshop
from kvcourse.workshop import hub, minutes, quotes, routes

ROOT = Path(__file__).resolve().parent.parent
KIT = ROOT / "notebooks" / "instructor"
SOURCES = sorted((ROOT / "notebooks" / "src").glob("*.py"))
HEADINGS = [
    "Aim",
    "The question to open with",
    "Typical wrong ideas",
    "What to show live",
    "Where people get stuck",
    "Exit questions",
]


def text_of(name):
    return (KIT / f"{name}.md").read_text(encoding="utf-8")


def flat(text):
    """One line, so that a name that is broken over two is found."""
    return " ".join(text.split())


def part(text, heading):
    """What stands under a heading."""
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return found[1] if found else ""


@cache
def sections(number):
    return [section for section in all_sections() if section.notebook[:2] == number]


@cache
def all_sections():
    return minutes.sections(ROOT)


@cache
def measured():
    return quotes.measured(ROOT)


@cache
def said_by_checkers():
    """Every sentence in the source of the checkers, joined where it is written in pieces."""
    found = []
    for path in (ROOT / "kvcourse" / "check").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


# --- the rules -----------------------------------------------------------------------------------------------


def headings_in_order(name, text):
    found = re.findall(r"^## (.+)$", text, re.M)
    return [] if found == HEADINGS and re.match(rf"# {name[:2]} \S", text) else [f"title or headings: {found}"]


def sections_exist(name, text):
    """Sections are named in italics, after that word; what else stands in italics begins small."""
    known = {section.title for section in sections(name[:2])}
    named = re.findall(r"(?<!\*)\*([A-Z0-9][^*]+)\*(?!\*)", flat(text))
    after = re.findall(r"[Ss]ection \*([^*]+)\*", flat(text))
    wrong = [title for title in {*named, *after} - known if title not in ("Kernel", "Shut Down All Kernels")]
    return [f"no section {title!r}" for title in wrong] + ["names fewer than three sections"] * (len(set(after)) < 3)


def exercises_are_all_there(name, text):
    """Those of the notebook, in bold, where people get stuck."""
    known = {exercise for section in sections(name[:2]) for exercise in section.exercises}
    named = set(re.findall(r"\*\*(\w+)\*\*", part(text, "Where people get stuck")))
    return [f"no exercise {wrong!r}" for wrong in named - known] + [f"{left!r} is missing" for left in known - named]


def checkers_say_so(name, text):
    """What a checker is said to say, it says."""
    said = re.findall(r'(?:says|fault:) "([^"]+)"', flat(text))
    wrong = [words for words in said if not any(words in sentence for sentence in said_by_checkers())]
    return [f"no checker says {words!r}" for words in wrong] + ["quotes no checker"] * (not said)


def quotes_are_measured(name, text):
    """Every key has a number before it, which is about that of the worked notebook; new runs may move it a little."""
    faults = [
        f"no number before `{key}`" for key in {*quotes.KEY.findall(text)} - {key for key, _ in quotes.quoted(text)}
    ]
    for key, number in quotes.quoted(text):
        if key not in measured():
            faults.append(f"no worked notebook measures {key}")
            continue
        here, there = (float(value.replace(",", "")) for value in (number, measured()[key]))
        if here != there and not 0.5 <= here / there <= 2:
            faults.append(f"`{key}` is {measured()[key]} now: read what stands around it, then quotes.update(course)")
    return faults + ["quotes no measurement"] * (not quotes.quoted(text))


def links_resolve(name, text):
    links = re.findall(r"\]\(([^)#\s]+)", text)
    return [link for link in links if not link.startswith("https://") and not (KIT / link).exists()]


def questions_have_answers(name, text):
    asked = re.split(r"^\d\. ", part(text, "Exit questions"), flags=re.M)[1:]
    faults = [] if 3 <= len(asked) <= 5 else [f"{len(asked)} exit questions, not 3 to 5"]
    return faults + [f"no answer: {q[:40]}" for q in asked if not re.search(r"\?.*Answer: \S", q, re.S)]


def wrong_ideas_are_answered(name, text):
    """Each begins with what people say, and goes on."""
    ideas = re.split(r"^- ", part(text, "Typical wrong ideas"), flags=re.M)[1:]
    faults = [] if len(ideas) >= 4 else [f"only {len(ideas)} wrong ideas"]
    return faults + [f"not quoted and answered: {idea[:40]}" for idea in ideas if not re.match(r'".+?" \S', flat(idea))]


def is_one_or_two_screens(name, text):
    lines = len(text.splitlines())
    return [] if 40 <= lines <= 90 else [f"{lines} lines"]


RULES = [
    headings_in_order,
    sections_exist,
    exercises_are_all_there,
    checkers_say_so,
    quotes_are_measured,
    links_resolve,
    questions_have_answers,
    wrong_ideas_are_answered,
    is_one_or_two_screens,
]


# --- the real pages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_page_keeps_the_form(source, rule):
    assert rule(source.stem, text_of(source.stem)) == []


def test_every_notebook_has_a_page_and_every_page_a_notebook():
    pages = {path.stem for path in KIT.glob("[0-9]*.md")}
    assert pages == {path.stem for path in SOURCES} and len(pages) == 11


def test_the_table_of_the_kit_leads_everywhere():
    text = text_of("README")
    assert links_resolve("README", text) == []
    linked = set(re.findall(r"\]\((\w+\.md)\)", text))
    assert linked == {path.name for path in KIT.glob("*.md")} - {"README.md"}
    assert quotes_are_measured("README", text) == []


@pytest.mark.parametrize("name", ["README", "routes", "jupyterhub", *(path.stem for path in SOURCES)])
def test_commands_exist(name):
    parser = argparse.ArgumentParser()
    workshop.add_arguments(parser)
    commands = next(action.choices for action in parser._actions if action.dest == "action")
    named = set(re.findall(r"kvcourse workshop ([a-z-]+)", text_of(name)))
    assert named <= set(commands)
    others = set(re.findall(r"kvcourse (?!workshop)([a-z]+)\b", " ".join(re.findall(r"`[^`]+`", text_of(name)))))
    assert others <= {"doctor", "fetch", "lab", "run", "meter", "bench"}


# --- routes and the server -----------------------------------------------------------------------------------


def test_routes_fit_and_their_minutes_are_up_to_date():
    found = routes.routes(ROOT)
    assert [route.time for route in found] == [90, 240, 390, 390]
    for route in found:
        assert route.fits, f"{route.title}: {route.sum:.0f} minutes and breaks of {route.breaks:.0f} in {route.time}"
    assert routes.refreshed(ROOT) == text_of("routes"), "run routes.update(course)"


def test_stated_sums_are_those_of_the_rows():
    """Added up from the sections, without the code that writes the page."""
    known = {(section.notebook[:2], section.title): section for section in all_sections()}
    for title in ("In 90 minutes", "Half a day", "Two days, the first", "Two days, the second"):
        table = part(text_of("routes"), re.escape(title) + ".*?")
        total = 0
        for notebook, titles, does in re.findall(r"^\| (\d\d) \| (.+?) \| (.+?) \|", table, re.M):
            for section in (known[notebook, name] for name in titles.split("; ")):
                total += (section.seconds or 0) / 60 + (does != "run") * section.words / 175
                total += sum(section.exercises[name] for name in section.exercises if f"`{name}`" in does)
        assert int(re.search(r"\*\*Sum (\d+) minutes", table)[1]) == 5 * round(total / 5)


def test_times_at_the_heads_of_the_notebooks_are_about_one_and_a_half_times_as_long():
    """What `routes.md` says, and why a route may fill two thirds of its time."""
    heads = sum(int(re.search(r"\*\*Time:\*\* about (\d+) min", path.read_text("utf-8"))[1]) for path in SOURCES)
    assert 1.25 < heads / sum(section.minutes() for section in all_sections()) < 1.75


def test_record_is_of_the_sections_that_there_are():
    recorded = json.loads((KIT / "runs.json").read_text(encoding="utf-8"))
    assert list(recorded) == [path.stem for path in SOURCES]
    for name, run in recorded.items():
        titles = [section.title for section in sections(name[:2])]
        assert list(run["seconds"]) == titles, f"run `kvcourse workshop minutes --record {name[:2]}`"


def test_the_servers_page_says_what_was_recorded():
    text = text_of("jupyterhub")
    assert hub.refreshed(ROOT) == text, "run hub.update(course)"
    assert int(re.search(r"limits\.memory (\d+)G", text)[1]) == hub.memory_limit(ROOT)
    threads, cores = re.search(r'"OMP_NUM_THREADS": "(\d+)"', text)[1], re.search(r"limits\.cpu (\d+)", text)[1]
    assert threads == cores
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert re.search(r"torch==[\d.]+\d", text)[0] in pins
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f'"python{project["requires-python"]}"' in text


# --- the rules themselves ------------------------------------------------------------------------------------

BREAKS = [
    (headings_in_order, "## Aim", "## Aims"),
    (headings_in_order, "# 00 Start", "# 01 Start"),
    (sections_exist, "*Ask a question*", "*Ask two questions*"),
    (exercises_are_all_there, "**latencies**", "**latency**"),
    (exercises_are_all_there, "**first_wait**", "`first_wait`"),
    (checkers_say_so, "throws the unfinished bytes away", "throws them away"),
    (quotes_are_measured, "`00.first_over_later`", "`00.no_such_key`"),
    (quotes_are_measured, "In the worked notebook: ", "In the worked notebook: 9"),
    (links_resolve, "(README.md)", "(README.rst)"),
    (questions_have_answers, "Answer: 79.", "79."),
    (wrong_ideas_are_answered, '- "A token is a word."', "- A token is no word."),
    (is_one_or_two_screens, "## Aim", "## Aim" + "\n" * 90),
]


@pytest.mark.parametrize(("rule", "old", "new"), BREAKS)
def test_rule_sees_a_bad_page(rule, old, new):
    name, text = "00_start_here", text_of("00_start_here")
    assert old in text and rule(name, text) == []
    assert rule(name, text.replace(old, new)) != []


def test_every_rule_has_been_seen_to_say_no():
    assert {rule for rule, *_ in BREAKS} == set(RULES)
