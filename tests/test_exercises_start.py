"""The exercises of notebook 00: right answers of several kinds pass, usual wrong ones are named."""

import codecs
from itertools import pairwise

import numpy as np
import pytest
import torch
from exercises import assert_worked_answer_is_right_and_stub_not_attempted

import kvcourse as kv

NOTEBOOK = "00_start_here"
NAMES = ["latencies", "word_times", "first_wait", "hold_back"]


def verdict(name, function):
    return getattr(kv.check, name)(function)


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_is_right_and_the_stub_not_attempted(name):
    assert_worked_answer_is_right_and_stub_not_attempted(NOTEBOOK, name)


# latencies ------------------------------------------------------------------------------------------------------


def latencies_numpy(arrivals):
    gaps = np.diff(arrivals)
    return arrivals[0], gaps, gaps.mean() if len(gaps) else None


def latencies_loop(arrivals):
    gaps = []
    for i in range(1, len(arrivals)):
        gaps.append(arrivals[i] - arrivals[i - 1])
    if len(arrivals) == 1:
        return [arrivals[0], gaps, None]
    return [arrivals[0], gaps, (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1)]


def latencies_torch(arrivals):
    times = torch.tensor(arrivals, dtype=torch.float64)
    return times[0], times.diff(), times.diff().mean() if len(arrivals) > 1 else None


@pytest.mark.parametrize("answer", [latencies_numpy, latencies_loop, latencies_torch])
def test_latencies_right(answer):
    assert verdict("latencies", answer).status == "right"


def gaps_of(arrivals):
    return [after - before for before, after in pairwise(arrivals)]


def with_tpot(formula):
    return lambda arrivals: (arrivals[0], gaps_of(arrivals), formula(arrivals) if len(arrivals) > 1 else None)


def first_wait_as_gap(arrivals):
    gaps = gaps_of([0.0, *arrivals])
    return arrivals[0], gaps, sum(gaps) / len(gaps)


@pytest.mark.parametrize(
    ("answer", "phrase"),
    [
        (first_wait_as_gap, "is counted as a gap"),
        (lambda a: (a[0], gaps_of([0.0, *a]), (a[-1] - a[0]) / max(len(a) - 1, 1)), "is counted as a gap"),
        (with_tpot(lambda a: (a[-1] - a[0]) / len(a)), "divides by the number of tokens"),
        (with_tpot(lambda a: a[-1] / len(a)), "counts the wait for the first token"),
        (with_tpot(lambda a: a[-1] / (len(a) - 1)), "take ttft off the total"),
        (
            lambda a: (a[0], [time - a[0] for time in a[1:]], with_tpot(lambda a: np.mean(gaps_of(a)))(a)[2]),
            "begins at",
        ),
        (lambda a: (a[0], gaps_of(a), (a[-1] - a[0]) / (len(a) - 1)), "return None for it"),
        (lambda a: (a[0], gaps_of(a), sum(gaps_of(a)) / len(a[1:]) if len(a) > 1 else 0.0), "yours is 0.0"),
        (lambda a: (a[0], gaps_of(a)), "expected 3 values"),
        (lambda a: (a[0], gaps_of(a), np.mean(gaps_of(a))) if len(a) > 1 else (a[0], None, None), "is an empty list"),
    ],
)
def test_latencies_wrong(answer, phrase):
    said = verdict("latencies", answer)
    assert said.status == "wrong"
    assert phrase in said.message


# word_times -----------------------------------------------------------------------------------------------------


def word_times_backwards(pieces, arrivals):
    """Walks from the end: the first piece seen of a word is its last."""
    times, seen = [], set()
    for end in range(len(pieces), 0, -1):
        word = len("".join(pieces[:end]).split())
        if pieces[end - 1].strip() and word not in seen:
            seen.add(word)
            times.append(arrivals[end - 1])
    return np.array(times[::-1])


def word_times_by_gaps(pieces, arrivals):
    """Looks at each boundary: a word ends where a blank stands between it and the next piece that shows something."""
    shown = [i for i, piece in enumerate(pieces) if piece.strip()]
    times = []
    for i, following in zip(shown, [*shown[1:], None], strict=True):
        between = "" if following is None else "".join(pieces[i : following + 1])
        if following is None or len(between.split()) > len(pieces[i].split()):
            times.append(torch.tensor(arrivals[i]))
    return torch.stack(times)


@pytest.mark.parametrize("answer", [word_times_backwards, word_times_by_gaps])
def test_word_times_right(answer):
    assert verdict("word_times", answer).status == "right"


def by_word(keep_first=False, blanks=False, split=str.split):
    def answer(pieces, arrivals):
        text, times = "", {}
        for piece, arrival in zip(pieces, arrivals, strict=True):
            text += piece
            word = len(split(text))
            if (piece.strip() or blanks) and not (keep_first and word in times):
                times[word] = arrival
        return list(times.values())

    return answer


@pytest.mark.parametrize(
    ("answer", "phrase"),
    [
        (lambda pieces, arrivals: arrivals, "one time for each token"),
        (by_word(keep_first=True), "first piece"),
        (by_word(blanks=True), "blank or empty piece"),
        (lambda p, a: [time for piece, time in zip(p, a, strict=True) if piece[:1] == " "], "begins with a space"),
        (by_word(split=lambda text: text.split(" ")), "a line break ends a word too"),
        (lambda pieces, arrivals: len("".join(pieces).split()), "expected"),
    ],
)
def test_word_times_wrong(answer, phrase):
    said = verdict("word_times", answer)
    assert said.status == "wrong"
    assert phrase in said.message


# first_wait -----------------------------------------------------------------------------------------------------


def first_wait_simulated(times, words_per_second):
    """Moves the reader word by word instead of using the closed form."""
    wanted = times[0]
    for i in range(1, len(times)):
        wanted += 1 / words_per_second
        if times[i] - wanted > 1e-9:
            return i
    return len(times)


def first_wait_numpy(times, words_per_second):
    times = np.array(times)
    late = times > times[0] + np.arange(len(times)) / words_per_second
    return np.argmax(late) if late.any() else len(times)


@pytest.mark.parametrize("answer", [first_wait_simulated, first_wait_numpy])
def test_first_wait_right(answer):
    assert verdict("first_wait", answer).status == "right"


def first(is_late, never=len):
    def answer(times, words_per_second):
        late = [i for i in range(1, len(times)) if is_late(times, i, words_per_second)]
        return late[0] if late else never(times)

    return answer


def reader(times, i, speed):
    return times[i] > times[0] + i / speed


@pytest.mark.parametrize(
    ("answer", "phrase"),
    [
        (first(lambda times, i, speed: times[i] - times[i - 1] > 1 / speed), "compares each gap"),
        (first(lambda times, i, speed: times[i] > i / speed), "clock starts at 0"),
        (first(lambda times, i, speed: times[i] > times[0] + (i + 1) / speed), "one word too slow"),
        (first(lambda times, i, speed: times[i] > times[0] + (i - 1) / speed), "one word too quick"),
        (first(lambda times, i, speed: times[i] >= times[0] + i / speed), ">, not >="),
        (lambda times, speed: first(reader)(times, speed) + 1, "starts at 0"),
        (first(reader, never=lambda times: None), "returns None"),
        (first(reader, never=lambda times: -1), "returns -1"),
        (first(reader, never=lambda times: -2), "yours is -2"),
        (first(lambda times, i, speed: times[i] > times[0] + i * speed), "multiplies by the speed"),
    ],
)
def test_first_wait_wrong(answer, phrase):
    said = verdict("first_wait", answer)
    assert said.status == "wrong"
    assert phrase in said.message


# hold_back ------------------------------------------------------------------------------------------------------


def hold_back_codecs(held, new):
    decoder = codecs.getincrementaldecoder("utf-8")()
    return decoder.decode(held + new), decoder.getstate()[0]


def hold_back_by_lead_byte(held, new):
    """Finds the last byte that begins a character, and compares its length with what is there."""
    data = held + new
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            cut = len(data) - back if length > back else len(data)
            return data[:cut].decode(), data[cut:]
    return data.decode(), b""


@pytest.mark.parametrize("answer", [hold_back_codecs, hold_back_by_lead_byte])
def test_hold_back_right(answer):
    assert verdict("hold_back", answer).status == "right"


def all_or_nothing(held, new):
    try:
        return (held + new).decode(), b""
    except UnicodeDecodeError:
        return "", held + new


def at_most_one(held, new):
    data = held + new
    try:
        return data.decode(), b""
    except UnicodeDecodeError:
        return data[:-1].decode(errors="replace"), data[-1:]


@pytest.mark.parametrize(
    ("answer", "phrase"),
    [
        (lambda held, new: ((held + new).decode(errors="replace"), b""), "replacement character"),
        (lambda held, new: ((held + new).decode(errors="ignore"), b""), "throws the unfinished bytes away"),
        (lambda held, new: hold_back_codecs(b"", held + new)[:1] + (b"",), "throws the unfinished bytes away"),
        (all_or_nothing, "shows nothing at all"),
        (lambda held, new: ((held + new).decode("latin-1"), b""), "each byte became a character"),
        (at_most_one, "at most one byte"),
        (lambda held, new: ((held + new).decode(), b""), "UnicodeDecodeError"),
        (lambda held, new: (lambda text, rest: (text, list(rest)))(*hold_back_codecs(held, new)), "as bytes"),
        (
            lambda held, new: (lambda text, rest: (text, bytearray(rest)))(*hold_back_codecs(held, new)),
            "or a bytearray",
        ),
        (lambda held, new: hold_back_codecs(held, new)[0], "expected 2 values"),
    ],
)
def test_hold_back_wrong(answer, phrase):
    said = verdict("hold_back", answer)
    assert said.status == "wrong"
    assert phrase in said.message


def test_hold_back_that_forgets_what_it_held():
    def forgetful(held, new):
        text, rest = hold_back_codecs(b"", new) if new[0] & 0xC0 != 0x80 else (new.decode(errors="ignore"), b"")
        return text, rest

    assert verdict("hold_back", forgetful).status == "wrong"
