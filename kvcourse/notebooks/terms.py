"""The words of the course in three languages: `data/glossary.toml`, read, searched and shown."""

import difflib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from kvcourse.paths import data_folder

LANGUAGES = {"en": "English", "fr": "français", "it": "italiano"}
FIELDS = {*LANGUAGES, "text", "notebook", "see", "source", "forms", "everyday", "skip"}


@dataclass(frozen=True)
class Term:
    """One entry: in each language its names, the usual one first, and a definition."""

    names: dict[str, tuple[str, ...]]
    texts: dict[str, str]
    notebook: str  # the number of the notebook that introduces it
    see: tuple[str, ...] = ()  # names of related terms
    source: str | None = None  # the key in the bibliography of who coined it
    forms: tuple[str, ...] = ()  # other words of the prose that mean it ("evicted" for "eviction")
    everyday: bool = False  # linked in its own notebook alone, since the word is everywhere
    skip: tuple[str, ...] = ()  # numbers of notebooks in which the word first means something else

    @property
    def name(self) -> str:
        return self.names["en"][0]

    @property
    def anchor(self) -> str:
        """What links call the entry's heading, in JupyterLab and nbconvert alike; the id of its cell, too."""
        return self.name.replace(" ", "-")


def read_terms(path: Path) -> list[Term]:
    """The entries of a glossary, by English name. Raises `ValueError` naming the entry that is wrong."""
    entries = read_toml(path).get("term", [])
    terms = sorted((_term(entry, path) for entry in entries), key=lambda term: term.name.lower())
    names = {term.name for term in terms}
    if len(names) < len(terms):
        raise ValueError(f"{path} has an English name twice: {[term.name for term in terms]}")
    for term in terms:
        unknown = [name for name in term.see if name not in names or name == term.name]
        if unknown:
            raise ValueError(f"{path}: {term.name!r} refers to {unknown}, which must be other entries' English names")
    return terms


def read_toml(path: Path) -> dict:
    """A TOML file. Raises `ValueError` naming the file when it is damaged."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _term(entry: dict, path: Path) -> Term:
    what = f"{path}: the entry {entry.get('en', entry)!r}"
    if set(entry) - FIELDS:
        raise ValueError(f"{what} has unknown fields {sorted(set(entry) - FIELDS)}; it may have {sorted(FIELDS)}")
    for language in LANGUAGES:
        if not entry.get(language) or not entry.get("text", {}).get(language, "").strip():
            raise ValueError(f"{what} must have a name and a text in {', '.join(LANGUAGES)}, but lacks {language!r}")
    if not re.fullmatch(r"\d\d", entry.get("notebook", "")):
        raise ValueError(f"{what} must name the notebook that introduces it by its number, such as '02'")
    return Term(
        names={language: tuple(entry[language]) for language in LANGUAGES},
        texts={language: entry["text"][language].strip() for language in LANGUAGES},
        notebook=entry["notebook"],
        see=tuple(entry.get("see", ())),
        source=entry.get("source"),
        forms=tuple(entry.get("forms", ())),
        everyday=entry.get("everyday", False),
        skip=tuple(entry.get("skip", ())),
    )


def find(terms: list[Term], word: str) -> Term:
    """The entry of a word in any of the languages. Raises `ValueError` with the closest words when there is none."""
    known = {name.lower(): term for term in reversed(terms) for names in term.names.values() for name in names}
    known |= {term.name.lower(): term for term in terms}
    if word.lower() in known:
        return known[word.lower()]
    close = difflib.get_close_matches(word.lower(), known, n=5)
    hint = f"close to it are: {', '.join(close)}" if close else f"it has {len(terms)} terms, such as {terms[0].name}"
    raise ValueError(f"There is no {word!r} in the glossary; {hint}.")


def glossary(word: str) -> None:
    """Print the entry of a word, English, French or Italian: `kv.glossary("ttft")`.

    Raises `ValueError`, naming words that are close, when the glossary does not have it.
    """
    term = find(read_terms(data_folder() / "glossary.toml"), word)
    for language in LANGUAGES:
        name, *others = term.names[language]
        print(f"{language}  {name}{' (' + ', '.join(others) + ')' if others else ''}: {term.texts[language]}")
    print(f"Notebook {term.notebook}.{' See also: ' + ', '.join(term.see) + '.' if term.see else ''}")
