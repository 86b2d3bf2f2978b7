"""Traces: what a seed fixes, how long requests are and when they come, and how turns and branches go on."""

import statistics

import pytest

from kvcourse.serving.workload import Arrival, agent_branches, chat, mixed_lengths, poisson, whole_lengths


def test_lengths_are_log_normal_around_their_medians():
    lengths = mixed_lengths(4000, seed=1, prompt=100, answer=20, spread=0.5, longest=10_000)
    for values, median in zip(zip(*lengths, strict=True), (100, 20), strict=True):
        assert statistics.median(values) == pytest.approx(median, rel=0.05)
        above = sum(value > median * 2.718281828**0.5 for value in values) / len(values)
        assert above == pytest.approx(0.1587, abs=0.02)  # of a normal distribution, this lies above one sigma


def test_a_larger_spread_spreads_more():
    def deviation(spread):
        return statistics.stdev(length.prompt for length in mixed_lengths(500, spread=spread, longest=100_000))

    assert deviation(0.01) < 1 < deviation(0.4) < deviation(1.0)


def test_no_length_is_above_the_longest_and_none_piles_up_there():
    lengths = [length.prompt for length in mixed_lengths(1000, prompt=64, longest=96)]
    assert max(lengths) <= 96
    assert lengths.count(96) < 30  # cutting instead of drawing again would put a third of them there


@pytest.mark.parametrize("make", [lambda seed: poisson(3.0, 50, seed), lambda seed: chat(3, 8, seed, chats=4)])
def test_a_seed_fixes_the_trace_and_another_one_changes_it(make):
    assert make(5) == make(5)
    assert make(5) != make(6)


def test_the_trace_of_a_seed_stays_what_it_is():
    """Notebooks state numbers of it."""
    assert mixed_lengths(3) == [(32, 38), (47, 66), (33, 58)]
    assert [round(arrival.at, 4) for arrival in poisson(2.0, 3)] == [0.1297, 0.342, 0.7302]


def test_gaps_are_exponential_so_their_deviation_equals_their_mean():
    times = [arrival.at for arrival in poisson(4.0, 4000, seed=2, lengths=[(1, 1)] * 4000)]
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert statistics.mean(gaps) == pytest.approx(1 / 4.0, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 4.0, rel=0.05)  # regular arrivals would have 0


def test_a_higher_rate_plays_the_same_requests_faster():
    slow, fast = poisson(1.0, 20), poisson(5.0, 20)
    assert [arrival.prompt for arrival in slow] == [arrival.prompt for arrival in fast]
    assert [arrival.at for arrival in slow] == pytest.approx([5 * arrival.at for arrival in fast])


def test_poisson_takes_lengths_of_its_caller():
    arrivals = poisson(1.0, 2, lengths=[(3, 4), (5, 6)], vocab_size=7)
    assert [(len(arrival.prompt), arrival.max_new_tokens) for arrival in arrivals] == [(3, 4), (5, 6)]
    assert all(0 <= token < 7 for arrival in arrivals for token in arrival.prompt)


def test_turns_of_a_chat_go_on_from_one_another_below_a_common_system_prompt():
    trace = chat(3, [7, 8, 9], user=5, answer=4, chats=2, think=2.5)
    assert [arrival.after for arrival in trace] == [None, 0, 1, None, 3, 4]
    assert [arrival.at for arrival in trace[1:3]] == [2.5, 2.5]
    assert trace[0].prompt[:3] == trace[3].prompt[:3] == [7, 8, 9]
    assert trace[0].prompt[3:] != trace[3].prompt[3:]
    # Turn t sends s + t u + (t - 1) a tokens.
    assert whole_lengths(trace) == [(8, 4), (17, 4), (26, 4)] * 2


def test_an_agent_branches_from_each_answer():
    trace = agent_branches(branches=2, depth=2, system=10, instruction=3, answer=4)
    assert [arrival.after for arrival in trace] == [None, 0, 0, 1, 1, 2, 2]
    assert [length.prompt for length in whole_lengths(trace)] == [13, 20, 20, 27, 27, 27, 27]
    assert len({tuple(arrival.prompt) for arrival in trace}) == 7  # no two instructions are the same


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: poisson(0, 5), "rate=0"),
        (lambda: poisson(1.0, 0), "n=0"),
        (lambda: poisson(1.0, 2, lengths=[(1, 1)]), "2 requests need 2 pairs of lengths, and 1"),
        (lambda: poisson(1.0, 1, lengths=[(0, 1)]), "prompt=0"),
        (lambda: mixed_lengths(5, prompt=600, longest=512), "must not be above longest=512"),
        (lambda: mixed_lengths(5, spread=-1), "spread=-1"),
        (lambda: chat(0), "turns=0"),
        (lambda: chat(2, system=-1), "system=-1"),
        (lambda: agent_branches(branches=0), "branches=0"),
        (lambda: chat(2, think=float("nan")), "think=nan must be a number of seconds"),
        (lambda: chat(2, think=-1.0), "think=-1.0"),
        (lambda: poisson(float("inf"), 5), "rate=inf"),
        (lambda: whole_lengths([Arrival(0.0, [1], 1, after=0)]), "must be an earlier one"),
    ],
)
def test_bad_input_is_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        bad()
