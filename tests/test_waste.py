"""Memory set aside and memory in use, by hand."""

import pytest

from kvcourse.serving.waste import reserved
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
