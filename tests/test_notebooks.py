"""The frame that every notebook of the course keeps, and proof that each rule can say no.

A rule takes a `Page` (one source and the two notebooks built from it) and returns what it finds wrong.
"""

import ast
import re
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import nbformat
import pytest

import kvcourse as kv
from kvcourse.notebooks.build import IGNORE, WIDGET, built_paths, drift
from kvcourse.notebooks.source import METADATA, STUB, metadata_for, tags

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "notebooks" / "src").glob("*.py"))
LONGEST_CELL = 25
COLAB = re.compile(r"https://colab\.research\.google\.com/github/[\w.-]+/[\w.-]+/blob/main/([^)\s]+)")


class Page(NamedTuple):
    name: str
    learner: nbformat.NotebookNode
    worked: nbformat.NotebookNode

    @property
    def both(self):
        return {f"{self.name}.ipynb": self.learner, f"solutions/{self.name}.ipynb": self.worked}


def load(name):
    return Page(name, *(nbformat.read(path, as_version=4) for path in built_paths(ROOT, name)))


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tree(cell):
    return ast.parse(re.sub(r"(?m)^(\s*)%.*$", r"\1pass", cell.source))


def calls(notebook, name):
    """Every call of `name`, written alone or behind a dot."""
    for cell in code_cells(notebook):
        for node in ast.walk(tree(cell)):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", None)) == name:
                yield node


# --- the rules -----------------------------------------------------------------------------------------------


def says_what_it_is(page):
    """Title, minutes and aims stand before the first code cell."""
    head = []
    for cell in page.learner.cells:
        if cell.cell_type == "code":
            break
        head.append(cell.source)
    text = "\n".join(head)
    wanted = {"a title": r"\A# \S", "minutes": r"\d+ min", "'you will be able to'": r"(?i)you will be able to"}
    return [f"no {what} before the first code cell" for what, pattern in wanted.items() if not re.search(pattern, text)]


def badge_opens_itself(page):
    faults = []
    for file, notebook in page.both.items():
        links = COLAB.findall(notebook.cells[0].source)
        if links != [f"notebooks/{file}"]:
            faults.append(f"{file}: badges in the first cell lead to {links}")
    return faults


def kernel_is_python3(page):
    wrong = {file: nb.metadata for file, nb in page.both.items() if nb.metadata != metadata_for(nb.cells)}
    return [f"{file}: {metadata}" for file, metadata in wrong.items()]


def learner_has_no_outputs(page):
    return [cell.source for cell in code_cells(page.learner) if cell.outputs or cell.execution_count is not None]


def learner_has_no_solution(page):
    marks = ("# SOLUTION", "# END SOLUTION", "# PREDICT")
    return [cell.source for cell in page.learner.cells if any(mark in cell.source for mark in marks)]


def worked_outputs_are_clean(page):
    outputs = [(cell, out) for cell in code_cells(page.worked) for out in cell.outputs]
    return [cell.source for cell, out in outputs if out.get("name") == "stderr" or WIDGET in out.get("data", {})]


def worked_ran_in_order(page):
    counts = [cell.execution_count for cell in code_cells(page.worked)]
    return [] if counts == list(range(1, len(counts) + 1)) else [f"execution counts are {counts}"]


def some_text_is_compared(page):
    compared = [cell for cell in code_cells(page.worked) if IGNORE not in tags(cell)]
    text = [out for cell in compared for out in cell.outputs if out.get("text") or "text/plain" in out.get("data", {})]
    return [] if text else ["nbval compares no text of the worked notebook"]


def cells_are_short(page):
    lengths = [(len(cell.source.splitlines()), cell) for nb in page.both.values() for cell in code_cells(nb)]
    return [f"{length} lines: {cell.source[:60]}" for length, cell in lengths if length > LONGEST_CELL]


def nothing_is_hidden(page):
    """No shell commands, whose failure nobody sees, and no cell that is expected to fail."""
    shell = [cell.source for cell in code_cells(page.learner) if re.search(r"^\s*!", cell.source, re.MULTILINE)]
    return shell + [cell.source for cell in code_cells(page.worked) if any("raises-exception" in t for t in tags(cell))]


def has_three_full_exercises(page):
    """Each with minutes, hints to unfold and a checker, all before the next exercise begins."""
    cells = page.learner.cells
    exercises = [i for i, cell in enumerate(cells) if "exercise" in tags(cell)]
    begins = [max((j + 1 for j in range(i) if cells[j].cell_type == "code"), default=0) for i in exercises]
    faults = [] if len(exercises) >= 3 else [f"{len(exercises)} exercises, not at least 3"]
    for i, start, stop in zip(exercises, begins, [*begins[1:], len(cells)], strict=True):
        text = "\n".join(cell.source for cell in cells[start:stop] if cell.cell_type == "markdown")
        code = "\n".join(cell.source for cell in cells[i:stop] if cell.cell_type == "code")
        wanted = [(r"\d+ min", text), ("<details>", text), (r"kv\.check\.\w+\(", code), (re.escape(STUB), code)]
        faults += [f"{cells[i].source[:60]}: no {what}" for what, where in wanted if not re.search(what, where)]
    return faults


def asks_for_a_guess(page):
    guesses = [cell for cell in code_cells(page.learner) if "# write your guess here" in cell.source]
    return [] if guesses else ["no guess to make"]


def has_a_widget(page):
    return [] if list(calls(page.worked, "explore")) else ["no kv.widgets.explore(...)"]


def figures_have_alt_text(page):
    faults = []
    for call in calls(page.worked, "show"):
        alt = [keyword.value for keyword in call.keywords if keyword.arg == "alt"]
        if not alt or (isinstance(alt[0], ast.Constant) and not str(alt[0].value).strip()):
            faults.append(ast.unparse(call))
    return faults


def names_exist(page):
    """Every `kv.name` and `kv.module.name`, in code and in prose."""
    text = "\n".join(cell.source for notebook in page.both.values() for cell in notebook.cells)
    return sorted({name for name in re.findall(r"\bkv\.([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)?)", text) if not exists(name)})


def exists(name):
    first, _, second = name.partition(".")
    try:
        value = getattr(kv, first)
        if second and isinstance(value, ModuleType):
            getattr(value, second)
    except AttributeError:
        return False
    return True


RULES = [
    says_what_it_is,
    badge_opens_itself,
    kernel_is_python3,
    learner_has_no_outputs,
    learner_has_no_solution,
    worked_outputs_are_clean,
    worked_ran_in_order,
    some_text_is_compared,
    cells_are_short,
    nothing_is_hidden,
    has_three_full_exercises,
    asks_for_a_guess,
    has_a_widget,
    figures_have_alt_text,
    names_exist,
]


# --- the real notebooks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_notebook_keeps_the_frame(source, rule):
    assert rule(load(source.stem)) == []


def test_built_notebooks_are_what_the_sources_give():
    assert drift(ROOT) == []


def test_setup_cell_is_the_same_everywhere():
    notebooks = [notebook for source in SOURCES for notebook in load(source.stem).both.values()]
    assert len({code_cells(notebook)[0].source for notebook in notebooks}) == min(1, len(notebooks))


# --- the rules themselves ------------------------------------------------------------------------------------


def text(source):
    return nbformat.v4.new_markdown_cell(source)


def code(source, *tags, **fields):
    return nbformat.v4.new_code_cell(source, metadata={"tags": list(tags)} if tags else {}, **fields)


def good_page():
    """A made-up page that keeps every rule."""
    printed = nbformat.v4.new_output("stream", name="stdout", text="4\n")

    def notebook(folder, body, run):
        badge = f"https://colab.research.google.com/github/owner/repo/blob/main/notebooks/{folder}99_good.ipynb"
        cells = [text(f"# Good\n[b]({badge})\n45 minutes. After it you will be able to judge.")]
        cells += [
            code("import kvcourse as kv\nif False:\n    %pip install x", "setup"),
            code("guess = None  # write your guess here"),
        ]
        for name in "abc":
            cells.append(text("## Exercise (5 min)\n<details><summary>Hint</summary>Think.</details>"))
            cells += [code(f"def {name}():\n    {body}", "exercise"), code(f"kv.check.progress({name})")]
        cells += [code("kv.widgets.explore(draw)"), code('kv.plots.show(fig, alt="a line")'), code("print(2 + 2)")]
        if run:
            for count, cell in enumerate((cell for cell in cells if cell.cell_type == "code"), 1):
                cell.execution_count = count
            cells[-1].outputs = [printed]
        return nbformat.from_dict({"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5})

    return Page("99_good", notebook("", STUB, False), notebook("solutions/", "return 1", True))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_accepts_a_good_page(rule):
    assert rule(good_page()) == []


def replaced(old, new):
    def change(page):
        for notebook in page.both.values():
            for cell in notebook.cells:
                cell.source = cell.source.replace(old, new)

    return change


def worked_output(**fields):
    def change(page):
        page.worked.cells[-1].outputs = [nbformat.from_dict(fields)]

    return change


BREAKS = [
    (says_what_it_is, replaced("# Good", "Good")),
    (says_what_it_is, replaced("45 minutes", "An hour")),
    (says_what_it_is, replaced("you will be able", "you can begin")),
    (badge_opens_itself, replaced("99_good", "98_old_name")),
    (badge_opens_itself, replaced("https://colab", "http://colab")),
    (kernel_is_python3, lambda page: page.learner.metadata["kernelspec"].update(name="py311")),
    (learner_has_no_outputs, lambda page: page.learner.cells[-1].update(execution_count=3)),
    (learner_has_no_outputs, lambda page: page.learner.cells[-1].update(outputs=page.worked.cells[-1].outputs)),
    (learner_has_no_solution, replaced(STUB, "# SOLUTION")),
    (worked_outputs_are_clean, worked_output(output_type="stream", name="stderr", text="careful")),
    (worked_outputs_are_clean, worked_output(output_type="display_data", data={WIDGET: {}}, metadata={})),
    (worked_ran_in_order, lambda page: page.worked.cells[-1].update(execution_count=None)),
    (some_text_is_compared, lambda page: page.worked.cells[-1].metadata.update(tags=[IGNORE])),
    (cells_are_short, replaced("print(2 + 2)", "x = 1\n" * 26)),
    (nothing_is_hidden, replaced("print(2 + 2)", "if 1:\n  !pip install y")),
    (nothing_is_hidden, lambda page: page.worked.cells[-1].metadata.update(tags=["nbval-raises-exception"])),
    (has_three_full_exercises, replaced("(5 min)", "")),
    (has_three_full_exercises, replaced("<details>", "")),
    (has_three_full_exercises, replaced("kv.check.progress(b)", "")),
    (has_three_full_exercises, lambda page: page.learner.cells[4].metadata.clear()),
    (asks_for_a_guess, replaced("None  # write your guess here", "3")),
    (has_a_widget, replaced("explore", "interact")),
    (figures_have_alt_text, replaced('alt="a line"', 'alt=" "')),
    (figures_have_alt_text, replaced(', alt="a line"', "")),
    (names_exist, replaced("kv.check.progress", "kv.check.no_such_exercise")),
    (names_exist, replaced("# Good", "# Good `kv.no_such_name`")),
]


@pytest.mark.parametrize(("rule", "change"), BREAKS)
def test_rule_sees_a_bad_page(rule, change):
    page = good_page()
    change(page)
    assert rule(page) != []


def test_every_rule_has_been_seen_to_say_no():
    assert {rule for rule, _ in BREAKS} == set(RULES)
