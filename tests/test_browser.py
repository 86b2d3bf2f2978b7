"""The course in a real browser: every notebook run in JupyterLab, every widget moved, nothing clipped, nothing broken.

Screenshots go to the folder that KVCOURSE_SCREENSHOTS names, else to a temporary one; its name is printed.
"""

import os
import shutil
from pathlib import Path

import nbformat
import pytest
from browser import chromium, console_errors, explained, jupyterlab, missing, photograph, resize, served_folder
from explorer_alone import explorer_alone, names

from kvcourse.notebooks.build import lesson_paths
from kvcourse.notebooks.source import METADATA

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
NAMES = [path.stem for path in lesson_paths(NOTEBOOKS)]
READ_ONLY = sorted({path.stem for path in NOTEBOOKS.glob("*.ipynb")} - {*NAMES})  # glossary, bibliography
QUICK = [name for name in NAMES if name[:2] in ("00", "02", "05")]
WIDTHS = (1440, 1024)


@pytest.fixture(scope="module")
def driver():
    reason = missing()
    if reason:
        pytest.skip(reason)
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory):
    named = os.environ.get("KVCOURSE_SCREENSHOTS")
    folder = Path(named).expanduser().resolve() if named else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    print(f"\nscreenshots in {folder}")
    return folder


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """The learner's notebooks, copied: a page in the browser saves what it runs."""
    folder = tmp_path_factory.mktemp("course")
    for path in NOTEBOOKS.glob("*.ipynb"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def lab(course, tmp_path_factory):
    """JupyterLab in a room without wifi: the small model takes the chat model's place, which is quick."""
    models = str(tmp_path_factory.mktemp("models"))
    with jupyterlab(course, tmp_path_factory.mktemp("lab"), KVCOURSE_OFFLINE="1", KVCOURSE_MODELS=models) as url:
        yield url


@pytest.fixture(scope="module")
def chat_lab(course, tmp_path_factory):
    """JupyterLab with the chat model."""
    with jupyterlab(course, tmp_path_factory.mktemp("chat_lab")) as url:
        yield url


def opened(driver, url, course, name):
    from notebook_page import NotebookPage

    resize(driver, WIDTHS[0])
    cells = nbformat.read(course / f"{name}.ipynb", as_version=4).cells
    return NotebookPage(driver, url, f"{name}.ipynb", sum(cell.cell_type == "code" for cell in cells))


def faults_to_see(page, screenshots, name):
    """All that is wrong with how a page looks at both widths, and what the console says of it."""
    from notebook_page import SCROLLER

    faults = []
    for width in WIDTHS:
        resize(page.driver, width)
        faults += [f"at {width}: {fault}" for fault in page.too_wide() + page.broken_images()]
        photograph(page.driver, screenshots, f"{name}-{width}", SCROLLER)
    return faults + console_errors(page.driver, page.url)


def learn(driver, url, course, name, screenshots):
    """Do with a lesson what a learner does, and expect nothing wrong in what the browser shows."""
    with explained(driver, screenshots, name):
        page = opened(driver, url, course, name)
        page.run_all(seconds=900)
        assert page.bad_outputs() == []
        controls = page.controls()
        assert controls
        for number, control in enumerate(controls):
            page.move(control)
            driver.save_screenshot(str(screenshots / f"{name}-widget{number}.png"))
        assert faults_to_see(page, screenshots, name) == []
        page.close()


@pytest.mark.parametrize("name", QUICK)
def test_notebook_in_the_browser(driver, lab, course, name, screenshots):
    learn(driver, lab, course, name, screenshots)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in QUICK])
def test_explorer_in_the_browser(driver, lab, course, name, screenshots):
    """The widgets of the other lessons, without the cells that they can do without."""
    alone = explorer_alone(nbformat.read(course / f"{name}.ipynb", as_version=4))
    nbformat.write(alone, course / f"{name}-explorer.ipynb")
    learn(driver, lab, course, f"{name}-explorer", screenshots)


@pytest.mark.parametrize("name", READ_ONLY)
def test_page_to_read_in_the_browser(driver, lab, course, name, screenshots):
    with explained(driver, screenshots, name):
        page = opened(driver, lab, course, name)
        assert faults_to_see(page, screenshots, name) == []
        page.close()


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.parametrize("name", NAMES)
def test_notebook_with_the_chat_model(driver, chat_lab, course, name, screenshots):
    learn(driver, chat_lab, course, name, screenshots)


# --- the eyes themselves -------------------------------------------------------------------------------------

BAD_CELLS = """
import sys
import kvcourse as kv
from IPython.display import HTML, Image, Javascript, display

def same(steps, loud):
    figure, ax = kv.plots.new_figure()
    assert steps < 9, "nine steps"
    ax.set_title(f"loud: {loud}")
    return figure
---
print("careful", file=sys.stderr)
---
kv.widgets.explore(same, loud=False, steps=(1, 8, 1, 2))
---
kv.widgets.explore(same, loud=False, steps=(1, 9, 1, 2))
---
HTML("<div style='width: 3000px'>a table</div>")
---
Image(b"no picture", format="png")
---
display(Javascript("console.error('ours')"))
---
1 / 0
---
print("never reached")
""".split("---\n")


@pytest.fixture(scope="module")
def bad_page(driver, lab, course, screenshots):
    """A notebook with one fault of each kind, run as far as it goes."""
    from notebook_page import NotebookPage

    cells = [nbformat.v4.new_code_cell(text.strip()) for text in BAD_CELLS]
    title = nbformat.v4.new_markdown_cell("# Bad")
    notebook = nbformat.v4.new_notebook(cells=[title, *cells], metadata=METADATA)
    nbformat.write(notebook, course / "bad.ipynb")
    resize(driver, 1024)
    with explained(driver, screenshots, "bad"):
        page = NotebookPage(driver, lab, "bad.ipynb", len(BAD_CELLS))
        page.run_all(seconds=120)
    yield page
    page.close()


def test_bad_outputs_are_seen(bad_page):
    warned, failed = bad_page.bad_outputs()
    assert warned == "careful"
    assert "ZeroDivisionError" in failed


def test_console_errors_are_seen(driver, lab, bad_page):
    assert any("ours" in message for message in console_errors(driver, lab))


def test_what_is_too_wide_is_seen(bad_page):
    assert any("a table" in fault for fault in bad_page.too_wide())


def test_broken_images_are_seen(bad_page):
    assert len(bad_page.broken_images()) == 1


def test_a_widget_that_does_nothing_is_seen(bad_page):
    loud, steps, *_ = bad_page.controls()
    bad_page.move(loud)
    with pytest.raises(AssertionError, match="a figure to change with the slider 'steps"):
        bad_page.move(steps, seconds=2)


def test_a_widget_that_fails_is_seen(bad_page):
    with pytest.raises(AssertionError, match="an explorer shows.*nine steps"):
        bad_page.move(bad_page.controls()[3])


def test_served_folder_and_errors_of_other_hosts(driver, tmp_path):
    script = "<script>console.error('ours')</script><img src='http://other.invalid/x.png'><img src='not_there.png'>"
    (tmp_path / "index.html").write_text(f"<title>A page</title>{script}", encoding="utf-8")
    with served_folder(tmp_path) as url:
        console_errors(driver, url)  # what other pages left
        driver.get(url)
        assert driver.title == "A page"
        errors = console_errors(driver, url)
    network, console = sorted(errors, key=lambda message: "ours" in message)
    assert "ours" in console
    assert network.startswith(f"{url}not_there.png")


def test_failure_names_a_screenshot_and_says_what_stands_there(driver, tmp_path):
    driver.get("data:text/html,<p>the text of the page</p>")
    with pytest.raises(AssertionError, match="(?s)no such.*here-failed.png.*the text of the page"):
        with explained(driver, tmp_path, "here"):
            raise ValueError("no such thing")
    assert (tmp_path / "here-failed.png").read_bytes().startswith(b"\x89PNG")


def program(folder, name, says):
    (folder / name).write_text(f"#!/bin/sh\necho '{says}'\n", encoding="utf-8")
    (folder / name).chmod(0o755)


@pytest.mark.skipif(os.name == "nt", reason="the stand-ins for programs are shell scripts")
def test_browser_and_driver_must_be_there_and_fit(tmp_path, monkeypatch):
    pytest.importorskip("selenium")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no chromedriver" in missing()
    program(tmp_path, "chromedriver", "ChromeDriver 150.0.7871.100 (made up)")
    program(tmp_path, "chromium", "Chromium 149.0.1.2")
    assert "of chromedriver's version" in missing()
    program(tmp_path, "google-chrome", "Google Chrome 150.0.7871.46")
    assert missing() is None


def test_explorer_alone_keeps_what_it_needs():
    cells = [
        "import a, b",
        "c = a.x",
        "d = 1",
        "c = c + d\nd = 7",
        "e = b.y",
        "def draw(n):\n    d = n\n    return c + d",
    ]
    cells += ["kv.widgets.explore(draw)", "print(e)"]
    title = nbformat.v4.new_markdown_cell("# Title")
    notebook = nbformat.v4.new_notebook(cells=[title, *map(nbformat.v4.new_code_cell, cells)], metadata=METADATA)
    kept = [cell.source for cell in explorer_alone(notebook).cells]
    assert kept == ["# Title", *cells[:4], *cells[5:7]]
    assert names("x = y\ny = x + z\nfor i in x:\n    f(i)") == ({"x", "y", "i"}, {"y", "z", "f", "i"})
