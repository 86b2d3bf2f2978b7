"""Numbers that the instructor's pages quote from the worked notebooks, kept equal to what stands there.

A quote is a number followed by the key of what was measured: `14.4 times (`00.first_over_later`)`, or by that of its
bound: `22 tokens (`03.compute_bound_from:bound`)`. Both are read from the stored outputs of the worked notebooks, where
`results.measure` has printed them.
"""

import re
from pathlib import Path

import nbformat

from kvcourse.entry import PRINTED
from kvcourse.model_folder import write_whole
from kvcourse.notebooks.build import built_paths, source_paths
from kvcourse.notebooks.source import read_text

FOLDER = Path("notebooks", "instructor")
NUMBER = re.compile(r"[\d.,]+(?:e[+-]?\d+)?")
BOUND = re.compile(PRINTED.pattern.replace("measured ", "bound "), PRINTED.flags)  # it stands there in the same way
KEY = re.compile(r"`(\d\d\.\w+(?::bound)?)`")
QUOTE = re.compile(rf"([\d.,]*\d(?:e[+-]?\d+)?)(?=[^\d`]{{0,60}}{KEY.pattern})")


def measured(course: Path) -> dict[str, str]:
    """The numbers in the worked notebooks by their keys, as they were printed; `KEY:bound` is the bound of `KEY`."""
    found = {}
    for source in source_paths(course):
        path = built_paths(course, source.stem).solution
        for cell in nbformat.read(path, as_version=4).cells if path.is_file() else []:
            for output in cell.get("outputs", []):
                found |= printed(output.get("text", ""))
    return found


def printed(text: str) -> dict[str, str]:
    """Measurements and bounds in what a cell printed, where they are numbers."""
    bounds = [(f"{key}:bound", value) for key, value in BOUND.findall(text)]
    return {key: value for key, value in [*PRINTED.findall(text), *bounds] if NUMBER.fullmatch(value)}


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
            write_whole(path, new.encode())
            changed.append(path)
    return changed
