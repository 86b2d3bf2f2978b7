"""What the solution notebooks say about the course's statements: the last notebook's table gathers it.

Each notebook is built alone if need be, in an empty store of results. The verdicts of the others are then read from
their stored outputs, where `results.verdict` has printed them.
"""

import os
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import nbformat

from kvcourse import results

CHOICE = "|".join(sorted(results.VERDICTS, key=len, reverse=True))  # "holds" begins another one
PRINTED = re.compile(rf'^statement (\d+), ".*": ({CHOICE})\. (.+)$', re.M)


def printed_verdicts(paths: list[Path]) -> dict[int, results.Finding]:
    """The verdicts in the outputs of these notebooks, by the number of the statement; a missing file has none."""
    found = {}
    for path in paths:
        for cell in nbformat.read(path, as_version=4).cells if path.is_file() else []:
            for output in cell.get("outputs", []):
                for number, verdict, because in PRINTED.findall(output.get("text", "")):
                    found[int(number)] = results.Finding(verdict, because)
    return found


def put(verdicts: dict[int, results.Finding], env: dict[str, str]) -> None:
    """Store verdicts where a kernel with this environment will look for them."""
    with patch.dict(os.environ, {"KVCOURSE_RESULTS": env["KVCOURSE_RESULTS"]}), redirect_stdout(StringIO()):
        for number, finding in verdicts.items():
            results.verdict(number, *finding)
