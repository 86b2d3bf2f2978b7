"""`kvcourse site`: web pages of the worked notebooks, complete without the network and without a broken link."""

import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from site_pages import faults, read_page

from kvcourse.cli.main import main
from kvcourse.notebooks.source import METADATA, read_project
from kvcourse.site.build import build
from kvcourse.site.links import address, anchors
from kvcourse.site.pages import LESSONS, Page, Site, find_site

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = "https://github.com/kvcourse/kvcourse"
NAME = "07_tiny"
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/kvcourse/kvcourse/blob/main/notebooks/solutions/07_tiny.ipynb)"
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
PROJECT = f'[project]\nversion = "0.1.0"\n[project.urls]\nRepository = "{REPOSITORY}"\n'


def figure(alt: str):
    return new_output("display_data", {"image/png": DOT}, metadata={"image/png": {"alt": alt}})


def worked() -> nbformat.NotebookNode:
    """A worked notebook with all that a page must get right."""
    printed = new_output("stream", name="stdout", text="only once printed\n")
    solution = "def half(x):\n    # SOLUTION\n    return x / 2\n    # END SOLUTION"
    cells = [
        new_markdown_cell(f"# 7. Tiny\n\n{BADGE}"),
        new_code_cell("print('x')", execution_count=1, outputs=[printed, figure("A dot, all alone.")]),
        new_markdown_cell("See [prefill](../glossary.ipynb#KV-cache) and [the code](../../kvcourse/model.py)."),
        new_markdown_cell("Either $2 and $3, or $x^2$:\n\n$$\\frac{a}{b}$$\n\n% no comment, {no}`role`"),
        new_markdown_cell("<details><summary>Hint</summary>\n\nAn open secret.\n\n</details>"),
        new_code_cell(solution, metadata={"tags": ["exercise"]}),
    ]
    return new_notebook(cells=cells, metadata=METADATA)


def write(course: Path, notebook, path=f"notebooks/solutions/{NAME}.ipynb") -> Path:
    file = course / path
    file.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, file)
    return file


@pytest.fixture
def course(tmp_path) -> Path:
    course = tmp_path / "a course, with spaces"
    (course / "notebooks" / "src").mkdir(parents=True)
    write(course, worked())
    write(course, new_notebook(cells=[]), f"notebooks/{NAME}.ipynb")
    glossary = [new_markdown_cell("# Glossary\n\n[KV cache](#KV-cache)"), new_markdown_cell("### KV cache\n\nKept.")]
    write(course, new_notebook(cells=glossary), "notebooks/glossary.ipynb")
    (course / "kvcourse").mkdir()
    (course / "kvcourse" / "model.py").touch()
    (course / "pyproject.toml").write_text(PROJECT)
    (course / "README.md").write_text(
        f"# Tiny\n\n[lesson](notebooks/{NAME}.ipynb), [solutions](notebooks/solutions), [below](#a-part)\n\n## A part\n"
    )
    kit = course / "notebooks" / "instructor"
    kit.mkdir()
    (kit / "README.md").write_text("# The kit\n\n[Tiny](07_tiny.md)\n")
    (kit / "07_tiny.md").write_text(f"# 07\n\n[worked](../solutions/{NAME}.ipynb#7.-Tiny), [kit](README.md)\n")
    return course


def page(folder: Path, name: str):
    return read_page(folder / f"{name}.html")


def links(tag) -> dict[str, str]:
    return {link.get_text(): link["href"] for link in tag.find_all("a", href=True)}


def test_every_page_is_there_and_nothing_is_broken(course, tmp_path):
    folder = tmp_path / "a site"
    pages = build(course, folder)
    names = ["index", f"notebooks/{NAME}", "glossary", "instructor/index", "instructor/07_tiny"]
    assert [page.name for page in pages] == names
    assert faults(folder) == []
    shown = links(page(folder, "index").find(class_="sidebar-tree"))
    assert shown == dict(
        zip(["7. Tiny", "Glossary", "The kit", "07"], [f"{name}.html" for name in names[1:]], strict=True)
    )


def test_a_lesson_is_the_worked_notebook_as_it_is_stored(course, tmp_path):
    build(course, tmp_path / "site")
    article = page(tmp_path / "site", f"notebooks/{NAME}").article
    text = article.get_text()
    for words in (
        "print('x')",
        "only once printed",
        "Either $2 and $3, or",
        "% no comment, {no}role",
        "An open secret.",
    ):
        assert words in text
    [image] = article.find_all("img")
    assert image["alt"] == "A dot, all alone."
    assert [formula.name for formula in article.find_all(["mfrac", "msup"])] == ["msup", "mfrac"]
    assert article.details.summary.get_text() == "Hint"
    shown = links(article)
    assert (
        shown["Open in Colab"]
        == f"https://colab.research.google.com/github/kvcourse/kvcourse/blob/main/notebooks/{NAME}.ipynb"
    )
    assert shown["learner’s notebook"] == f"{REPOSITORY}/blob/main/notebooks/{NAME}.ipynb"
    assert shown["prefill"] == "../glossary.html#KV-cache"
    assert shown["the code"] == f"{REPOSITORY}/blob/main/kvcourse/model.py"


def test_solutions_are_folded_and_nothing_else_is(course, tmp_path):
    build(course, tmp_path / "site")
    article = page(tmp_path / "site", f"notebooks/{NAME}").article
    folded = article.select("details.hide")
    assert [each.summary.get_text(strip=True) for each in folded] == ["Show a solutionHide the solution"]
    assert "return x / 2" in folded[0].get_text() and "open" not in folded[0].attrs
    assert "print('x')" not in folded[0].get_text()


def test_the_search_knows_lessons_and_not_how_they_are_taught(course, tmp_path):
    write(course, new_notebook(cells=[new_markdown_cell("# Tiny\n\nPelicans.")]), "notebooks/glossary.ipynb")
    (course / "notebooks" / "instructor" / "07_tiny.md").write_text("# Teaching 07: Walruses\n\nOtters.\n")
    build(course, tmp_path / "site")
    index = (tmp_path / "site" / "searchindex.js").read_text()
    assert "pelican" in index
    assert "otter" not in index and "walrus" not in index.lower()
    assert page(tmp_path / "site", "instructor/07_tiny").h1.get_text().startswith("Teaching 07: Walruses")


def test_the_same_course_gives_the_same_bytes(course, tmp_path):
    def files(name: str) -> dict[str, bytes]:
        build(course, tmp_path / name)
        return {
            str(p.relative_to(tmp_path / name)): p.read_bytes() for p in (tmp_path / name).rglob("*") if p.is_file()
        }

    first = files("one")
    assert files("two") == first
    (course / "README.md").write_text("# Another\n")
    assert files("two") != first


def test_a_former_site_is_replaced_and_nothing_else(course, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(course)
    folder = tmp_path / "site"
    assert main(["site", "--output", str(folder)]) == 0
    assert capsys.readouterr().out == f"5 pages: open {folder / 'index.html'}\n"
    (folder / "stale.html").touch()
    (course / "README.md").write_text("# Broken\n\n[nowhere](no/such.md)\n")
    assert main(["site", "--output", str(folder)]) == 1
    assert "README.md links to no/such.md, which is not in the course" in capsys.readouterr().err
    assert (folder / "stale.html").exists() and "<h1>Tiny" in (folder / "index.html").read_text()
    (course / "README.md").write_text("# Mended\n")
    assert main(["site", "07", "--output", str(folder)]) == 0
    assert not (folder / "stale.html").exists() and "<h1>Mended" in (folder / "index.html").read_text()


def test_a_folder_that_is_no_former_site_is_refused(course, tmp_path):
    kept = tmp_path / "mine" / "kept.txt"
    kept.parent.mkdir()
    kept.touch()
    with pytest.raises(ValueError, match="mine holds files that are no former site: give an empty or new folder"):
        build(course, kept.parent)
    with pytest.raises(ValueError, match="kept.txt is a file, and a site is a folder"):
        build(course, kept)
    assert list(kept.parent.iterdir()) == [kept]


def test_what_is_wrong_in_a_notebook_is_said(course, tmp_path):
    notebook = worked()
    notebook.cells[1].outputs.append(figure("Another dot."))
    write(course, notebook)
    with pytest.raises(ValueError, match=r"07_tiny, cell 2 \(print\('x'\)\) shows figures with different alt texts"):
        build(course, tmp_path / "site")
    notebook = worked()
    notebook.cells[3].source = "$$\\nosuch{a}$$"
    write(course, notebook)
    with pytest.raises(RuntimeError, match=r"no MathML for the formula '\\\\nosuch\{a\}'"):
        build(course, tmp_path / "site")
    notebook.cells[1].update(outputs=[], execution_count=None)
    write(course, notebook)
    with pytest.raises(ValueError, match="No outputs to show of 07_tiny: run `kvcourse notebooks` first"):
        build(course, tmp_path / "site")
    with pytest.raises(ValueError, match="there is no notebook '08'; the notebooks are: 07_tiny"):
        build(course, tmp_path / "site", ["08"])
    with pytest.raises(ValueError, match="No outputs to show of any notebook"):
        build(tmp_path / "nothing", tmp_path / "site")


def test_a_missing_library_is_named(course, tmp_path, monkeypatch):
    monkeypatch.setattr("kvcourse.site.build.NEEDED", ("sphinx", "no_such_library"))
    with pytest.raises(RuntimeError, match=r"built with no_such_library, not installed here: .*\[site\]"):
        build(course, tmp_path / "site")


@pytest.mark.parametrize(
    "link, expected",
    [
        ("https://arxiv.org/abs/1#x", "https://arxiv.org/abs/1#x"),
        ("mailto:a@b.org", "mailto:a@b.org"),
        ("#here", "#here"),
        (f"../{NAME}.ipynb", f"{NAME}.html"),
        (f"{NAME}.ipynb#a", f"{NAME}.html#a"),
        ("../glossary.ipynb#KV-cache", "../glossary.html#KV-cache"),
        ("../instructor/README.md", "../instructor/index.html"),
        ("../../README.md", "../index.html"),
        ("../../kvcourse/", f"{REPOSITORY}/tree/main/kvcourse"),
        ("../../kvcourse/model.py#L3", f"{REPOSITORY}/blob/main/kvcourse/model.py#L3"),
    ],
)
def test_where_a_link_of_a_lesson_leads(course, link, expected):
    lesson = Page(f"notebooks/{NAME}", f"notebooks/solutions/{NAME}.ipynb", LESSONS)
    assert address(link, lesson, find_site(course)) == expected


@pytest.mark.parametrize("link", ["../no.ipynb", "../../../outside.md", "/etc/passwd"])
def test_a_link_to_nothing_is_refused(course, link):
    lesson = Page(f"notebooks/{NAME}", f"notebooks/solutions/{NAME}.ipynb", LESSONS)
    with pytest.raises(ValueError, match=f"{NAME}.ipynb links to {re.escape(link)}, which is not in the course"):
        address(link, lesson, find_site(course))


def test_a_lesson_that_is_left_out_is_linked_in_the_repository(course):
    start = Page("index", "README.md", "")
    site = Site(course, REPOSITORY, [start])
    assert address(f"notebooks/{NAME}.ipynb", start, site) == f"{REPOSITORY}/blob/main/notebooks/{NAME}.ipynb"


def test_anchors_are_those_of_github_and_jupyterlab():
    assert anchors("A room without wifi") == ["a-room-without-wifi", "A-room-without-wifi"]
    assert anchors("Where's 0.237 of 16?") == ["wheres-0237-of-16", "Where's-0.237-of-16?"]


@pytest.mark.parametrize(
    "html, fault",
    [
        ('<a href="no.html">', "no.html leads nowhere"),
        ('<a href="glossary.html#no">', "glossary.html#no: no such place"),
        ('<a href="#no">', "#no: no such place"),
        ('<a href="ftp://x/y">', "ftp://x/y is loaded from elsewhere"),
        ('<img src="_static/icon.svg">', "no alt text for _static/icon.svg"),
        ('<img alt="x" src="https://x.org/a.svg">', "https://x.org/a.svg is loaded from elsewhere"),
        ('<script src="https://x.org/a.js"></script>', "https://x.org/a.js is loaded from elsewhere"),
    ],
)
def test_the_check_of_pages_can_go_red(tmp_path, html, fault):
    (tmp_path / "_static").mkdir()
    (tmp_path / "_static" / "icon.svg").touch()
    (tmp_path / "glossary.html").write_text('<p id="KV-cache">')
    (tmp_path / "index.html").write_text(f'<p id="here"><a href="glossary.html#KV-cache"><a href="#here">{html}')
    assert faults(tmp_path) == [f"index.html: {fault}"]


def test_the_check_of_styles_can_go_red(tmp_path):
    (tmp_path / "a.css").write_text("a { background: url('data:image/svg+xml;http://www.w3.org') }")
    assert faults(tmp_path) == []
    (tmp_path / "a.css").write_text("@import '//fonts.org/x'; a { color: red }")
    assert faults(tmp_path) == ["a.css: loads from elsewhere"]


def require_as_stored(folder: Path, names: list[str]) -> None:
    """Nothing is broken; each lesson shows its figures with their words, what its cells printed, and its links."""
    assert faults(folder) == []
    repository = read_project(ROOT).repository
    for name in names:
        notebook = nbformat.read(ROOT / "notebooks" / "solutions" / f"{name}.ipynb", 4)
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        article = page(folder, f"notebooks/{name}").article
        alts = [output.metadata["image/png"]["alt"] for output in outputs if "image/png" in output.get("data", {})]
        assert alts and [image["alt"] for image in article.find_all("img")] == alts
        text = " ".join(article.get_text().split())
        missing = [
            out.text for out in outputs if out.output_type == "stream" and " ".join(out.text.split()) not in text
        ]
        assert not missing
        assert "$$" not in text
        shown = links(article)
        badge = re.search(r"badge\.svg\)\]\(([^)]+)\)", notebook.cells[0].source)[1]
        assert shown["Open in Colab"] == badge.replace("/solutions/", "/") != badge
        exercises = [cell for cell in notebook.cells if "exercise" in cell.metadata.get("tags", [])]
        assert len(article.select("details.hide")) == len(exercises) > 0
        assert shown["learner’s notebook"] == f"{repository}/blob/main/notebooks/{name}.ipynb"


def test_two_lessons_of_the_course(tmp_path):
    build(ROOT, tmp_path / "site", ["00", "03"])
    require_as_stored(tmp_path / "site", ["00_start_here", "03_prefill_and_decode"])


@pytest.mark.slow
def test_the_whole_course(tmp_path):
    pages = build(ROOT, tmp_path / "site")
    names = [path.stem for path in sorted((ROOT / "notebooks" / "solutions").glob("*.ipynb"))]
    assert [Path(page.name).name for page in pages if page.section == LESSONS] == names
    require_as_stored(tmp_path / "site", names)
