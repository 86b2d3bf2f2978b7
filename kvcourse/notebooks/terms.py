"""The words of the course in three languages: `data/glossary.toml`, read, searched and shown."""

import difflib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from kvcourse.paths import data_folder

LANGUAGES = {"en": "English", "fr": "français", "it": "italiano"}


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
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{path}: term must be a list of tables, each begun by [[term]], not {str(entries)[:60]}")
    terms = sorted((_term(entry, path) for entry in entries), key=lambda term: term.name.lower())
    anchors = [term.anchor for term in terms]
    if len(set(anchors)) < len(anchors):
        twice = [term.name for term in terms if anchors.count(term.anchor) > 1]
        raise ValueError(f"{path} has an English name twice (a blank and a hyphen are one to links): {twice}")
    names = {term.name for term in terms}
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


def _is_text(value) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_texts(value) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_number(value) -> bool:
    return isinstance(value, str) and bool(re.fullmatch(r"\d\d", value))


# What a field must be, and how that is said.
FIELDS = {
    **dict.fromkeys((*LANGUAGES, "see", "forms"), (_are_texts, "a list of texts that are not blank")),
    "text": (
        lambda value: isinstance(value, dict) and set(value) <= set(LANGUAGES) and _are_texts([*value.values()]),
        f"a text that is not blank in {', '.join(LANGUAGES)}, and in no other language",
    ),
    "notebook": (_is_number, "the number of the notebook that introduces it, such as '02'"),
    "source": (_is_text, "a key of the bibliography"),
    "everyday": (lambda value: isinstance(value, bool), "true or false"),
    "skip": (lambda value: isinstance(value, list) and all(map(_is_number, value)), "a list of numbers like '02'"),
}


def _term(entry: dict, path: Path) -> Term:
    what = f"{path}: the entry {entry.get('en', entry)!r}"
    if set(entry) - set(FIELDS):
        raise ValueError(f"{what} has unknown fields {sorted(set(entry) - set(FIELDS))}; it may have {sorted(FIELDS)}")
    for field, value in entry.items():
        fits, wanted = FIELDS[field]
        if not fits(value):
            raise ValueError(f"{what} has {field} = {value!r}, which must be {wanted}")
    for language in LANGUAGES:
        if not entry.get(language) or language not in entry.get("text", {}):
            raise ValueError(f"{what} must have a name and a text in {', '.join(LANGUAGES)}, but lacks {language!r}")
    if "notebook" not in entry:
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
