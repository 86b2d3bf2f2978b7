import math

import pytest

from kvcourse import results
from kvcourse.entry import Entry
from kvcourse.scoring import Score, factor_off, times


def entry(guess, measured, unit="", key="01.a", bound=None):
    return Entry(key, guess=guess, measured=measured, unit=unit, bound=bound)


@pytest.mark.parametrize(
    "value, measured, ratio",
    [
        (5, 10, 0.5),
        (-2, -4, 0.5),
        (0, 0, 1.0),
        (0.0, 3, None),
        (3, 0, None),
        (-3, 3, None),
        (10**308, 1e-300, None),
        (1e-300, 10**308, None),
        ("many", 3, None),
        (3, None, None),
        (None, 3, None),
    ],
)
def test_a_ratio_where_there_is_one(value, measured, ratio):
    assert times(value, measured) == ratio


@pytest.mark.parametrize(
    "guess, measured, factor",
    [
        (5, 10, 2),
        (20, 10, 2),
        (10, 10, 1),
        (0, 0, 1),
        (2, 0, math.inf),
        ("Q  proj ", "q proj", 1),
        ("a", "b", math.inf),
    ],
)
def test_the_factor_by_which_a_guess_is_off(guess, measured, factor):
    assert factor_off(entry(guess, measured)) == factor


def test_near_is_up_to_twice_and_down_to_half():
    assert Score((entry(5, 10), entry(20, 10), entry(0.1, 0.2))).near == 3
    assert Score((entry(4.99, 10), entry(20.01, 10))).near == 0


def test_the_median_is_the_middle_factor_and_infinite_where_half_have_none():
    assert Score((entry(1, 10), entry(10, 10), entry(30, 10))).median_factor == 3
    assert Score((entry(2, 0), entry(10, 10))).median_factor == math.inf
    assert math.isnan(Score(()).median_factor)


def test_the_sentences_say_what_was_near_and_what_was_farthest_off():
    score = Score(
        (
            entry(53, 1368, "rows", "01.rows"),
            entry(2, 3.0, key="01.attention_exponent"),
            entry(2, 2, key="01.linear_exponent"),
            entry(None, 26.3, "times"),
            entry(3, None, "s"),
            entry(1000, "never", "tokens"),
        )
    )
    assert str(score) == (
        "Each guess as a factor of what was measured: 2 of 3 within a factor of two, the middle one off by a factor of "
        "1.5. Farthest off: 01.rows, guessed 53 rows, measured 1,368 rows. Besides: 1 measured without a guess, "
        "1 guessed and not measured yet, 1 with a number beside a word."
    )


@pytest.mark.parametrize(
    "entries, said",
    [
        ((), "Nothing was guessed or measured here yet."),
        ((entry(None, None),), "Nothing was guessed or measured here yet."),
        ((entry(None, 3), entry(None, "x")), "No guess can be scored. Besides: 2 measured without a guess."),
        ((entry(3, None),), "No guess can be scored. Besides: 1 guessed and not measured yet."),
        ((entry(3, 4),), "Each guess as a factor of what was measured: 1 of 1 within a factor of two."),
    ],
)
def test_little_is_said_to_be_little(entries, said):
    assert str(Score(entries)) == said


def test_results_score_one_notebook(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCOURSE_RESULTS", str(tmp_path))
    results.predict("01.b", 5, unit="tokens")
    results.measure("01.b", 6, unit="tokens")
    results.measure("01.a", 0.5, unit="s", bound=0.25)
    results.measure("02.a", 1)
    assert [entry.key for entry in results.score("01").entries] == ["01.a", "01.b"]
    assert (results.score("01").near, len(results.score("01").guessed)) == (1, 1)
    assert results.score("07").entries == ()
