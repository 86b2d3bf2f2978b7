"""The bibliography: every source that a text cites is in it, every entry is cited, and it is built as a notebook."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import nbformat
import pytest

from kvcourse.notebooks.bibliography import ARXIV, Source, one_line, read_sources, texts, unlisted
from kvcourse.notebooks.pages import bibliography_entry, read_pages
from kvcourse.notebooks.source import METADATA

ROOT = Path(__file__).resolve().parent.parent
SOURCES = read_sources(ROOT / "data" / "bibliography.toml")
TEXTS = texts(ROOT)
ADDRESS = re.compile(r"https://[^\s()<>\[\]\"'`{}]+[^\s()<>\[\]\"'`{}.,;:]")
# Not sources: the course itself, examples, where a package is downloaded, and what an error message explains.
OWN = ("https://github.com/kvcourse/", "https://colab.research.google.com/", "https://mybinder.org/v2/gh/kvcourse/")
OWN += ("https://download.pytorch.org/",)
OWN += ("https://huggingface.co/owner", "https://git-lfs", "https://example.org")
BEGINNINGS = {"https://arxiv.org/abs/", "https://github.com/", "https://huggingface.co/"}  # code puts the rest behind


def test_every_arxiv_number_in_the_course_is_in_the_bibliography():
    assert unlisted(TEXTS, SOURCES) == []
    assert (
        unlisted({"a.md": "As in arXiv 9912.12345, 2309.06180."}, SOURCES) == []
    )  # not a number of arXiv; a known one
    assert unlisted({"a.md": "See arXiv 2309.06181."}, SOURCES) == ["a.md: arXiv 2309.06181"]


def test_every_address_in_the_course_is_in_the_bibliography():
    known = {source.address for source in SOURCES}
    places = [place for place in TEXTS if not place.startswith("notebooks/instructor")]  # they link to how-tos
    cited = {(place, address) for place in places for address in ADDRESS.findall(TEXTS[place])}
    assert len(cited) > 40
    foreign = {(place, address) for place, address in cited if not address.startswith(OWN)}
    assert not {(place, address) for place, address in foreign if not (known | BEGINNINGS) & {address, address + "/"}}


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.key)
def test_every_entry_is_cited_and_says_where_it_is_found(source):
    assert [place for place, text in TEXTS.items() if source.is_cited_in(text)]
    address = urlsplit(source.address)
    assert address.scheme == "https" and "." in address.netloc or source.key == "Zipf 1935"  # a book
    assert not source.arxiv or ARXIV.fullmatch(source.arxiv)
    assert source.gives.endswith(".") and source.gives[0].isupper() or source.gives[0].isdigit()
    assert re.fullmatch(r"[\w -]+", source.key), "no id of a cell has other signs"


@pytest.mark.parametrize("source", [source for source in SOURCES if source.arxiv], ids=lambda source: source.key)
def test_the_year_is_that_of_the_arxiv_number(source):
    assert source.year == 2000 + int(source.arxiv[:2])
    if source.key[-5:-1].isdigit() or source.key[-4:].isdigit():
        assert re.search(r"(\d{4})[a-z]?$", source.key)[1] == str(source.year)


def test_a_citation_broken_over_two_lines_is_found():
    assert one_line("# as in the\n#   paper (arXiv\n# 2309.06180)") == "# as in the paper (arXiv 2309.06180)"
    source = Source("A 2020", "paper", "A", "T", "G.", phrases=("in the paper",))
    assert source.is_cited_in(one_line("# in the\n#   paper")) and not source.is_cited_in("in a paper")


GOOD = '[[source]]\nkey = "A 2020"\nkind = "paper"\nauthors = "A"\ntitle = "T"\nyear = 2020\narxiv = "2001.00001"\n'
GOOD += 'gives = "Much."\n'


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "", None),
        ('authors = "A"\n', "", "the entry 'A 2020' must have"),
        ("year", "date", "the entry 'A 2020' must have"),
        ('"paper"', '"book"', "is of kind 'book', which must be one of paper, blog"),
        ('arxiv = "2001.00001"\n', "", "must say where it is found"),
        ("[[source]]", GOOD + "[[source]]", r"has a key twice: \['A 2020', 'A 2020'\]"),
        ("[[source]]", "[[source", "is damaged"),
    ],
)
def test_what_is_wrong_in_an_entry_is_said(tmp_path, old, new, message):
    path = tmp_path / "bibliography.toml"
    path.write_text(GOOD.replace(old, new, 1))
    if message is None:
        assert read_sources(path)[0].address == "https://arxiv.org/abs/2001.00001"
        return
    with pytest.raises(ValueError, match=message):
        read_sources(path)


def test_an_entry_names_the_texts_that_cite_it():
    source = Source("A 2020", "paper", "A. B", "T", "Much.", 2020, "ICML 2020", "2001.00001")
    cited = {"notebooks/src/02_x.py": "arXiv 2001.00001", "kvcourse/a.py": "2001.00001", "kvcourse/b.py": "2001.00002"}
    assert bibliography_entry(source, cited).split("\n\n") == [
        "### A 2020",
        "A. B: [*T*](https://arxiv.org/abs/2001.00001), ICML 2020, arXiv 2001.00001.",
        "Much.",
        "Cited in [02](02_x.ipynb), `kvcourse/a.py`.",
    ]


@pytest.mark.parametrize(("venue", "said"), [("SIGMOD 1987", "SIGMOD 1987."), ("Later 1990", "Later 1990, 1987.")])
def test_a_year_that_the_venue_has_is_not_said_again(venue, said):
    source = Source("A 1987", "paper", "A", "T", "Much.", 1987, venue, url="https://a.b")
    assert bibliography_entry(source, {}).split("\n\n")[1] == f"A: [*T*](https://a.b), {said}"


def test_all_authors_are_named_or_others_are_said_to_be():
    [meng] = [source for source in SOURCES if source.key == "Meng 2025"]
    assert meng.authors.endswith("and others")


def test_what_providers_keep_at_least_is_cited_from_their_own_pages():
    [place] = [place for place in TEXTS if place.endswith("07_prefix_caching.py")]
    cited = {source.key for source in SOURCES if source.is_cited_in(TEXTS[place])}
    assert {"OpenAI caching", "Anthropic caching"} <= cited and not {key for key in cited if "AssemblyAI" in key}


def test_the_page_has_an_entry_for_each_source():
    page = read_pages(ROOT, METADATA)["bibliography"]
    nbformat.validate(page)
    text = "\n".join(cell.source for cell in page.cells)
    assert re.findall(r"^### (.+)$", text, re.M) == [source.key for source in SOURCES]
    assert text.count("Cited in ") == len(SOURCES)
