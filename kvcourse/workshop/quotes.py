"""Numbers that the instructor's pages quote from the worked notebooks, kept equal to what stands there.

A quote is a number followed by the key of what was measured: `14.4 times (`00.first_over_later`)`. What was measured is
read from the stored outputs of the worked notebooks, where `results.measure` has printed it.
"""

import re
from pathlib import Path

import nbformat

from kvcourse.notebooks.build import built_paths, source_paths
from kvcourse.notebooks.source import read_text

FOLDER = Path("notebooks", "instructor")
PRINTED = re.compile(r"^(\d\d\.\w+) .*\| measured ([\d.,]+(?:e[+-]?\d+)?)", re.MULTILINE)
KEY = re.compile(r"`(\d\d\.\w+)`")
QUOTE = re.compile(r"([\d.,]*\d(?:e[+-]?\d+)?)(?=[^\d`]{0,60}`(\d\d\.\w+)`)")


def measured(course: Path) -> dict[str, str]:
    """The numbers in the worked notebooks by their keys, as they were printed."""
    found = {}
    for source in source_paths(course):
        path = built_paths(course, source.stem).solution
        for cell in nbformat.read(path, as_version=4).cells if path.is_file() else []:
            for output in cell.get("outputs", []):
                found |= dict(PRINTED.findall(output.get("text", "")))
    return found


def quoted(text: str) -> list[tuple[str, str]]:
    """Key and number of each quote, in their order."""
    return [(key, number) for number, key in QUOTE.findall(text)]


def refreshed(text: str, numbers: dict[str, str]) -> str:
    """The text with each quoted number as it was measured; quotes whose key is not among `numbers` stay."""
    return QUOTE.sub(lambda quote: numbers.get(quote[2], quote[1]), text)


def update(course: Path) -> list[Path]:
    """Bring the quotes of all pages up to date; return the pages that changed."""
    numbers, changed = measured(course), []
    for path in sorted((course / FOLDER).glob("*.md")):
        text = read_text(path)
        if (new := refreshed(text, numbers)) != text:
            path.write_text(new, encoding="utf-8", newline="\n")
            changed.append(path)
    return changed
