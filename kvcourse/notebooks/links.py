"""The first use of each term in a notebook becomes a link to the glossary; what a reader sees stays as it was."""

import re
from collections.abc import Sequence

from markdown_it import MarkdownIt
from nbformat import NotebookNode

from kvcourse.notebooks.terms import Term

# Inside a paragraph: code, formulas, links and code as HTML, tags, addresses, named characters.
PROTECTED = re.compile(
    r"(`+).+?\1|\$\$.+?\$\$|\$[^$\n]+\$|<(a|code)\b[^>]*>.*?</\2\s*>|<[^>]+>|(?:https?://|www\.)\S+|&\w+;",
    re.DOTALL | re.IGNORECASE,
)
# How a link to this address is rendered; the address of the glossary would do as well, but may be rendered escaped.
PROBE, RENDERED = "#x", re.compile(r'<a href="#x">(.*?)</a>', re.DOTALL)
LINE_END = re.compile(r"\r\n?|\n")  # what ends a line for markdown-it, and nothing else does
_markdown = MarkdownIt("commonmark").enable("table")


def link_terms(cells: list[NotebookNode], terms: Sequence[Term], number: str, page: str) -> list[NotebookNode]:
    """The cells of notebook `number`, with links to `page`, the glossary as seen from there.

    Each term is linked once, where it first stands in a paragraph or list item. The first cell, with title and aims,
    is left alone, and so are headings, tables, code, formulas, HTML (hints), and what is a link already. Everyday
    words are linked in the notebook that introduces them only.

    A link names the entry's cell, not its heading: JupyterLab looks for headings before it has drawn the page that a
    link opens, finds none, and stays at the top (seen with 4.6.6). A cell is there at once.
    """
    words = Words(terms)
    left = {term.name for term in terms if number not in term.skip and (not term.everyday or term.notebook == number)}
    return [
        NotebookNode({**cell, "source": _linked(cell.source, words, left, page)})
        if cell.cell_type == "markdown" and place > 0
        else cell
        for place, cell in enumerate(cells)
    ]


def _linked(text: str, words: "Words", left: set[str], page: str) -> str:
    """`text` with links; takes the names of the terms that it links out of `left`."""
    pieces, done = [], 0
    for start, stop in _free(text):
        for first, last, term in words.found(text, start, stop):
            if term.name in left and _may_be_link(text, first, last):
                left.remove(term.name)
                pieces += [text[done:first], f"[{text[first:last]}]({page}#cell-id={term.anchor})"]
                done = last
    return "".join([*pieces, text[done:]])


def _may_be_link(text: str, first: int, last: int) -> bool:
    """Whether a link on these characters of `text` adds a link and changes nothing else: not so within a link, an
    image, or code, however they are written."""
    linked = _markdown.render(f"{text[:first]}[{text[first:last]}]({PROBE}){text[last:]}")
    without, links = RENDERED.subn(r"\1", linked)
    before, earlier = RENDERED.subn(r"\1", _markdown.render(text))
    return without == before and links == earlier + 1


def _free(text: str) -> list[tuple[int, int]]:
    """The stretches of `text` that are plain words of a paragraph."""
    starts = [0, *(end.end() for end in LINE_END.finditer(text)), len(text)]
    tokens = _markdown.parse(text)
    stretches = []
    for before, token in zip(tokens, tokens[1:], strict=False):
        if before.type == "paragraph_open":
            start, stop = (starts[line] for line in token.map)
            for match in PROTECTED.finditer(text, start, stop):
                stretches.append((start, match.start()))
                start = match.end()
            stretches.append((start, stop))
    return stretches


class Words:
    """Every name and form of the terms, in singular and plural: the longest that fits is found."""

    def __init__(self, terms: Sequence[Term]):
        self._terms = {word: term for term in terms for name in (*term.names["en"], *term.forms) for word in both(name)}
        longest_first = sorted(self._terms, key=len, reverse=True)
        alternatives = "|".join(re.sub(r"(\\[ -])+", r"[\\s-]+", re.escape(word)) for word in longest_first)
        self._pattern = re.compile(rf"(?<![\w-])(?:{alternatives or '(?!)'})(?![\w-])", re.IGNORECASE)
        self._words = {plain(word).lower(): word for word in longest_first}

    def found(self, text: str, start: int, stop: int):
        """Yield `(start, stop, term)` of each word between `start` and `stop` that is one of a term's names."""
        for match in self._pattern.finditer(text, start, stop):
            word = self._words[plain(match[0]).lower()]
            if plain(match[0]) in (plain(word), plain(word[0].upper() + word[1:])):  # "awq" is not AWQ
                yield match.start(), match.end(), self._terms[word]


def both(name: str) -> list[str]:
    """Singular and plural of an English noun."""
    if name.endswith("y") and name[-2] not in "aeiou":
        return [name, name[:-1] + "ies"]
    return [name, name + ("es" if name.endswith(("s", "x", "ch", "sh")) else "s")]


def plain(word: str) -> str:
    """A word with single blanks where it has blanks, line ends or hyphens."""
    return re.sub(r"[\s-]+", " ", word)
