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

import nbformat
import pytest

import kvcourse as kv
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
    titled = re.match(rf"# Teaching {name[:2]}: \S", text)  # not the lesson's own title, which the site has too
    return [] if found == HEADINGS and titled else [f"title or headings: {found}"]


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
    faults += [f"no answer: {q[:40]}" for q in asked if not re.search(r"\?.*Answer: \S", q, re.S)]
    return faults + [f"no section: {q[:40]}" for q in asked if not re.search(r" \(Section \*[^*]+\*\.\)$", flat(q))]


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


def test_no_stretch_without_a_rest_is_longer_than_the_shortest_route():
    """Added up from the minutes that stand in the tables, the room spread over all rows alike."""
    for route in routes.routes(ROOT):
        table = part(text_of("routes"), re.escape(route.title))
        stretches = [0]
        for notebook, minutes_of_row in re.findall(r"^\| (\w+) \| .+ \| (<?\d+) \|$", table, re.M):
            rest = notebook in ("break", "lunch")
            stretches += [0] if rest else []
            stretches[-1] += 0 if rest else float(minutes_of_row.replace("<1", "0.3"))
        longest = max(stretches) * (route.time - route.breaks) / sum(stretches)
        assert longest == pytest.approx(route.longest_stretch, abs=3) and longest < 91, route.title
        assert table.count("| lunch |") == (route.time > 240)


def test_a_route_without_its_rests_has_too_long_a_stretch():
    route = routes.routes(ROOT)[2]
    assert route.longest_stretch < 90
    without = [row for row in route.rows if row.notebook != "break"]
    assert route._replace(rows=without).longest_stretch > 90
    assert route._replace(rows=[row for row in route.rows if row.notebook != "lunch"]).longest_stretch > 90


def test_exit_questions_of_a_route_are_those_of_sections_that_it_reads():
    """Read off the pages and tables, without the code that writes the lines."""
    asked = {}
    for source in SOURCES:
        questions = part(text_of(source.stem), "Exit questions")
        for number, title in re.findall(r"^(\d)\. .*?\(Section \*(.*?)\*\.\)$", questions, re.M | re.S):
            asked[source.stem[:2], number] = title
    assert len(asked) == 52 and asked["05", "5"] == "Local and global layers"
    for title in ("In 90 minutes", "Half a day", "Two days, the first", "Two days, the second"):
        table = part(text_of("routes"), re.escape(title) + ".*?")
        rows = re.findall(r"^\| (\d\d) \| (.+?) \| (.+?) \|", table, re.M)
        read = {(notebook, name) for notebook, names, does in rows if does != "run" for name in names.split("; ")}
        stated = re.search(r"\*\*Exit questions:\*\* (.+)\.$", table, re.M)[1]
        listed = {(page[:2], number) for page in stated.split("; ") for number in page[4:].split(", ")}
        assert listed == {key for key, section in asked.items() if (key[0], section) in read}, title


def test_routes_say_how_the_times_at_the_heads_of_the_notebooks_compare():
    """And why a route may fill two thirds of its time."""
    ratios, heads = {}, {}
    for path in SOURCES:
        heads[path.stem[:2]] = int(re.search(r"\*\*Time:\*\* about (\d+) min", path.read_text("utf-8"))[1])
        ratios[path.stem[:2]] = heads[path.stem[:2]] / sum(section.minutes() for section in sections(path.stem[:2]))
    together = sum(heads.values()) / sum(section.minutes() for section in all_sections())
    times = r"([\d.]+) times \(notebook (\d+)"
    said = rf"together they are ([\d.]+) times as long, from {times},.*? to {times}\)"
    stated, low, least, high, most = re.search(said, flat(text_of("routes"))).groups()
    assert (least, most) == (min(ratios, key=ratios.get), max(ratios, key=ratios.get))
    for number, ratio in ((stated, together), (low, ratios[least]), (high, ratios[most])):
        assert float(number) == pytest.approx(ratio, abs=0.1)
    assert "sums to five" in text_of("routes")  # a column may add up to another number than its sum


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
    python = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]
    assert f"Python {python.removeprefix('>=')} or later" in text


def test_the_servers_environment_is_that_of_environment_yml():
    """Made in one go: a command that names packages or a version of Python would say something else beside it."""
    commands = re.findall(r"^ *(?:sudo )?\S*/(conda|pip) (.+)$", text_of("jupyterhub"), re.M)
    assert commands == [("conda", "env create -p /opt/kvcourse -f environment.yml")]


def test_times_in_the_readme_are_those_of_the_servers_page():
    """Both are the sums of the recorded seconds."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert hub.refreshed_readme(ROOT) == readme, "run hub.update(course)"
    in_readme = dict(re.findall(r"^\| \[(\d\d) .*?\| \d+ min \| (\d+ s) \|", readme, re.M))
    on_page = dict(re.findall(r"^\| (\d\d) \| .*? GB \| (\d+ s) \|", text_of("jupyterhub"), re.M))
    recorded = json.loads((KIT / "runs.json").read_text(encoding="utf-8"))
    assert in_readme == on_page == {name[:2]: f"{sum(run['seconds'].values()):.0f} s" for name, run in recorded.items()}
    assert len(in_readme) == 11


# --- what the pages claim of shares and reserves -------------------------------------------------------------


def test_int8_is_nearer_to_its_bound_than_the_plain_step_and_farther_than_compiled_float32():
    """As page 10 says, in the ladder that the worked notebook has stored."""
    notebook = nbformat.read(ROOT / "notebooks" / "solutions" / f"{SOURCES[10].stem}.ipynb", 4)
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    rungs = re.findall(r"^(\w[\w ]*?) +[\d.]+ tokens/s,.* (\d+)% of it", printed, re.M)
    share = {name: int(percent) for name, percent in rungs}
    assert share["plain"] < share["int8"] < share["compiled layers"] - 20
    said = "a larger share of its own bound than the plain step does, but a much smaller one than compiled float32"
    assert said in flat(part(text_of(SOURCES[10].stem), "Typical wrong ideas"))


def test_what_fits_on_24_gb_leaves_a_tenth_free():
    """As page 04 says: without that reserve it would be another number."""
    llama, memory = kv.PUBLISHED["Llama 3.1 8B"], kv.DEVICES["RTX 4090 24 GB"]
    said = "On 24 GB, a tenth of them kept free for everything else, the 8B model in 16 bits leaves room for 42,262"
    assert said in flat(text_of("04_memory_and_gqa"))
    assert kv.longest_context(llama, memory, usable=0.9) == 42_262 < kv.longest_context(llama, memory, usable=1)


# --- the rules themselves ------------------------------------------------------------------------------------

BREAKS = [
    (headings_in_order, "## Aim", "## Aims"),
    (headings_in_order, "# Teaching 00: Start", "# Teaching 01: Start"),
    (headings_in_order, "# Teaching 00: Start", "# 00 Start"),
    (sections_exist, "*Ask a question*", "*Ask two questions*"),
    (exercises_are_all_there, "**latencies**", "**latency**"),
    (exercises_are_all_there, "**first_wait**", "`first_wait`"),
    (checkers_say_so, "throws the unfinished bytes away", "throws them away"),
    (quotes_are_measured, "`00.first_over_later`", "`00.no_such_key`"),
    (quotes_are_measured, "In the worked notebook: ", "In the worked notebook: 9"),
    (links_resolve, "(README.md)", "(README.rst)"),
    (questions_have_answers, "Answer: 79.", "79."),
    (questions_have_answers, " (Section *Three figures for one answer*.)", ""),
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
