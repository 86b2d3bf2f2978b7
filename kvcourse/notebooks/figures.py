"""What notebooks that were just run have measured, for `kvcourse run --record`.

A figure counts as *counted* when the cell that printed it is one whose output nbval compares: then it is the same in
every run. All others are timed, or depend on how a machine rounds.
"""

import os
from unittest.mock import patch

from nbformat import NotebookNode

from kvcourse import results
from kvcourse.entry import PRINTED
from kvcourse.expected.records import Figure
from kvcourse.notebooks.build import IGNORE
from kvcourse.notebooks.source import tags


def measured_figures(notebooks: dict[str, NotebookNode], env: dict[str, str]) -> dict[str, Figure]:
    """The numbers, by key, that executed notebooks (by name, such as "02_kv_cache") left in the store of results that
    `env` names; words are left out. Six digits are kept."""
    with patch.dict(os.environ, {"KVCOURSE_RESULTS": env["KVCOURSE_RESULTS"]}):
        entries = [entry for name in notebooks for entry in results.entries(name[:2] + ".")]
    counted = {key for notebook in notebooks.values() for key in _compared_keys(notebook)}
    return {
        entry.key: Figure(_short(entry.measured), entry.unit, entry.key in counted)
        for entry in entries
        if isinstance(entry.measured, int | float)
    }


def _compared_keys(notebook: NotebookNode) -> set[str]:
    """The keys printed by cells whose output nbval compares."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and IGNORE not in tags(cell)]
    texts = [output.get("text", "") for cell in cells for output in cell.outputs]
    return {key for text in texts for key, _ in PRINTED.findall(text)}


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")
