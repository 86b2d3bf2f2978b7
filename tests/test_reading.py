"""When words are there and when a reader waits, by hand."""

import numpy as np
import pytest

from kvcourse import reading


def test_word_times_by_hand():
    pieces = [" A", " lo", "af", ".", "\n", "New", " line", ""]
    assert reading.word_times(pieces, [1, 2, 3, 4, 5, 6, 7, 8]) == [1, 4, 6, 7]
    assert reading.word_times(["\n", ""], [1, 2]) == []


def test_pieces_may_hold_parts_of_several_words():
    assert reading.word_times(["Hel", "lo wor", "ld"], [1, 2, 3]) == [2, 3]
    assert reading.word_times(["a b c", " d"], [1, 2]) == [1, 1, 1, 2]
    assert reading.word_times(["one ", "two", "", "\n", "three"], [1, 2, 3, 4, 5]) == [1, 2, 5]


def test_a_reader_with_words_in_hand_never_waits():
    assert reading.read_times([1.0, 1.1, 1.2], 2.0) == pytest.approx([1.0, 1.5, 2.0])
    assert reading.waits([1.0, 1.1, 1.2], 2.0) == {}


def test_a_reader_who_caught_up_waits():
    assert reading.read_times([1.0, 3.0, 3.1], 2.0) == pytest.approx([1.0, 3.0, 3.5])
    assert reading.waits([1.0, 3.0, 3.1], 2.0) == pytest.approx({1: 1.5})
    assert reading.waits([1.0], 2.0) == reading.waits([], 2.0) == {}


@pytest.mark.parametrize("speed", [0.5, 3.0, 20.0, 500.0])
def test_reading_takes_the_time_of_the_words_and_the_waits(speed):
    rng = np.random.default_rng(0)
    times = list(np.cumsum(rng.exponential(0.1, 50)))
    end = reading.read_times(times, speed)[-1]
    assert end == pytest.approx(times[0] + 49 / speed + sum(reading.waits(times, speed).values()))
