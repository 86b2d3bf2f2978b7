"""The minutes of sections and routes, on a small course whose words, exercises and seconds are known."""

import json
from pathlib import Path

import pytest

from kvcourse.workshop import hub, minutes, quotes, routes

SOURCE = """\
# %% [markdown]
# # Tiny
# {{colab_badge}}
#
# Four words of prose.

# %% tags=["setup"]
# SETUP

# %% [markdown]
# ## First
#
# These are seven words, [one](https://example.com/no/word) linked.
#
# $$ a + b = c $$
# ### Exercise: root
#
# ●○○ · 4 minutes
#
# This statement is read within the minutes of the exercise.
# <details><summary>Hint</summary>So is this.</details>

# %% tags=["exercise"]
def root(x):
    # SOLUTION
    return x**0.5
    # END SOLUTION

# %%
print(root(4))

# %% [markdown]
# Two more.
# ## Second

# %%
import time

time.sleep(0.25)
print("00.wait no guess | measured 3.5 times")
"""
PYPROJECT = '[project]\nversion = "0.1.0"\n[project.urls]\nRepository = "https://github.com/owner/repo"\n'
ROUTE = """\
# Routes

## Short, 30 minutes

| Notebook | Sections | What is done | Minutes |
|---|---|---|---|
| 00 | Opening | run | 99 |
| 00 | First | `root` | 99 |
| break | tea | rest | 5 |
| 00 | Second | read | 99 |

**Sum 99 minutes, breaks 9, room 9.**
"""
HUB = "| Notebook | Memory | Ran |\n|---|---|---|\n| 00 | 9 GB | 9 s |\n\ntljh-config set limits.memory 99G\n"


@pytest.fixture
def course(tmp_path):
    (tmp_path / "notebooks" / "src").mkdir(parents=True)
    (tmp_path / "notebooks" / "instructor").mkdir()
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "notebooks" / "src" / "00_tiny.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / routes.PAGE).write_text(ROUTE)
    (tmp_path / hub.PAGE).write_text(HUB)
    return tmp_path


def put_record(course: Path, **seconds: float) -> None:
    run = {"on": "cpu, 8 cores, x86_64", "date": "2026-11-01", "peak_gb": 1.26, "seconds": seconds}
    (course / minutes.RECORD).write_text(json.dumps({"00_tiny": run}))


# --- sections ------------------------------------------------------------------------------------------------


def test_words_exercises_and_seconds_of_each_section(course):
    put_record(course, Opening=1.5, First=30, Second=90)
    found = minutes.sections(course)
    assert [section.title for section in found] == ["Opening", "First", "Second"]
    assert [section.words for section in found] == [5, 8, 0]  # "Tiny" and four; six and "Two more"
    assert [section.exercises for section in found] == [{}, {"root": 4}, {}]
    assert [section.seconds for section in found] == [1.5, 30, 90]


def test_minutes_are_reading_running_and_the_exercises_that_are_done(course):
    put_record(course, Opening=0, First=30, Second=90)
    _, first, second = minutes.sections(course)
    assert first.minutes() == pytest.approx(8 / 175 + 0.5 + 4)
    assert first.minutes(exercises=[]) == pytest.approx(8 / 175 + 0.5)
    assert second.minutes() == pytest.approx(1.5)
    with pytest.raises(KeyError):
        second.minutes(exercises=["root"])


def test_without_a_record_cells_take_no_time_and_the_table_says_so(course):
    assert [section.seconds for section in minutes.sections(course)] == [None, None, None]
    text = minutes.table(course)
    assert "Not run yet: 00_tiny (`kvcourse workshop minutes --record`)." in text


def test_table_adds_up(course):
    put_record(course, Opening=0, First=30, Second=90)
    text = minutes.table(course, ["00"])
    assert "00_tiny: 6 minutes" in text and "in all: 6 minutes" in text  # 13 words, 4 and 2 minutes
    assert "    First        8      0.0          4     30 s      4.5  root" in text.splitlines()
    assert "Run on cpu, 8 cores, x86_64, 2026-11-01." in text


def test_headings_in_code_fences_and_deeper_ones_begin_no_section(course):
    path = course / "notebooks" / "src" / "00_tiny.py"
    more = "# %% [markdown]\n# ```text\n# # two words\n# ```\n# ### Deeper\n# Three more words.\n"
    path.write_text(f"{SOURCE}\n{more}", encoding="utf-8")
    second = minutes.sections(course)[-1]
    assert (second.title, second.words) == ("Second", 4)


def test_unknown_notebook_and_damaged_record_are_named(course):
    with pytest.raises(ValueError, match="there is no notebook '01'; the notebooks are: 00_tiny"):
        minutes.sections(course, ["01"])
    (course / minutes.RECORD).write_text("{")
    with pytest.raises(ValueError, match="runs.json is damaged .*--record"):
        minutes.sections(course)


# --- a run ---------------------------------------------------------------------------------------------------


def test_record_runs_a_notebook_and_brings_the_pages_up_to_date(course):
    assert minutes.record(course, ["00"]) == course / minutes.RECORD
    run = json.loads((course / minutes.RECORD).read_text())["00_tiny"]
    assert list(run["seconds"]) == ["Opening", "First", "Second"]
    assert 0.2 <= run["seconds"]["Second"] < 60 and run["seconds"]["First"] < 0.2
    assert 0.05 < run["peak_gb"] < 20
    assert f"| 00 | {run['peak_gb']:.1f} GB | " in (course / hub.PAGE).read_text()


def test_a_failing_cell_leaves_the_record_as_it_was(course):
    put_record(course, Opening=1)
    before = (course / minutes.RECORD).read_text()
    source = course / "notebooks" / "src" / "00_tiny.py"
    source.write_text(SOURCE.replace("root(4)", "root(four)"), encoding="utf-8")
    with pytest.raises(
        RuntimeError, match="00_tiny, cell 5 .*NameError: name 'four' is not defined.*nothing was recorded"
    ):
        minutes.record(course)
    assert (course / minutes.RECORD).read_text() == before


# --- routes --------------------------------------------------------------------------------------------------


def test_route_adds_up_and_its_page_is_rewritten(course):
    put_record(course, Opening=60, First=60, Second=120)
    [route] = routes.routes(course)
    assert (route.title, route.time, route.breaks) == ("Short, 30 minutes", 30, 5)
    assert route.sum == pytest.approx(1 + (8 / 175 + 1 + 4) + 2)
    assert route.fits  # 8 of two thirds of 25
    routes.update(course)
    text = (course / routes.PAGE).read_text()
    for line in ("| 00 | Opening | run | 1 |", "| 00 | First | `root` | 5 |", "| break | tea | rest | 5 |"):
        assert line in text.splitlines()
    assert "**Sum 10 minutes, breaks 5, room 15. Longest without a rest: 20 minutes by the clock.**" in text
    assert routes.refreshed(course) == text != ROUTE


def test_a_stretch_ends_at_a_rest_and_lunch_is_not_counted_in_the_time(course):
    put_record(course, Opening=60, First=60, Second=120)
    [before] = routes.routes(course)
    assert before.longest_stretch == pytest.approx(25 * (before.sum - 2) / before.sum)
    (course / routes.PAGE).write_text(ROUTE.replace("| 00 | First |", "| lunch | soup | rest | 40 |\n| 00 | First |"))
    [route] = routes.routes(course)
    assert (route.sum, route.breaks, route.fits) == (before.sum, 5, True)
    assert route.longest_stretch == pytest.approx(25 * (before.sum - 3) / before.sum)


def test_exit_questions_are_those_whose_section_the_route_reads(course):
    page = "# 00\n\n1. No question.\n\n## Exit questions\n\n"
    page += "1. Why? Answer: so. (Section *First*.)\n2. What? Answer:\n   a. (Section *Opening*.)\n3. No section?\n"
    page += "4. Who?\n   (Section *Second*.)\n"
    (course / routes.PAGE).with_name("00_tiny.md").write_text(page)
    (course / routes.PAGE).write_text(ROUTE + "\n**Exit questions:** none.\n")
    assert routes.refreshed(course).endswith("\n**Exit questions:** 00: 1, 4.\n")


def test_route_that_is_too_long_does_not_fit(course):
    put_record(course, Opening=600, First=300, Second=0)
    [route] = routes.routes(course)
    assert route.sum > 16.7 and not route.fits


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("| First |", "| Third |", "notebook 00 has no section 'Third'; its sections: Opening; First; Second"),
        ("`root`", "`square`", "the exercise 'square' is not in First of notebook 00"),
        ("| 00 | First | `root` | 99 |\n", "", "notebook 00 needs the cells of its section 'First' before"),
        ("Opening | run", "Second | run", "notebook 00 needs the cells of its section 'Opening' before"),
    ],
)
def test_route_with_a_fault_is_refused(course, old, new, message):
    (course / routes.PAGE).write_text(ROUTE.replace(old, new))
    with pytest.raises(ValueError, match=message):
        routes.routes(course)


# --- quotes and the hub --------------------------------------------------------------------------------------


def test_quotes_are_found_and_follow_what_was_measured():
    text = "It took 14.4 times (`00.first`), or +1.7%, `04.second`; `02.alone` has 3.05e-5 (`02.small`)."
    assert quotes.quoted(text) == [("00.first", "14.4"), ("04.second", "1.7"), ("02.small", "3.05e-5")]
    new = quotes.refreshed(text, {"00.first": "9", "02.small": "1e-6"})
    assert new == "It took 9 times (`00.first`), or +1.7%, `04.second`; `02.alone` has 1e-6 (`02.small`)."


def test_a_bound_is_quoted_by_the_key_of_its_measurement():
    printed = """03.from  your guess 4 tokens | bound 22 tokens | measured 64 tokens (2.91 times the bound)
03.alone  no guess | measured 9 times
03.long  your guess 1,000 tokens
    bound 730 tokens | measured 1,500 tokens
    bound: bytes; extrapolated
"""
    found = {"03.from": "64", "03.from:bound": "22", "03.alone": "9", "03.long": "1,500", "03.long:bound": "730"}
    assert quotes.printed(printed) == found
    text = "60 tokens (`03.from`), against 18 tokens (`03.from:bound`) by the ridge."
    assert quotes.refreshed(text, found) == "64 tokens (`03.from`), against 22 tokens (`03.from:bound`) by the ridge."


def test_the_readmes_times_come_from_the_record(course):
    put_record(course, Opening=1.4, First=30, Second=90)
    row = "| [00 Tiny](notebooks/00_tiny.ipynb) | 5 min | {} | see |\n"
    (course / hub.README).write_text(row.format("9 s") + row.replace("00", "01").format("8 s"))
    hub.update(course)
    assert (course / hub.README).read_text() == row.format("121 s") + row.replace("00", "01").format("8 s")


def test_hub_table_and_memory_limit_come_from_the_record(course):
    put_record(course, Opening=1.4, First=30, Second=90)
    hub.update(course)
    assert (course / hub.PAGE).read_text() == HUB.replace("9 GB | 9 s", "1.3 GB | 121 s").replace("99G", "2G")
    assert hub.memory_limit(course) == 2  # 1.3 times 1.26 + 0.1
    with pytest.raises(ValueError, match="none of these notebooks was recorded"):
        hub.memory_limit(course, ["09"])
