"""Spelling of all texts, and their links: those within the course lead somewhere, those out of it are well formed."""

import posixpath
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt

from kvcourse.notebooks.bibliography import read_sources
from kvcourse.notebooks.pages import read_pages
from kvcourse.notebooks.source import METADATA, read_notebooks, read_project
from kvcourse.notebooks.terms import read_terms

ROOT = Path(__file__).resolve().parent.parent
PLACES = ["README.md", "pyproject.toml", "environment.yml", "data", "kvcourse", "notebooks", "tests", ".github", ".ci"]
PROSE = ["README.md", "data/README.md", "kvcourse/README.md", "notebooks/src", "notebooks/instructor"]


# --- spelling ------------------------------------------------------------------------------------------------


def misspelled(*arguments, text=None):
    """What codespell finds in files, or in `text`."""
    command = [sys.executable, "-m", "codespell_lib", *arguments]
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, encoding="utf-8")
    assert not done.stderr and done.returncode in (0, 65), done.stderr
    return done.stdout.splitlines()


def test_all_texts_are_spelled_well():
    assert misspelled(*PLACES) == []


def test_what_learners_read_is_spelled_the_american_way():
    assert misspelled("--builtin", "clear,rare,en-GB_to_en-US", *PROSE) == []


def test_the_english_of_the_glossary_is_spelled_well():
    terms = read_terms(ROOT / "data" / "glossary.toml")
    text = "\n".join(" ".join([*term.names["en"], term.texts["en"]]) for term in terms)
    assert misspelled("--builtin", "clear,rare,en-GB_to_en-US", "-", text=text) == []


def test_a_wrong_word_would_be_found():
    assert "==> receive" in "\n".join(misspelled("-", text="We receive tokens.".replace("ei", "ie")))
    assert misspelled("-", text="Two neighbours.") == []
    assert misspelled("--builtin", "en-GB_to_en-US", "-", text="Two neighbours.") != []


# --- links ---------------------------------------------------------------------------------------------------


def documents():
    """Everything that is read as Markdown, by its path: the pages, and notebooks as their sources give them now."""
    project = read_project(ROOT)
    found = {}
    for path in sorted((ROOT / "notebooks" / "src").glob("*.py")):
        for folder, notebook in zip(("notebooks", "notebooks/solutions"), read_notebooks(path, project), strict=True):
            found[f"{folder}/{path.stem}.ipynb"] = markdown(notebook)
    found |= {f"notebooks/{name}.ipynb": markdown(page) for name, page in read_pages(ROOT, METADATA).items()}
    pages = [
        *(ROOT / "notebooks" / "instructor").glob("*.md"),
        *(ROOT / name for name in PROSE if name.endswith(".md")),
    ]
    return found | {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in pages}


def markdown(notebook):
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def links_and_headings(text):
    """The addresses of links and images, and the texts of headings."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    links = [
        child.attrs.get("href") or child.attrs.get("src")
        for token in tokens
        for child in token.children or []
        if child.type in ("link_open", "image")
    ]
    headings = [
        "".join(child.content for child in token.children)
        for before, token in zip(tokens, tokens[1:], strict=False)
        if before.type == "heading_open"
    ]
    return links, headings


def anchor(heading, notebook):
    """By what a heading is linked: in a notebook JupyterLab's way (the cell's id is the same), in a page GitHub's."""
    if notebook:
        return heading.replace(" ", "-")
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def broken(documents, root):
    """Each link within the course that leads to no file or no heading, with the page it is on."""
    parsed = {path: links_and_headings(text) for path, text in documents.items()}
    faults = []
    for path, (links, _) in parsed.items():
        for link in links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (
                posixpath.normpath(posixpath.join(posixpath.dirname(path), unquote(parts.path))) if parts.path else path
            )
            inside = target.startswith("notebooks/") or not path.endswith(".ipynb")  # all that JupyterLab shows
            fragments = {anchor(heading, target.endswith(".ipynb")) for heading in parsed.get(target, ([], []))[1]}
            if not inside or not (target in documents or (root / target).exists()):
                faults.append(f"{path}: {link}")
            elif parts.fragment and unquote(parts.fragment).removeprefix("cell-id=") not in fragments:
                faults.append(f"{path}: {link}")
    return faults


@pytest.fixture(scope="module")
def course():
    return documents()


def test_every_link_within_the_course_leads_to_a_file_and_a_heading(course):
    assert broken(course, ROOT) == []
    assert sum(len(re.findall(r"\]\([^)]*#", text)) for text in course.values()) > 500


@pytest.mark.parametrize(
    ("link", "found"),
    [
        ("b.ipynb#KV-cache", True),
        ("b.ipynb#cell-id=KV-cache", True),
        ("b.ipynb#cell-id=kv-cache", False),
        ("b.ipynb", True),
        ("#A-Title", True),
        ("../notebooks/b.ipynb", True),
        ("https://example.org/x#y", True),
        ("b.ipynb#kv-cache", False),
        ("c.ipynb", False),
        ("#a-title", False),
        ("../README.md", False),  # it is there, but JupyterLab shows the folder of the notebooks only
    ],
)
def test_a_broken_link_is_seen(tmp_path, link, found):
    pages = {
        "notebooks/a.ipynb": f"# A Title\n\n- [x]({link})",
        "notebooks/b.ipynb": "### KV cache",
        "README.md": "# R",
    }
    assert broken(pages, tmp_path) == ([] if found else [f"notebooks/a.ipynb: {link}"])


@pytest.mark.parametrize(
    ("link", "found"), [("#the-map-it-is", True), ("#The-map:-it-is", False), ("data/no.md", False)]
)
def test_a_broken_link_of_a_page_is_seen(tmp_path, link, found):
    assert broken({"README.md": f"# The map: it is\n\n[x]({link})"}, tmp_path) == (
        [] if found else [f"README.md: {link}"]
    )


def test_every_link_out_of_the_course_is_well_formed(course):
    addresses = {link for text in course.values() for link in links_and_headings(text)[0] if urlsplit(link).scheme}
    addresses |= {source.address for source in read_sources(ROOT / "data" / "bibliography.toml") if source.address}
    assert len(addresses) > 100
    assert not {address for address in addresses if not well_formed(address)}


def well_formed(address):
    parts = urlsplit(address)
    return (
        parts.scheme == "https"
        and re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc)
        and not re.search(r"[\s<>]", address)
    )


def test_a_malformed_address_is_seen():
    assert well_formed("https://arxiv.org/abs/2309.06180")
    for address in (
        "http://arxiv.org/abs",
        "https://arxiv/abs",
        "https:/arxiv.org",
        "https://arxiv.org/a b",
        "ftp://a.b/",
    ):
        assert not well_formed(address)
