"""The sources of the course: `data/bibliography.toml`, and where its texts cite them."""

import re
from dataclasses import dataclass
from pathlib import Path

from kvcourse.notebooks.terms import read_toml

KINDS = {
    "paper": "Papers",
    "blog": "Reports and posts",
    "documentation": "Documentation and programs",
    "model": "Models and data sheets",
    "prices": "Price lists",
    "issue": "Issues and pull requests",
}
ARXIV = re.compile(r"(?<![\d.])(?:0[7-9]|[12]\d)(?:0[1-9]|1[0-2])\.\d{4,5}(?![\d.]*\d)")
NEEDED = {"key", "kind", "authors", "title", "gives"}
FIELDS = NEEDED | {"year", "venue", "arxiv", "url", "phrases"}


@dataclass(frozen=True)
class Source:
    """One entry; it is cited by its arXiv number, its address, or one of the `phrases` by which texts call it."""

    key: str  # such as "Kwon 2023"
    kind: str  # one of KINDS
    authors: str
    title: str
    gives: str  # what the course takes from it
    year: int | None = None  # of the first version; a page that changes has none
    venue: str = ""
    arxiv: str = ""
    url: str = ""
    phrases: tuple[str, ...] = ()

    @property
    def anchor(self) -> str:
        return self.key.replace(" ", "-")

    @property
    def address(self) -> str:
        """Where it is on the web; "" for a book."""
        return self.url or (f"https://arxiv.org/abs/{self.arxiv}" if self.arxiv else "")

    def is_cited_in(self, text: str) -> bool:
        """Whether `text`, with its line ends made blanks, names this source."""
        return any(mark in text for mark in (self.arxiv, self.url, *self.phrases) if mark)


def read_sources(path: Path) -> list[Source]:
    """The entries of a bibliography, by kind and key. Raises `ValueError` naming the entry that is wrong."""
    sources = []
    for entry in read_toml(path).get("source", []):
        what = f"{path}: the entry {entry.get('key', entry)!r}"
        if NEEDED - set(entry) or set(entry) - FIELDS:
            raise ValueError(f"{what} must have {sorted(NEEDED)} and may have {sorted(FIELDS - NEEDED)}")
        if entry["kind"] not in KINDS:
            raise ValueError(f"{what} is of kind {entry['kind']!r}, which must be one of {', '.join(KINDS)}")
        if not {"arxiv", "url", "venue"} & set(entry):
            raise ValueError(f"{what} must say where it is found: an arxiv number, a url or, for a book, the venue")
        sources.append(Source(**{**entry, "phrases": tuple(entry.get("phrases", ()))}))
    keys = [source.key for source in sources]
    if len(set(keys)) < len(keys):
        raise ValueError(f"{path} has a key twice: {sorted(key for key in keys if keys.count(key) > 1)}")
    return sorted(sources, key=lambda source: (list(KINDS).index(source.kind), source.key.lower()))


def texts(course: Path) -> dict[str, str]:
    """Every text that may cite something, by its path in the course, each in one line."""
    paths = [course / name for name in ("README.md", "data/README.md", "kvcourse/README.md")]
    for folder, names in (("notebooks/src", "*.py"), ("notebooks/instructor", "*.md"), ("kvcourse", "**/*.py")):
        paths += (course / folder).glob(names)
    return {
        path.relative_to(course).as_posix(): one_line(path.read_text(encoding="utf-8"))
        for path in sorted(paths)
        if path.is_file()
    }


def one_line(text: str) -> str:
    """`text` with comment marks and line ends made blanks, so that what is broken over two lines is found."""
    return " ".join(re.sub(r"\n\s*#", "\n", text).split())


def unlisted(course_texts: dict[str, str], sources: list[Source]) -> list[str]:
    """Each arXiv number that a text cites and the bibliography lacks, with the place."""
    known = {source.arxiv for source in sources}
    return [
        f"{place}: arXiv {number}"
        for place, text in course_texts.items()
        for number in sorted(set(ARXIV.findall(text)) - known)
    ]
