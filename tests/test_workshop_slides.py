"""`kvcourse workshop slides`: every notebook as slides that open without a network and give no solution away."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import browser
import nbformat
import pytest
from bs4 import BeautifulSoup

from kvcourse.cli.main import main as kvcourse
from kvcourse.notebooks.build import read
from kvcourse.notebooks.source import read_cells, solution_blocks
from kvcourse.workshop import slides

ROOT = Path(__file__).parent.parent
NAMES = [path.stem for path in sorted((ROOT / "notebooks" / "src").glob("*.py"))]
BEGINS = ("slide", "subslide")
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def cell(number: int, kind: str, text: str, outputs=()) -> nbformat.NotebookNode:
    made = {"cell_type": kind, "source": text, "metadata": {}, "id": f"cell-{number}"}
    return nbformat.from_dict(made | ({"outputs": list(outputs), "execution_count": 1} if kind == "code" else {}))


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course of one notebook that has one of everything."""
    figure = nbformat.v4.new_output(
        "display_data", {"image/png": PNG}, metadata={"image/png": {"alt": 'A line "up" & away.'}}
    )
    said = nbformat.v4.new_output("stream", text="printed by the worked notebook\n")
    statement = "### Exercise: double\n\nWrite `double`.\n\n<details><summary>Hint 1</summary>twice</details>"
    cells = [  # text of both, or of the learner's and the worked one
        ("markdown", "# 1. Title\n\n[![Open in Colab](https://colab/badge.svg)](https://colab/x)"),
        ("code", "import kvcourse as kv"),
        ("markdown", "## First\n\nA [term](glossary.ipynb#term), $x^2$ and [a paper](https://example.org/paper)."),
        ("code", "print(1)", [said, figure]),
        ("code", ("guess = None", "guess = 12345"), [said]),
        ("markdown", "The end of it.\n## Second\n\n$$a = b$$"),
        ("markdown", statement),
        ("code", ("def double(x):\n    raise NotImplementedError", "def double(x):\n    return x + x"), [said]),
        ("code", "kv.check.double(double)", [said]),
        *[("code", f"long_{i} = 1\n" * 12) for i in range(4)],
    ]
    for side, folder in enumerate(("", "solutions")):
        made = nbformat.v4.new_notebook()
        for number, (kind, text, *outputs) in enumerate(cells):
            made.cells.append(cell(number, kind, text if isinstance(text, str) else text[side], *outputs))
        (tmp_path / "notebooks" / folder).mkdir(parents=True, exist_ok=True)
        nbformat.write(made, tmp_path / "notebooks" / folder / "01_one.ipynb")
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "notebooks" / "src").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def columns(page) -> list:
    """The horizontal slides, each with its steps."""
    return [section.find_all("section", recursive=False) for section in page.select(".slides > section")]


def test_one_of_everything(course, capsys):
    assert kvcourse(["workshop", "slides", "--output", "out"]) == 0
    assert capsys.readouterr().out == "out/01_one.slides.html\n".replace("/", str(Path("/"))[0])
    html = (course / "out" / "01_one.slides.html").read_text(encoding="utf-8")
    page = BeautifulSoup(html, "html.parser")
    title, first, second = columns(page)
    assert [len(title), len(first)] == [1, 2]  # the figure fills a slide
    assert title[0].h1.text == "1. Title" and first[0].h2.text == "First" and second[0].h2.text == "Second"
    assert len(second) >= 3  # 48 lines of code and an exercise do not fit on one slide
    assert second[1].h3.text == "Exercise: double" and "raise NotImplementedError" in second[1].text
    [image] = page.find_all("img")
    assert image["alt"] == 'A line "up" & away.'
    assert "printed by the worked notebook" in first[0].text
    assert html.count("printed by the worked notebook") == 1  # not below guess, solution and checker
    assert [link["href"] for link in page.select("a[href]")] == ["https://example.org/paper"]
    assert "A term, " in first[0].text and "x^2" not in first[0].text and len(page.find_all("math")) == 2
    assert not re.search(r"x \+ x|12345|kv\.check|import kvcourse|colab|<details", html)
    assert [note.text.strip() for note in page.select("aside.notes")] == ["Hint 1twice"]


def on_slides(learner, worked=None) -> list[list[tuple[str, int]]]:
    """Code, and number of outputs, of each cell on each slide."""
    made, worked = [], worked or learner
    for each in slides.paged(slides.parts(learner, worked)):
        if each.metadata.slideshow.slide_type in BEGINS:
            made.append([])
        made[-1].append((each.source, len(each.outputs) if each.cell_type == "code" else 0))
    return made


@pytest.mark.parametrize(
    ("above", "code", "printed", "wanted"),
    [
        (10, 5, 5, [["title", "above", "code and output"]]),
        (20, 7, 10, [["title", "above"], ["code and output"]]),  # below the text there is room for the code alone
        (1, 10, 20, [["title", "above"], ["code and output"]]),  # these two fill it
        (1, 20, 20, [["title", "above", "code"], ["output"]]),  # more than a slide holds
    ],
)
def test_code_stands_with_its_output_where_a_slide_has_room(above, code, printed, wanted):
    """In lines of 31; a title takes one, a cell of code one more than it has."""
    above, code = "y = 2\n" * above, "x = 1\n" * code
    said = nbformat.v4.new_output("stream", text="1\n" * printed)
    names = {("## A", 0): "title", (above, 0): "above", (code, 1): "code and output", (code, 0): "code"}
    cells = [cell(0, "markdown", "## A"), cell(1, "code", above), cell(2, "code", code, [said])]
    names[("", 1)] = "output"
    assert [[names[each] for each in page] for page in on_slides(cells)] == wanted


@pytest.mark.parametrize(
    ("code", "plots"),
    [
        ('kv.plots.show(figure, alt="A line.")', True),
        ('alt = (\n    "A "\n    "line."\n)\nfigure = f(x)\nkv.plots.show(figure, alt=alt)', True),
        ("times = measured()\nkv.plots.show(f(times))", False),
        ("kv.plots.show(f(times))\nprint(times)", False),
        ("%matplotlib inline", False),
    ],
)
def test_a_figure_needs_no_code_that_only_shows_it(code, plots):
    figure = nbformat.v4.new_output("display_data", {"image/png": PNG})
    title = cell(0, "markdown", "## A")
    assert on_slides([title, cell(1, "code", code, [figure])]) == [[("## A", 0), ("" if plots else code, 1)]]
    assert on_slides([title, cell(1, "code", code)]) == [[("## A", 0), (code, 0)]]  # nothing else would be left


def test_what_opens_needs_no_network(course):
    slides.slides(course, course / "out")
    html = (course / "out" / "01_one.slides.html").read_text(encoding="utf-8")
    page = BeautifulSoup(html, "html.parser")
    loaded = [tag.get("src") or tag.get("href") for tag in page.select("script[src], link[href], img[src], iframe")]
    files = [name for name in loaded if not name.startswith("data:")]
    assert len(files) == 4 and all((course / "out" / name).is_file() for name in files)
    for sheet in (course / "out").rglob("*.css"):
        used = re.findall(r"""@import\s+(?:url\()?["']?([^"')]+)""", sheet.read_text(encoding="utf-8"))
        if sheet.name in ("reveal.css", "white.css", "source-sans-pro.css"):
            assert not [name for name in used if name.startswith(("http", "//"))], sheet
            assert all((sheet.parent / name).is_file() for name in used)
    assert "@import url(http" not in html and not re.search(r"""from ['"]https?:""", html)


def test_notebooks_that_do_not_belong_together(course, capsys):
    path = course / "notebooks" / "01_one.ipynb"
    learner = read(path, as_version=4)
    learner.cells.pop()
    nbformat.write(learner, path)
    assert kvcourse(["workshop", "slides"]) == 1
    assert "01_one: the worked notebook has other cells than the learner's" in capsys.readouterr().err
    assert not (course / "slides").exists()


@pytest.mark.parametrize("package", ["sphinx_revealjs", "latex2mathml"])
def test_without_the_packages_for_slides(course, monkeypatch, capsys, package):
    found = slides.find_spec
    monkeypatch.setattr(slides, "find_spec", lambda name: None if name == package else found(name))
    assert kvcourse(["workshop", "slides"]) == 1
    assert f"Slides need {package}" in capsys.readouterr().err


def test_no_worked_notebooks_and_unknown_names(course, capsys):
    assert kvcourse(["workshop", "slides", "07"]) == 1
    assert "there is no notebook '07'" in capsys.readouterr().err
    (course / "notebooks" / "solutions" / "01_one.ipynb").unlink()
    for names in ([], ["01"]):
        assert kvcourse(["workshop", "slides", *names]) == 1
        assert "slides are made where the course is written" in capsys.readouterr().err


# --- the course's own notebooks -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_sections_figures_and_exercises_of_each_notebook(name):
    """Counted in the source, which slides are not made from."""
    source = (ROOT / "notebooks" / "src" / f"{name}.py").read_text(encoding="utf-8")
    deck = slides.deck(ROOT, name)
    kinds = Counter(each.metadata.slideshow.slide_type for each in deck.cells)
    assert kinds["slide"] == 1 + len(re.findall(r"(?m)^# ## ", source))
    assert kinds["notes"] >= len(re.findall(r"(?m)^# ### Exercise", source)) >= 4
    images = [
        out
        for each in deck.cells
        if each.cell_type == "code"
        for out in each.outputs
        if "image/png" in out.get("data", {})
    ]
    assert len(images) >= 5 and all(out.metadata["image/png"]["alt"] for out in images)
    begun = [number for number, each in enumerate(deck.cells) if each.metadata.slideshow.slide_type in BEGINS]
    for number in begun:
        code, said = deck.cells[number - 1], deck.cells[number]
        if "tags" in said.metadata and code.cell_type == "code" and not code.outputs and said.outputs:
            lines = slides.lines_of(code) + sum(map(slides.output_lines, said.outputs))
            assert lines > slides.LINES, code.source  # else code and output belong on one slide
    shown = " ".join(" ".join(each.source.split()) for each in deck.cells)
    for each in read_cells(ROOT / "notebooks" / "src" / f"{name}.py"):
        for block in solution_blocks(each.source) if each.cell_type == "code" else []:
            whole = " ".join(" ".join(block).split())
            assert whole not in shown or len(whole) < 20  # as the builder sees it: less gives nothing away


@pytest.mark.slow
@pytest.mark.skipif(browser.missing() is not None, reason=str(browser.missing()))
def test_every_deck_in_a_browser(tmp_path):
    """Without an error, with every figure, and with hardly a slide that has to be scrolled."""
    command = [sys.executable, "-m", "kvcourse.cli.main", "workshop", "slides", "--output", str(tmp_path)]
    assert subprocess.run(command, cwd=ROOT).returncode == 0
    look = """
        const tall = [];
        for (const slide of Reveal.getSlides()) {
            const {h, v} = Reveal.getIndices(slide);
            Reveal.slide(h, v);
            if (slide.scrollHeight > slide.clientHeight + 60) tall.push(`${h}.${v}`);
        }
        const broken = [...document.images].filter(image => !image.naturalWidth || !image.alt).length;
        return [Reveal.getHorizontalSlides().length, broken, tall];"""
    with browser.chromium(1280, 860) as driver, browser.served_folder(tmp_path) as url:
        for name in NAMES:
            driver.get(f"{url}{name}.slides.html")
            sections, broken, tall = driver.execute_script(look)
            source = (ROOT / "notebooks" / "src" / f"{name}.py").read_text(encoding="utf-8")
            assert (sections, broken) == (1 + len(re.findall(r"(?m)^# ## ", source)), 0), name
            assert len(tall) <= 1, (name, tall)  # the list of 29 statements
            assert browser.console_errors(driver, url) == []
