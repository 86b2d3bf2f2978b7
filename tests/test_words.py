"""Spelling of all texts, and their links: those within the course lead somewhere, those out of it are well formed."""

import posixpath
import re
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt

from kvcourse.notebooks.bibliography import read_sources
from kvcourse.notebooks.pages import read_pages
from kvcourse.notebooks.source import METADATA, read_notebooks, read_project
from kvcourse.notebooks.terms import read_terms
from kvcourse.site.links import github_anchor, jupyterlab_anchor

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


# --- what the numbers have contradicted --------------------------------------------------------------------------

CONTRADICTED = [
    ("03", "no program is faster"),  # llama.cpp read 28% faster than the ceiling
    ("03", "what no program can beat"),
    ("10", "a few percent below zero says nothing"),
    ("09", "a third of the text"),  # the line above it printed 40%
    ("00", "repeated several times"),  # two copies on a CPU
]


@pytest.mark.parametrize(("number", "phrase"), CONTRADICTED)
def test_what_a_number_has_contradicted_is_not_said_again(course, number, phrase):
    [text] = [text for path, text in course.items() if path.startswith(f"notebooks/{number}_")]
    assert phrase not in " ".join(text.split())


def run_cell(number, mark, **names):
    """Run the code cell of a notebook that has `mark` in it, with `names` in place of what the cells before it made."""
    [path] = (ROOT / "notebooks" / "src").glob(f"{number}_*.py")
    [code] = [cell.source for cell in read_notebooks(path, read_project(ROOT)).solution.cells if mark in cell.source]
    names["kv"] = MagicMock()
    names["kv"].bytes_moved.return_value.cache_read = 2e6
    exec(code, names)
    return names["kv"]


@pytest.mark.parametrize(
    ("gap", "said"),
    [
        (0.0500, "50.0 ms between tokens,  46% of it overhead\n"),
        (0.0200, "faster than the ceiling: 27.0 GB a second, not 20.0\n"),
    ],
)
def test_a_program_that_is_faster_than_the_ceiling_is_called_so(capsys, gap, said):
    names = {"statistics": statistics, "lengths": [100], "new": 16, "config": None, "lm": None, "files": []}
    names |= {"ceilings": SimpleNamespace(bytes_per_second=20e9), "weights_read": lambda _: 538e6, "model": None}
    run_cell("10", "reading = weights_time", course={}, others={"a program": {"gap": gap}}, model_file=None, **names)
    out = capsys.readouterr().out
    assert out.endswith(said) and "-" not in out


@pytest.mark.parametrize(("took", "words"), [(0.020, True), (0.030, False)])
def test_a_share_of_the_bound_over_100_is_explained(capsys, took, words):
    run_cell("10", "fast_share = ", bound=0.025, pace={"fast": took}, last="fast")
    assert ("Over 100%" in capsys.readouterr().out) == words


def test_the_map_does_not_speak_of_others_where_all_are_there():
    shown = run_cell("00", "course_map").plots.show.call_args.kwargs["alt"]
    assert shown.endswith("08, 09, 10.")


def test_a_part_that_seems_more_than_its_whole_is_called_noise():
    [path] = (ROOT / "notebooks" / "src").glob("03_*.py")
    code = path.read_text(encoding="utf-8")
    start = code.index("def jitter(share)")
    exec(code[start : code.index("\n\n\n", start)], names := {})
    assert "noise" in names["jitter"](1.03) and names["jitter"](1.004) == names["jitter"](0.9) == ""


def test_the_conditions_of_a_verdict_are_one_sentence():
    for path in (ROOT / "notebooks" / "src").glob("*.py"):
        assert not re.search(r"join\(f\" But \{", path.read_text(encoding="utf-8")), path.stem


def test_no_heading_says_what_is_to_be_guessed_below_it(course):
    headings = set(links_and_headings(course["notebooks/05_sliding_window.ipynb"])[1])
    assert not headings & {"Memory flat, time flat", "What sinks do not give"}
    assert {"What does the ring save?", "Does it remember?"} <= headings


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
            anchor = jupyterlab_anchor if target.endswith(".ipynb") else github_anchor  # a cell's id is JupyterLab's
            fragments = {anchor(heading) for heading in parsed.get(target, ([], []))[1]}
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
