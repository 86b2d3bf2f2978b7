"""Checkers of notebook 00: the figures of an answer, words from tokens, a reader's first wait, half characters."""

from itertools import accumulate, pairwise

from kvcourse import reading
from kvcourse.check.framework import compare, diagnose, error_of, exercise

ARRIVALS = [
    [1.0, 1.1, 1.3],
    [0.5, 0.75],
    list(accumulate([0.6, *(0.03 + 0.001 * (i % 7) for i in range(40))])),
]


@exercise
def latencies(answer):
    """latencies(arrivals): (ttft, gaps, tpot) of an answer whose tokens arrived at these seconds after the start;
    tpot is None where there is no gap."""

    def right(arrivals):
        gaps = [after - before for before, after in pairwise(arrivals)]
        return arrivals[0], gaps, (arrivals[-1] - arrivals[0]) / len(gaps)

    def with_ttft_as_gap(arrivals):
        gaps = [arrivals[0], *right(arrivals)[1]]
        return arrivals[0], gaps, sum(gaps) / len(gaps)

    def tpot(formula):
        return lambda arrivals: (*right(arrivals)[:2], formula(arrivals))

    counted = "the wait for the first token is counted as a gap; n tokens have n - 1 gaps, the first wait is TTFT"
    return compare(
        answer,
        right,
        cases=ARRIVALS,
        mistakes={
            counted: with_ttft_as_gap,
            counted + " (TPOT is right)": lambda a: (a[0], [a[0], *right(a)[1]], right(a)[2]),
            counted + ", so TPOT divides by one too many": lambda a: (
                a[0],
                [a[0], *right(a)[1]],
                (a[-1] - a[0]) / len(a),
            ),
            "TPOT divides by the number of tokens; n tokens have n - 1 gaps: (total - ttft) / (n - 1)": tpot(
                lambda a: (a[-1] - a[0]) / len(a)
            ),
            "TPOT counts the wait for the first token; take it off: (total - ttft) / (n - 1)": tpot(
                lambda a: a[-1] / len(a)
            ),
            "TPOT counts the wait for the first token; take ttft off the total before dividing": tpot(
                lambda a: a[-1] / (len(a) - 1)
            ),
            "the gaps are measured from the first token; a gap begins at the token before": lambda a: (
                a[0],
                [time - a[0] for time in a[1:]],
                right(a)[2],
            ),
        },
    ) or _one_token(answer)


def _one_token(answer):
    error = error_of(answer, [0.7])
    if isinstance(error, ZeroDivisionError):
        return "with one token there is no gap, and TPOT divides by zero; return None for it"
    got = answer([0.7])  # any other exception of the learner's is reported here
    if not isinstance(got, tuple | list) or len(got) != 3:
        return "with one token, return three values too: ttft, an empty list of gaps, and None"
    if got[1] is None:
        return "with one token, gaps is an empty list"
    if got[2] is not None:
        return f"with one token there is no gap, so TPOT is not defined; return None for it, yours is {got[2]!r}"
    return diagnose(tuple(got[:2]), (0.7, []))


PIECES = [
    (["The", " baker", " waits"], [1.0, 2.0, 3.0]),
    (["A", " lo", "af", " rises", "."], [0.5, 0.6, 0.7, 0.8, 0.9]),
    ([" Salt", ":", "\n", "\n", "flour", "", " water", "."], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]),
    (["Yes", ".", "\n", ""], [0.25, 0.5, 0.75, 1.0]),
]


@exercise
def word_times(answer):
    """word_times(pieces, arrivals): when each word was complete, the arrival of its last piece that is not blank."""

    def first_piece(pieces, arrivals):
        text, times = "", {}
        for piece, arrival in zip(pieces, arrivals, strict=True):
            text += piece
            if piece.strip():
                times.setdefault(len(text.split()), arrival)
        return list(times.values())

    def blanks_too(pieces, arrivals):
        text, times = "", {}
        for piece, arrival in zip(pieces, arrivals, strict=True):
            text += piece
            times[len(text.split())] = arrival
        return list(times.values())

    def spaces_only(pieces, arrivals):
        text, times = "", {}
        for piece, arrival in zip(pieces, arrivals, strict=True):
            text += piece
            if piece.strip():
                times[text.lstrip(" ").count(" ")] = arrival
        return list(times.values())

    def starts_with_space(pieces, arrivals):
        return [arrival for piece, arrival in zip(pieces, arrivals, strict=True) if piece.startswith(" ")]

    return compare(
        answer,
        reading.word_times,
        cases=PIECES,
        mistakes={
            "it gives one time for each token; a word may take several tokens": lambda pieces, arrivals: arrivals,
            "it takes the arrival of a word's first piece; the word is complete with its last": first_piece,
            "a blank or empty piece counts as part of the word before; leave out pieces that show nothing": blanks_too,
            "it ends a word at spaces only; a line break ends a word too: text.split() cuts at both": spaces_only,
            "it takes every piece that begins with a space for a word: the first word of a line has none, and "
            "a word is complete with its last piece, not its first": starts_with_space,
        },
    )


WAITS = [
    ([0.5, 0.5, 2.0], 0.5),  # a slow reader never waits; who takes i * speed for i / speed sees them wait
    ([0.125, 0.25, 3.0, 3.25, 3.5], 2.0),
    ([0.125, 0.25, 0.5, 3.0], 2.0),
    ([1.0, 1.125, 1.25, 1.375, 1.75, 2.5], 4.0),  # the fifth word comes late, but the reader is busy until then
    ([1.0, 1.25, 1.5, 1.75], 4.0),  # each word comes exactly when it is wanted
    ([0.25, 1.25, 1.5], 4.0),
    ([2.0], 5.0),
    (list(accumulate([0.6, *([0.05] * 60), 0.9])), 16.0),
]


@exercise
def first_wait(answer):
    """first_wait(times, words_per_second): index of the first word that the reader has to wait for, the word they
    began with not counted; len(times) when they never wait."""

    def late(is_late):
        return lambda times, words_per_second: next(
            (i for i in range(1, len(times)) if is_late(times, i, words_per_second)), len(times)
        )

    def right(times, words_per_second):
        return late(lambda times, i, speed: times[i] > times[0] + i / speed)(times, words_per_second)

    if answer([1.0, 1.25], 2.0) is None and answer([1.0, 9.0], 2.0) is not None:
        return "it returns None for a reader who never waits; return len(times), as many words as there are"
    return compare(
        answer,
        right,
        cases=WAITS,
        mistakes={
            "it compares each gap with the time for one word; a reader who still has words to read is not stopped by "
            "a long gap: ask whether word i is there at times[0] + i / words_per_second": late(
                lambda times, i, speed: times[i] - times[i - 1] > 1 / speed
            ),
            "the reader's clock starts at 0; they begin to read when the first word is there, at times[0]": late(
                lambda times, i, speed: times[i] > i / speed
            ),
            "the reader is one word too slow: word i is wanted when i words are read, not i + 1": late(
                lambda times, i, speed: times[i] > times[0] + (i + 1) / speed
            ),
            "the reader is one word too quick: word i is wanted when i words are read, not i - 1": late(
                lambda times, i, speed: times[i] > times[0] + (i - 1) / speed
            ),
            "a word that arrives just when it is wanted keeps nobody waiting; compare with >, not >=": late(
                lambda times, i, speed: times[i] >= times[0] + i / speed
            ),
            "it finds no word that is late; word i is late when it comes after times[0] + i / words_per_second": (
                lambda times, speed: len(times)
            ),
            "it multiplies by the speed; at 2 words a second a word takes 1 / 2 second: divide by it": late(
                lambda times, i, speed: times[i] > times[0] + i * speed
            ),
            "it returns -1 for a reader who never waits; return len(times), as many words as there are": lambda *a: (
                -1 if right(*a) == len(a[0]) else right(*a)
            ),
            "it counts words from 1; return the index, which starts at 0": lambda times, speed: right(times, speed) + 1,
        },
    )


HALVES = [
    (b"", b"tea"),
    (b"", "caf\u00e9".encode()[:4]),  # "caf" and the first of two bytes
    ("\u00e9".encode()[:1], "\u00e9".encode()[1:] + b"!"),
    (b"", "ok \U0001f642".encode()[:6]),  # three of four bytes
    ("\U0001f642".encode()[:3], "\U0001f642".encode()[3:]),
    ("\U0001f642".encode()[:1], "\U0001f642".encode()[1:2]),
    ("\u6f22".encode()[:2], "\u6f22\u5b57".encode()[2:5]),
]


@exercise
def hold_back(answer):
    """hold_back(held, new): the text that can be shown of these bytes, and the bytes of an unfinished character."""

    def right(held, new):
        data = held + new
        keep = next(n for n in range(4) if _whole(data[: len(data) - n]))
        return data[: len(data) - keep].decode(), data[len(data) - keep :]

    def one_byte(held, new):
        data = held + new
        if _whole(data):
            return data.decode(), b""
        return data[:-1].decode(errors="replace"), data[-1:]

    def all_or_nothing(held, new):
        data = held + new
        return (data.decode(), b"") if _whole(data) else ("", data)

    held, rest = "\u00e9".encode()[:1], "\u00e9".encode()[1:]  # only together they can be decoded
    if error_of(answer, b"", b"tea") is None and isinstance(error_of(answer, held, rest), ValueError):
        return "it forgets the bytes held from before; decode held + new"
    return compare(
        answer,
        right,
        cases=HALVES,
        mistakes={
            "it shows a replacement character for half a character; hold those bytes back until the rest arrives": (
                lambda held, new: ((held + new).decode(errors="replace"), b"")
            ),
            "it throws the unfinished bytes away; return them, so that the next call can complete the character": (
                lambda held, new: ((held + new).decode(errors="ignore"), b"")
            ),
            "it shows nothing at all while the last character is unfinished; what stands before it can be shown": (
                all_or_nothing
            ),
            "each byte became a character of its own; UTF-8 uses up to four bytes for one": (
                lambda held, new: ((held + new).decode("latin-1"), b"")
            ),
            "it holds back at most one byte; a character has up to four, so up to three can be waiting": one_byte,
            "return what is held as bytes: bytes(...) makes them of a list or a bytearray": lambda held, new: (
                right(held, new)[0],
                list(right(held, new)[1]),
            ),
        },
    )


def _whole(data: bytes) -> bool:
    """Whether the bytes are whole characters."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
