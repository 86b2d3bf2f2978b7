"""Bills by hand, closed forms against the texts themselves, and what is billed against what was computed."""

from itertools import takewhile

import pytest

from kvcourse.serving.bill import PRICES, Rates, Usage, chat_tokens, invoice, measured_rates, usage
from kvcourse.serving.dry_run import DryEngine, linear_cost
from kvcourse.serving.replay import replay
from kvcourse.serving.workload import chat, poisson

RATES = Rates(input=3.0, cached_input=0.3, output=15.0, cache_write=3.75)


def test_an_invoice_by_hand():
    bill = invoice(Usage(uncached=2_000_000, cached=10_000_000, output=100_000), RATES)
    assert [line.dollars for line in bill.lines] == pytest.approx([2 * 3.75, 10 * 0.3, 0.1 * 15])
    assert bill.total == pytest.approx(12.0)
    assert [line.what for line in bill.lines] == ["cache write", "cached input", "output"]
    assert str(bill).splitlines()[-1].endswith("$12.000000")


def test_without_caching_nothing_is_written_and_nothing_found():
    bill = invoice(Usage(12_000_000, 0, 100_000), RATES, caching=False)
    assert bill.total == pytest.approx(12 * 3.0 + 1.5)
    assert bill.lines[0].what == "input"
    with pytest.raises(ValueError, match="caching was on"):
        invoice(Usage(1, 1, 1), RATES, caching=False)


def test_published_prices_say_where_and_when_they_were_read():
    for rates in PRICES.values():
        assert 0 < rates.cached_input < rates.input < rates.output
        assert rates.cache_write is None or rates.cache_write > rates.input
        assert rates.source.startswith("https://")
        assert rates.read.startswith("2026-")


def texts_of_a_chat(turns, system, user, answer):
    """What each turn sends, and what it leaves behind, as lists of tokens that are all different."""
    text, sent, left = list(range(system)), [], []
    for _ in range(turns):
        text += range(len(text), len(text) + user)
        sent.append(list(text))
        text += range(len(text), len(text) + answer)
        left.append(text[:-1])  # nobody read the last token
    return sent, left


@pytest.mark.parametrize("shape", [(1, 10, 3, 4), (5, 0, 1, 1), (6, 33, 7, 9), (9, 100, 20, 30)])
@pytest.mark.parametrize("block_size", [None, 1, 4, 16])
def test_the_tokens_of_a_chat_counted_one_by_one(shape, block_size):
    sent, left = texts_of_a_chat(*shape)
    cached = 0
    if block_size is not None:
        for before, now in zip(left, sent[1:], strict=False):
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, now, strict=False)))
            cached += common - common % block_size
    total = sum(map(len, sent))
    assert chat_tokens(*shape, block_size) == Usage(total - cached, cached, shape[0] * shape[3])


def test_without_a_cache_a_chat_grows_as_a_square_and_with_one_as_a_line():
    computed = [chat_tokens(n, 100, 20, 30).uncached for n in range(1, 9)]
    cached = [chat_tokens(n, 100, 20, 30, block_size=1).uncached for n in range(1, 9)]
    steps = [after - before for before, after in zip(computed, computed[1:], strict=False)]
    assert {after - before for before, after in zip(steps, steps[1:], strict=False)} == {20 + 30}
    assert {after - before for before, after in zip(cached, cached[1:], strict=False)} == {20 + 1}
    assert cached[0] == computed[0] == 120


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_an_engine_computes_what_the_closed_form_says(block_size):
    trace = chat(5, 37, user=11, answer=8)
    cost = linear_cost(0.1, 0.01)
    with_cache = replay(DryEngine(400, block_size), trace, cost)
    without = replay(DryEngine(400, block_size, prefix_caching=False), trace, cost)
    assert usage(with_cache.served) == chat_tokens(5, 37, 11, 8, block_size)
    assert usage(without.served) == chat_tokens(5, 37, 11, 8)
    fed_back = 5 * 7  # each answer's tokens but for the last
    assert with_cache.computed_tokens == chat_tokens(5, 37, 11, 8, block_size).uncached + fed_back
    assert without.computed_tokens == chat_tokens(5, 37, 11, 8).uncached + fed_back


def test_measured_rates_by_hand():
    """1,000 prompt tokens a second are 3.6 million an hour."""
    rates = measured_rates(prefill_speed=1000.0, decode_speed=100.0, dollars_per_hour=1.8)
    assert (rates.input, rates.cached_input, rates.output) == (pytest.approx(0.5), 0.0, pytest.approx(5.0))


@pytest.mark.parametrize("num_blocks", [400, 60])  # the small pool preempts
def test_at_measured_rates_the_bill_is_the_rent(num_blocks):
    trace = poisson(20.0, 30, seed=5) + chat(3)
    result = replay(DryEngine(num_blocks, 8), trace, linear_cost(0.05, 0.002))
    assert (result.preemptions > 0) == (num_blocks == 60)
    rates = measured_rates(result.prefill_speed, result.decode_speed, dollars_per_hour=2.5)
    assert invoice(usage(result.served), rates).total == pytest.approx(2.5 * result.busy / 3600)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: chat_tokens(0, 1, 1, 1), "turns=0"),
        (lambda: chat_tokens(1, -1, 1, 1), "system=-1"),
        (lambda: chat_tokens(1, 1, 1, 1, block_size=0), "block_size=0"),
        (lambda: measured_rates(0, 1, 1), "tokens_per_second=0"),
    ],
)
def test_bad_input_is_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        bad()


def test_a_prompt_without_an_answer_is_not_billed():
    """One request is answered; one is aborted in the queue, and one asked for no token."""
    dry = DryEngine(20, 4, max_running=1)
    ids = [dry.submit([1] * 5, 2), dry.submit([2] * 9, 2), dry.submit([3] * 9, 0)]
    dry.step()
    dry.abort(ids[1])
    while dry.unfinished:
        dry.step()
    assert usage(dry.results[id] for id in ids) == Usage(5, 0, 2)
