"""Verdicts of other notebooks, read from what they printed."""

import os

import nbformat
import pytest

from kvcourse import results
from kvcourse.notebooks.verdicts import printed_verdicts, put

NO_LONGER = 'statement 3 is discussed below: holds. Not a verdict.\nstatement 4, "x": perhaps. No.\n'


def notebook_saying(path, text):
    cell = nbformat.v4.new_code_cell("...", outputs=[nbformat.v4.new_output("stream", name="stdout", text=text)])
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("a"), cell]), path)
    return path


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
    """What `results.verdict` prints, for each kind of verdict; the second statement has a quote and colons in it."""
    monkeypatch.setenv("KVCOURSE_RESULTS", str(tmp_path / "author"))
    for number, verdict in enumerate(results.VERDICTS, start=1):
        results.verdict(number, verdict, f'Because of {number}.5: "so" it is. And more.')
    return capsys.readouterr().out, results.verdicts()


def test_what_was_printed_is_read_back(printed, tmp_path):
    text, expected = printed
    path = notebook_saying(tmp_path / "a.ipynb", "before\n" + text + NO_LONGER)
    assert printed_verdicts([tmp_path / "missing.ipynb", path]) == expected
    assert len(expected) == 3


def test_the_kernel_finds_them_and_nobody_else(printed, tmp_path, monkeypatch):
    _, expected = printed
    put(expected, {"KVCOURSE_RESULTS": str(tmp_path / "kernel")})
    assert os.environ["KVCOURSE_RESULTS"] == str(tmp_path / "author")
    monkeypatch.setenv("KVCOURSE_RESULTS", str(tmp_path / "kernel"))
    assert results.verdicts() == expected
    monkeypatch.setenv("KVCOURSE_RESULTS", str(tmp_path / "nobody"))
    assert results.verdicts() == {}


def test_the_solutions_say_all_but_those_of_the_last_notebook():
    from kvcourse.notebooks.build import built_paths, source_paths
    from kvcourse.paths import course_folder
    from kvcourse.statements import STATEMENTS

    course = course_folder()
    paths = [built_paths(course, path.stem).solution for path in source_paths(course)]
    assert set(printed_verdicts(paths[:-1])) == STATEMENTS.keys() - {28, 29}
