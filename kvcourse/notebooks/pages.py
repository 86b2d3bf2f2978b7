"""The two notebooks of text alone, glossary and bibliography, made from the files in `data/`."""

import hashlib
import unicodedata
from collections import defaultdict
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from kvcourse.notebooks.bibliography import KINDS, Source, read_sources, texts
from kvcourse.notebooks.terms import LANGUAGES, Term, read_terms

PAGES = ("glossary", "bibliography")
GLOSSARY = """\
# Glossary

Every term of the course, in English, French and Italian. A name that is not English is the one that engineers use;
where they say the English word, it stands first, with the translation that one also meets. The notebooks link to this
page where a term first occurs, and `kv.glossary("ttft")` prints an entry in any notebook."""
FRENCH = "## Termes français\n\nChaque terme mène à sa définition, donnée aussi en français."
ITALIAN = "## Termini italiani\n\nOgni termine porta alla sua definizione, data anche in italiano."
BIBLIOGRAPHY = """\
# Bibliography

Where methods and numbers of the course come from, and what it takes from each source. What a notebook calls *cited* was
read there and not measured here."""


def read_pages(course: Path, metadata: dict) -> dict[str, NotebookNode]:
    """Each page that the course has a file for in `data/`, by name."""
    data, lessons = course / "data", {path.stem[:2]: path.stem for path in course.glob("notebooks/src/*.py")}
    terms, sources = data / "glossary.toml", data / "bibliography.toml"
    cells = {}
    if terms.is_file():
        cells["glossary"] = glossary_cells(read_terms(terms), lessons)
    if sources.is_file():
        cells["bibliography"] = bibliography_cells(read_sources(sources), texts(course))
    return {name: _notebook(name, texts_of_cells, metadata) for name, texts_of_cells in cells.items()}


def glossary_cells(terms: list[Term], lessons: dict[str, str]) -> list[str]:
    """The glossary as Markdown: an index for each other language, and an entry for each term."""
    entries = [glossary_entry(term, lessons) for term in terms]
    return [GLOSSARY, f"{FRENCH}\n\n{index(terms, 'fr')}", f"{ITALIAN}\n\n{index(terms, 'it')}", "## Terms", *entries]


def index(terms: list[Term], language: str) -> str:
    """All names in a language, a paragraph for each first letter."""
    named = [(_without_accents(name), name, term.anchor) for term in terms for name in term.names[language]]
    letters = defaultdict(list)
    for sorted_as, name, anchor in sorted(named):
        letters[sorted_as[0].upper()].append(f"[{name}](#{anchor})")
    return "\n\n".join(f"**{letter}** {' · '.join(links)}" for letter, links in letters.items())


def _without_accents(name: str) -> str:
    return unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()


def glossary_entry(term: Term, lessons: dict[str, str]) -> str:
    """One entry: heading, names and definitions in every language, and where to read on."""
    lines = [f"### {term.name}"]
    if term.names["en"][1:]:
        lines.append(f"Also: {', '.join(term.names['en'][1:])}")
    lines.append(term.texts["en"])
    for language in list(LANGUAGES)[1:]:
        lines.append(f"*{LANGUAGES[language]}:* **{', '.join(term.names[language])}**. {term.texts[language]}")
    lesson = lessons.get(term.notebook)
    if lesson is None:
        raise ValueError(f"The glossary says that notebook {term.notebook} introduces {term.name!r}; there is none.")
    for number in term.skip:
        if number not in lessons:
            raise ValueError(f"The glossary skips {term.name!r} in notebook {number}; there is none.")
    more = [f"Notebook [{term.notebook}]({lesson}.ipynb)"]
    if term.see:
        more.append("see also " + ", ".join(f"[{name}](#{name.replace(' ', '-')})" for name in term.see))
    if term.source:
        more.append(f"source: [{term.source}](bibliography.ipynb#cell-id={term.source.replace(' ', '-')})")
    return "\n\n".join([*lines, " · ".join(more)])


def bibliography_cells(sources: list[Source], course_texts: dict[str, str]) -> list[str]:
    """The bibliography as Markdown: a part for each kind, an entry for each source."""
    cells = [BIBLIOGRAPHY]
    for kind, title in KINDS.items():
        entries = [bibliography_entry(source, course_texts) for source in sources if source.kind == kind]
        cells += [f"## {title}", *entries] if entries else []
    return cells


def bibliography_entry(source: Source, course_texts: dict[str, str]) -> str:
    """One entry: who, what, where it is found, what the course takes from it, and which of its texts cite it."""
    arxiv = f"arXiv {source.arxiv}" if source.arxiv else ""
    year = "" if str(source.year) in source.venue else source.year  # "SIGMOD 1987" has said it
    found = ", ".join(str(part) for part in (source.venue, arxiv, year) if part)
    title = f"[*{source.title}*]({source.address})" if source.address else f"*{source.title}*"
    cited = [cited_as(place) for place, text in course_texts.items() if source.is_cited_in(text)]
    lines = [
        f"### {source.key}",
        f"{source.authors}: {title}{f', {found}' if found else ''}.",
        source.gives,
        f"Cited in {', '.join(cited)}." if cited else "",
    ]
    return "\n\n".join(line for line in lines if line)


def cited_as(place: str) -> str:
    """A link to a notebook, else the path of a file."""
    path = Path(place)
    return f"[{path.stem[:2]}]({path.stem}.ipynb)" if path.parent.name == "src" else f"`{place}`"


def _notebook(name: str, cells: list[str], metadata: dict) -> NotebookNode:
    made = [nbformat.v4.new_markdown_cell(text, id=_cell_id(name, text)) for text in cells]
    return nbformat.from_dict({"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5})


def _cell_id(name: str, text: str) -> str:
    """That of an entry is its heading, by which links find it."""
    first = text.splitlines()[0]
    if first.startswith("### "):
        return first.removeprefix("### ").replace(" ", "-")
    return hashlib.sha256(f"{name}\0{text}".encode()).hexdigest()[:12]
