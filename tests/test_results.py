import json
import math
import re
import subprocess
import sys

import filelock
import numpy as np
import pytest
import torch

from kvcourse import paths, results, store
from kvcourse.entry import PRINTED, WIDTH


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCOURSE_RESULTS", str(tmp_path / "results"))
    return tmp_path / "results"


@pytest.mark.parametrize(
    "value, text",
    [
        (2, "2"),
        (2.0, "2"),
        (2.004, "2.00"),  # rounded: the zeros say so
        (0.5, "0.5"),
        (1.8712, "1.87"),
        (0.03214, "0.0321"),
        (11677, "11,677"),
        (11677.4, "11,700"),
        (999.96, "1,000"),
        (135_000_000_000, "1.35e11"),
        (1_000_000, "1e6"),
        (0.00001234, "1.23e-5"),
        (-3.14159, "-3.14"),
        (0.0, "0"),
        ("yes", "yes"),
        (sys.float_info.max, "1.80e308"),  # rounded up, it is no float any more
    ],
)
def test_numbers_are_printed_with_three_significant_digits(value, text):
    assert results.format_number(value) == text


def test_formatted_numbers_are_within_half_a_percent_of_the_value():
    generator = np.random.default_rng(0)
    for value in 10 ** generator.uniform(-9, 12, 500):
        assert float(results.format_number(value).replace(",", "")) == pytest.approx(value, rel=0.005001)


def test_guess_bound_and_measurement_stand_side_by_side(capsys):
    results.predict("01.total_exponent", 2, question="How does the work grow?")
    entry = results.measure("01.total_exponent", 1.88, bound=2.0)
    assert capsys.readouterr().out.splitlines() == [
        "01.total_exponent          your guess 2 is noted",
        "01.total_exponent  your guess 2 | bound 2",
        "    measured 1.88 (0.94 times the bound)",
    ]
    assert entry == results.get("01.total_exponent")
    assert (entry.guess, entry.bound, entry.measured, entry.question) == (2, 2.0, 1.88, "How does the work grow?")
    assert entry.device and entry.date


def test_what_is_missing_is_said(capsys):
    results.predict("01.gap", None, unit="s")
    results.measure("01.gap", 0.03, unit="s")
    assert results.get("01.other") is None
    out = capsys.readouterr().out
    assert "no guess noted" in out and "bound" not in out and "01.gap  no guess | measured 0.03 s\n" in out
    assert "times the bound" not in out


def test_scalars_of_numpy_and_torch_become_plain_numbers(folder):
    results.measure("01.a", torch.tensor(3))
    results.measure("01.b", np.float32(0.5))
    results.measure("01.c", torch.tensor([0.25], dtype=torch.bfloat16), bound=np.int64(2))
    results.measure("01.d", np.bool_(True))
    kept = json.loads((folder / "results.json").read_text())["entries"]
    assert [kept[f"01.{name}"]["measured"] for name in "abcd"] == [3, 0.5, 0.25, "yes"]
    assert results.get("01.c").ratio == 0.125


REFUSED = [math.nan, math.inf, torch.ones(2), [1.0], 1j, np.float64("nan"), 10**400, -(10**400), "\ud800"]


@pytest.mark.parametrize("value", [*REFUSED, None])
def test_what_is_not_one_finite_number_is_refused_and_nothing_is_stored(value):
    with pytest.raises(ValueError, match="01.a"):
        results.measure("01.a", value)
    assert results.get("01.a") is None


@pytest.mark.parametrize("value", REFUSED)
def test_a_guess_that_cannot_be_kept_is_refused(value):
    with pytest.raises(ValueError, match="the guess for 01.a"):
        results.predict("01.a", value)
    assert results.get("01.a") is None


def test_the_largest_numbers_are_kept_and_shown(capsys):
    results.predict("01.a", 10**308)
    assert results.measure("01.a", sys.float_info.max, bound=1e-300).ratio is None  # the ratio is no float
    results.summary("01")
    assert "1e308" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["total", "1.total", "01.", "01.Total", "01 total", "01.a.b", 1, None])
def test_malformed_keys_are_refused(key):
    for call in (lambda: results.predict(key, 1), lambda: results.measure(key, 1), lambda: results.get(key)):
        with pytest.raises(ValueError, match="two digits"):
            call()


def test_guess_and_measurement_share_one_unit():
    results.predict("01.gap", 30, unit="ms")
    with pytest.raises(ValueError, match="'ms' and measured in 's'"):
        results.measure("01.gap", 0.03, unit="s")
    results.measure("01.gap", 30.0, unit="ms")
    results.predict("01.gap", 0.03, unit="s")  # asked anew in seconds: 30 must not be read as seconds
    assert results.get("01.gap").measured is None


def test_a_new_guess_keeps_the_measurement():
    results.measure("01.gap", 0.03, unit="s")
    results.predict("01.gap", 0.05, unit="s")
    assert (results.get("01.gap").guess, results.get("01.gap").measured) == (0.05, 0.03)


def test_the_ratio_needs_two_numbers():
    assert results.measure("01.a", "yes", bound=1).ratio is None
    assert results.measure("01.b", 3, bound=0).ratio is None
    assert results.measure("01.c", 3, bound=2).ratio == 1.5


def test_table_and_summary(capsys):
    results.predict("01.b", 5, unit="tokens")
    results.measure("01.a", 0.5, unit="s", bound=0.25)
    results.measure("02.a", 1)
    capsys.readouterr()
    header, *lines = results.table("01").splitlines()
    assert header.split() == ["your", "guess", "bound", "measured", "/", "bound"]
    assert [line.split() for line in lines] == [
        ["01.a", "-", "0.25", "s", "0.5", "s", "2"],
        ["01.b", "5", "tokens", "-", "not", "measured", "here"],
    ]
    assert "03.never" in results.table(["02.a", "03.never"]) and "not measured here" in results.table(["03.never"])
    assert "01.a" not in results.table(["02.a"])
    assert results.table("07") == "not measured here: no entry begins with '07'"
    results.summary("01")
    out = capsys.readouterr().out
    assert "Measured on:" in out and "02.a" not in out


def test_what_does_not_fit_a_narrow_window_goes_on_below(capsys):
    results.predict("03.attention_time_exponent", 1_000, unit="tokens")
    results.measure("03.attention_time_exponent", 5_400, unit="tokens", bound=2_920, note="bytes; extrapolated")
    results.measure("03.a", 1_500, unit="tokens", note="piece by piece, with a " + 3 * "long " + "reason")
    said = capsys.readouterr().out.splitlines()
    assert said[1:] == [
        "03.attention_time_exponent  your guess 1,000 tokens",
        "    bound 2,920 tokens",
        "    measured 5,400 tokens (1.85 times the bound)",
        "    bytes; extrapolated",
        "03.a  no guess | measured 1,500 tokens",
        "    piece by piece, with a long long long reason",
    ]
    assert PRINTED.findall("\n".join(said)) == [("03.attention_time_exponent", "5,400"), ("03.a", "1,500")]
    header, *lines = results.table("03").splitlines()
    assert re.split(" {2,}", header) == ["", "your guess", "bound", "measured", "/ bound"]
    assert lines[0::2] == ["03.a", "03.attention_time_exponent"]
    assert [re.split(" {2,}", line) for line in lines[1::2]] == [
        ["", "-", "-", "1,500 tokens"],
        ["", "1,000 tokens", "2,920 tokens", "5,400 tokens", "1.85"],
    ]
    assert max(map(len, [*said, header, *lines])) <= WIDTH < 27 + len(" ".join(lines[3].split()))


def test_what_was_not_measured_is_not_read_as_a_number():
    results.predict("01.a", 5)
    guessed = f"{results.get('01.a')}\n01.b  no guess\n"
    assert "not measured here" in guessed and PRINTED.findall(guessed) == []
    assert PRINTED.findall(f"{guessed}{results.measure('01.a', 7)}") == [("01.a", "7")]


def test_verdicts_are_kept_by_number(capsys):
    results.verdict(12, "holds", "The second turn computed 30 tokens, not 500.")
    results.verdict(3, "wrong as said", "n^3.")
    assert list(results.verdicts()) == [3, 12]
    assert results.verdicts()[12] == ("holds", "The second turn computed 30 tokens, not 500.")
    assert 'quadruples the work": wrong as said. n^3.' in capsys.readouterr().out
    for wrong in ((3, "true", "x"), (0, "holds", "x"), (True, "holds", "x"), (3, "holds", " ")):
        with pytest.raises(ValueError):
            results.verdict(*wrong)


def test_an_untouched_stub_does_not_undo_an_answer():
    results.record_exercise("softmax", "not attempted")
    assert results.progress() == {"softmax": "not attempted"}
    for status in ("wrong", "right", "not attempted"):
        results.record_exercise("softmax", status)
    assert results.progress() == {"softmax": "right"}
    results.record_exercise("softmax", "wrong")
    assert results.progress() == {"softmax": "right (last try: wrong)"}
    with pytest.raises(ValueError, match="done"):
        results.record_exercise("softmax", "done")


def test_reset_forgets_everything():
    results.measure("01.a", 1)
    results.verdict(1, "holds", "x")
    results.record_exercise("a", "right")
    results.reset()
    assert results.get("01.a") is None and results.verdicts() == {} and results.progress() == {}


DAMAGED = [
    "",
    '{"entries": {"01.a"',
    "[1, 2]",
    '{"entries": {"01.a": {"key": "01.a", "colour": 1}}}',
    '{"entries": {"01.a": {"key": "01.a", "measured": NaN}}}',
    '{"exercises": {"a": "done"}}',
    '{"verdicts": {"one": ["holds", "x"]}}',
    '{"verdicts": {"1": ["holds", 7]}}',
    '{"verdicts": {" 1": ["holds", "x"]}}',
    '{"verdicts": {"99": ["holds", "x"]}}',
    r'{"verdicts": {"1": ["holds", "\ud800"]}}',
    r'{"entries": {"01.a": {"key": "01.a", "unit": "\ud800"}}}',
    '{"entries": {"01.a": {"key": "01.b"}}}',
    '{"entries": {"/tmp/x/EVIL.z": {"key": "/tmp/x/EVIL.z"}}}',
    '{"entries": {"01.a": {"key": "01.a", "device": 7}}}',
    '{"entries": {"01.a": {"key": "01.a", "guess": 1' + 400 * "0" + "}}}",
    100_000 * "[",
    "\x00\x01",
]


@pytest.mark.parametrize("text", ["\ud800", 7])
def test_a_text_that_could_not_be_read_again_is_not_stored(folder, text):
    for store_it in (
        lambda: results.predict("01.a", 1, text),
        lambda: results.predict("01.a", 1, question=text),
        lambda: results.measure("01.a", 1, text),
        lambda: results.measure("01.a", 1, note=text),
        lambda: results.verdict(1, "holds", text),
    ):
        with pytest.raises(ValueError, match="half a character|must be a text|must say in a sentence"):
            store_it()
    assert not folder.exists()


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_is_set_aside_and_a_new_one_begun(folder, capsys, content):
    folder.mkdir()
    (folder / "results.damaged-1.json").write_text("an earlier one")
    (folder / "results.json").write_text(content)
    assert results.get("01.a") is None
    assert capsys.readouterr().out.count("damaged. It is kept as results.damaged-2.json") == 1
    results.measure("01.a", 1)
    assert results.get("01.a").measured == 1
    assert (folder / "results.damaged-1.json").read_text() == "an earlier one"
    assert (folder / "results.damaged-2.json").read_text() == content


def test_an_error_while_writing_leaves_the_file_as_it_was_and_the_rest_lives_in_memory(folder, monkeypatch, capsys):
    results.measure("01.a", 1)
    before = (folder / "results.json").read_bytes()
    with monkeypatch.context() as full:
        full.setattr(store.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        results.measure("01.a", 2)
    results.measure("01.b", 3)
    said = capsys.readouterr().out
    assert said.count(f"Results cannot be kept in {folder} (No space left): they last until this notebook is") == 1
    assert said.count("set KVCOURSE_RESULTS") == 1
    assert (results.get("01.a").measured, results.get("01.b").measured) == (2, 3)
    assert (folder / "results.json").read_bytes() == before


def test_in_a_folder_that_cannot_be_used_results_live_in_memory(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVCOURSE_RESULTS", str(tmp_path / "file"))
    assert results.get("01.a") is None and results.progress() == {}
    results.predict("01.a", 1)
    results.measure("01.a", 2)
    results.verdict(1, "holds", "x")
    results.record_exercise("softmax", "right")
    assert capsys.readouterr().out.count("Results cannot be kept in") == 1
    assert (results.get("01.a").guess, results.get("01.a").measured) == (1, 2)
    assert list(results.verdicts()) == [1] and results.progress() == {"softmax": "right"}
    with pytest.raises(ValueError, match="guessed in"):
        results.measure("01.a", 2, unit="s")
    assert results.get("01.a").unit == ""
    results.summary("01")
    results.reset()
    assert results.get("01.a") is None


def test_what_can_be_read_of_a_folder_that_nobody_may_write_to_is_there(folder, monkeypatch, capsys):
    results.measure("01.a", 1)
    before = (folder / "results.json").read_bytes()
    refused = PermissionError(13, "Permission denied")
    monkeypatch.setattr(store.filelock.FileLock, "acquire", lambda *_, **__: (_ for _ in ()).throw(refused))
    assert results.get("01.a").measured == 1
    assert "cannot be kept" not in capsys.readouterr().out  # nobody has tried to keep anything
    results.measure("01.b", 2)
    assert "cannot be kept" in capsys.readouterr().out
    assert (results.get("01.a").measured, results.get("01.b").measured) == (1, 2)
    assert (folder / "results.json").read_bytes() == before


def test_another_program_that_keeps_the_file_is_one_clear_error(folder, monkeypatch):
    monkeypatch.setattr(store, "PATIENCE", 0.1)
    folder.mkdir()
    with filelock.FileLock(folder / "results.json.lock", is_singleton=False):
        with pytest.raises(RuntimeError, match="in use by another program"):
            results.measure("01.a", 1)
    results.measure("01.a", 1)


WRITER = """
import contextlib, io, sys
from kvcourse import results
print("ready", flush=True)
sys.stdin.readline()
with contextlib.redirect_stdout(io.StringIO()):
    for i in range(60):
        results.measure(f"0{sys.argv[1]}.value{i}", i)
"""


def test_processes_that_measure_at_once_lose_nothing(folder):
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, number], **pipes) for number in "12"]
    assert [writer.stdout.readline() for writer in writers] == ["ready\n"] * 2
    for writer in writers:  # both start only now, so that they really write at once
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=120)
        assert writer.returncode == 0
    for number in "12":
        for i in range(60):
            assert results.get(f"0{number}.value{i}").measured == i
    assert {path.name for path in folder.iterdir()} <= {"results.json", "results.json.lock"}


def test_the_tests_do_not_touch_the_users_results(folder):
    assert paths.results_folder() == folder
