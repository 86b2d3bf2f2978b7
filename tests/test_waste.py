"""Memory set aside and memory in use, by hand."""

import numpy as np
import pytest

from kvcourse.serving.snapshot import Block, Snapshot
from kvcourse.serving.waste import first_hole, in_pages, in_pieces, reserved
from kvcourse.serving.workload import Arrival, chat, poisson


def requests(*lengths):
    return [Arrival(0.0, [0] * prompt, answer) for prompt, answer in lengths]


def test_one_request_by_hand():
    """3 tokens of prompt, 2 new ones, blocks of 4: it holds 3 tokens in the first step and 4 in the second."""
    waste = reserved(requests((3, 2)), max_len=10, block_size=4)
    assert (waste.tokens, waste.known, waste.pages) == (3 + 4, 4 + 4, 4 + 4)
    assert (waste.power_of_two, waste.maximum) == (5 + 5, 10 + 10)
    assert waste.share("maximum") == 7 / 20
    assert waste.share("pages") == 7 / 8


def test_a_block_is_taken_when_its_first_token_comes():
    assert reserved(requests((4, 2)), max_len=10, block_size=4).pages == 4 + 8


def test_25_tokens_reserve_32_as_in_the_paper():
    """Kwon et al. 2023, section 6.1, of Orca (Pow2); a request lives as many steps as it makes tokens."""
    assert reserved(requests((10, 25)), max_len=100).power_of_two == 25 * (10 + 32)


def test_closed_form_over_a_trace():
    trace = poisson(1.0, 40, seed=3)
    waste = reserved(trace, max_len=512)
    lengths = [(len(arrival.prompt), arrival.max_new_tokens) for arrival in trace]
    assert waste.tokens == sum(n * p + n * (n - 1) // 2 for p, n in lengths)
    assert waste.known == sum(n * (p + n - 1) for p, n in lengths)
    assert waste.tokens < waste.pages < waste.known < waste.power_of_two < waste.maximum


def test_blocks_of_one_token_waste_nothing_and_one_block_a_text_is_reserving_the_maximum():
    trace = poisson(1.0, 20, seed=4)
    assert reserved(trace, 512, block_size=1).share("pages") == 1.0
    one_block = reserved(trace, 512, block_size=512)
    assert one_block.pages == one_block.maximum
    assert reserved(trace, 512, block_size=2).share("pages") < 1.0


def test_later_turns_hold_the_whole_conversation():
    assert reserved(chat(2, 4, user=1, answer=1), max_len=20).tokens == 5 + 7


@pytest.mark.parametrize("trace", [[], requests((5, 1), (9, 3))])
def test_texts_that_do_not_fit_are_refused(trace):
    with pytest.raises(ValueError, match="max_len=10"):
        reserved(trace, max_len=10)


def test_two_texts_in_one_piece_by_hand():
    """4 slots; texts of (2, 2) and (1, 2) need 3 and 2, so the second comes when the first has left, after 2 steps."""
    addresses, refused = in_pieces([(2, 2), (1, 2)], 4)
    assert addresses.owner.T.tolist() == [[0, 0, 0, -1], [-1] * 4, [1, 1, -1, -1], [-1] * 4]
    assert addresses.filled.T.tolist() == [[True, True, False, False], [False] * 4, [True] + [False] * 3, [False] * 4]
    assert addresses.shares == pytest.approx((3 / 16, 2 / 16, 11 / 16))
    assert refused == []


def test_a_text_waits_though_there_is_room_in_all():
    """9 slots. Three texts of 3 slots each; the outer two leave after 1 step, and a text of 4 finds 6 slots free, but
    only 3 in a row. It comes when the middle one has left, after 3 steps."""
    addresses, refused = in_pieces([(3, 1), (1, 3), (3, 1), (3, 2)], 9)
    assert refused == [1, 2]
    assert addresses.owner.T.tolist() == [[-1] * 3 + [1] * 3 + [-1] * 3] * 2 + [[-1] * 9, [3] * 4 + [-1] * 5, [-1] * 9]
    assert in_pieces([(3, 1), (1, 3), (3, 1), (2, 2)], 9)[1] == []  # one that needs 3 goes to the first place


@pytest.mark.parametrize("size, place", [(1, 1), (2, 3), (3, None)])
def test_first_hole(size, place):
    assert first_hole(np.array([0, 1, 0, 1, 1], bool), size) == place


@pytest.mark.parametrize("lengths", [[], [(8, 4)]])
def test_a_text_that_never_fits_in_one_piece_is_refused(lengths):
    with pytest.raises(ValueError, match="10"):
        in_pieces(lengths, 10)


def test_pages_have_the_slots_that_snapshots_say():
    two = (Block((1, 0), 2, 3, False), Block((), 0, 2, True))
    addresses = in_pages([Snapshot(4, two, (0, 1), ()), Snapshot(4, (two[1], two[1]), (), ())])
    assert addresses.owner.T.tolist() == [[1] * 4 + [-1] * 4, [-1] * 8]
    assert addresses.filled.T.tolist() == [[True] * 3 + [False] * 5, [False] * 8]
    assert addresses.shares == pytest.approx((3 / 16, 1 / 16, 12 / 16))
