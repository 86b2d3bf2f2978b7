"""Replays on a virtual clock: schedules worked out by hand, and real models by a clock that ticks once a reading."""

import random

import pytest
import torch
from reference import small_config, small_model

import kvcourse as kv
from kvcourse.serving import replay as replay_module
from kvcourse.serving import static
from kvcourse.serving.dry_run import DryEngine, linear_cost
from kvcourse.serving.engine import Engine
from kvcourse.serving.replay import replay
from kvcourse.serving.static import replay_static
from kvcourse.serving.workload import Arrival, agent_branches, chat, poisson

A_SECOND = linear_cost(1.0, 0.0)  # a step takes a second, whatever it does


def request(at, prompt_length, answer, after=None):
    prompt = random.Random(f"{at} {prompt_length}").choices(range(97), k=prompt_length)
    return Arrival(at, prompt, answer, after)


def engine(**changes):
    return DryEngine(**{"num_blocks": 64, "block_size": 4, **changes})


def test_a_request_joins_at_the_next_step():
    """A comes at 0 and makes tokens at 1, 2, 3. B comes at 1.5, in the middle of a step, and joins the next one."""
    result = replay(engine(), [request(0.0, 4, 3), request(1.5, 5, 2)], A_SECOND)
    a, b = result.served
    assert (a.ttft, a.itl) == (1.0, [1.0, 1.0])
    assert (b.ttft, b.itl) == (1.5, [1.0])
    assert [(tick.prefill_tokens, tick.decode_tokens) for tick in result.ticks] == [(4, 0), (0, 1), (5, 1), (0, 1)]
    assert (result.seconds, result.busy, result.throughput) == (4.0, 4.0, 5 / 4)
    assert (result.ttft_percentile(50), result.itl_percentile(99)) == (1.25, 1.0)
    assert [tick.used_blocks for tick in result.ticks] == [1, 2, 4, 2]  # in a step; who ends in it has gone after it
    assert result.peak_blocks == 4


def test_the_clock_jumps_over_idle_time():
    result = replay(engine(), [request(3.0, 4, 1), request(60.0, 4, 2)], A_SECOND)
    assert [tick.start for tick in result.ticks] == [3.0, 60.0, 61.0]
    assert (result.busy, result.seconds) == (3.0, 59.0)  # from the first arrival at 3 to the last token at 62
    assert [answer.ttft for answer in result.served] == [1.0, 1.0]


def test_results_stand_in_the_order_of_the_trace_whoever_comes_first():
    result = replay(engine(), [request(5.0, 4, 2), request(0.0, 6, 3)], A_SECOND)
    assert [answer.prompt_length for answer in result.served] == [4, 6]
    assert [len(answer.ids) for answer in result.served] == [2, 3]
    assert result.came == [5.0, 0.0]


def test_small_chunks_let_readers_wait_less_and_the_prompt_more():
    """A reads along while a prompt of 12 comes. With a second for each token, the whole prompt holds A up for 13 s; in
    chunks of 3 beside A's token for 4 s, and then it takes four steps."""
    trace = [request(0.0, 1, 6), request(0.5, 12, 1)]
    whole = replay(engine(max_batch_tokens=13), trace, linear_cost(0.0, 1.0))
    chunked = replay(engine(max_batch_tokens=4), trace, linear_cost(0.0, 1.0))
    assert whole.ticks[0][2:4] == (1, 0)  # a prompt of one token is prefill all the same
    assert whole.served[0].itl == [13.0, 1.0, 1.0, 1.0, 1.0]
    assert chunked.served[0].itl == [4.0, 4.0, 4.0, 4.0, 1.0]
    assert (whole.served[1].ttft, chunked.served[1].ttft) == (13.5, 16.5)


def test_a_full_pool_lets_requests_wait_or_preempts_them():
    """Two requests that end at 8 tokens each, in a pool of 3 blocks of 4: the second one loses its block, and waits."""
    result = replay(engine(num_blocks=3), [request(0.0, 4, 5), request(0.0, 3, 6)], A_SECOND)
    assert result.preemptions == 1
    assert [len(answer.ids) for answer in result.served] == [5, 6]
    assert result.served[0].itl == [1.0] * 4
    assert max(result.served[1].itl) > 1.0
    assert replay(engine(num_blocks=4), [request(0.0, 4, 5), request(0.0, 3, 6)], A_SECOND).preemptions == 0


def test_a_turn_comes_when_the_one_before_is_answered_and_goes_on_from_its_text():
    """The first turn has 6 + 2 tokens; 7 of them were fed, so of blocks of 4 one is found again."""
    prompts = []
    dry = engine()
    result = replay(
        dry, [request(0.0, 6, 2), request(10.0, 3, 2, after=0)], A_SECOND,
        on_step=lambda _: prompts.extend(chunk.request.tokens[:11] for chunk in dry.plan.chunks),
    )  # fmt: skip
    first, second = request(0.0, 6, 2), request(10.0, 3, 2)
    assert result.came == [0.0, 12.0]  # the last token came at 2
    assert prompts[-1] == first.prompt + result.served[0].ids + second.prompt
    assert [answer.cached_tokens for answer in result.served] == [0, 4]
    assert result.computed_tokens == 6 + 1 + (11 - 4) + 1
    without = replay(engine(prefix_caching=False), [first, Arrival(10.0, second.prompt, 2, after=0)], A_SECOND)
    assert (without.cached_tokens, without.computed_tokens) == (0, 6 + 1 + 11 + 1)


def test_branches_come_together():
    result = replay(engine(), agent_branches(3, 1, system=8, instruction=2, answer=4), A_SECOND)
    assert result.came == [0.0, 4.0, 4.0, 4.0]
    assert [answer.ttft for answer in result.served[1:]] == [1.0] * 3


def test_static_batching_by_hand():
    """A comes first and runs alone. B and C wait for it; C is done after a token, and its place computes on for B. D
    waits for B's last token."""
    trace = [request(0.0, 2, 1), request(0.25, 6, 3), request(0.5, 2, 1), request(1.5, 2, 1)]
    result = replay_static(None, trace, batch_size=2, step_cost=A_SECOND)
    assert [answer.ttft for answer in result.served] == [1.0, 1.75, 1.5, 3.5]
    assert result.served[1].itl == [1.0, 1.0]
    assert [len(answer.arrivals) for answer in result.served] == [1, 3, 1, 1]
    assert [(tick.prefill_tokens, tick.decode_tokens) for tick in result.ticks] == [
        (2, 0),
        (12, 0),
        (0, 2),
        (0, 2),
        (2, 0),
    ]
    assert result.seconds == result.busy == 5.0


def test_static_batching_can_wait_for_a_full_batch():
    trace = [request(0.0, 2, 2), request(3.0, 2, 1), request(4.0, 2, 1)]
    result = replay_static(None, trace, batch_size=2, wait_for_full=True, step_cost=A_SECOND)
    assert [answer.ttft for answer in result.served] == [4.0, 1.0, 2.0]  # the last one waits in vain for another


def test_one_batch_of_equals_is_the_same_either_way_and_of_unequals_not():
    equal = [Arrival(0.0, prompt, 6) for prompt in ([1] * 9, [2] * 9, [3] * 9)]
    unequal = [*equal[:2], Arrival(0.0, [3] * 4, 2)]
    for trace, same in ((equal, True), (unequal, False)):
        continuous = replay(engine(), trace, linear_cost(0.5, 0.01))
        batch = replay_static(None, trace, batch_size=3, step_cost=linear_cost(0.5, 0.01))
        assert (continuous.ticks[0].seconds == batch.ticks[0].seconds) == same
        assert (continuous.busy == batch.busy) == same


def test_continuous_batching_serves_more_and_sooner():
    trace = poisson(1.0, 60, seed=2)
    cost = linear_cost(0.03, 0.001)
    continuous, batches = replay(engine(num_blocks=400), trace, cost), replay_static(None, trace, 8, step_cost=cost)
    assert continuous.throughput > batches.throughput
    assert continuous.ttft_percentile(50) < batches.ttft_percentile(50) / 10


@pytest.fixture
def seconds(monkeypatch):
    """A clock that is a second later at each reading: so each step takes one."""
    time = {"now": 0.0}

    def read():
        time["now"] += 1.0
        return time["now"]

    monkeypatch.setattr(replay_module, "perf_counter", read)
    monkeypatch.setattr(static, "perf_counter", read)


MODEL = small_model(small_config(), dtype=torch.float64)
TRACE = [request(0.0, 9, 5), request(0.5, 17, 1), request(0.5, 4, 7), request(20.0, 11, 3)]


def test_an_engine_is_measured_and_writes_what_a_solo_run_writes(seconds):
    real = Engine(MODEL, num_blocks=32, block_size=4, max_batch_tokens=8)
    result = replay(real, TRACE)
    assert [tick.seconds for tick in result.ticks] == [1.0] * len(result.ticks)
    for arrival, answer in zip(TRACE, result.served, strict=True):
        assert answer.ids == kv.generate(MODEL, arrival.prompt, arrival.max_new_tokens).ids
        assert len(answer.arrivals) == arrival.max_new_tokens
    dry = replay(DryEngine(num_blocks=32, block_size=4, max_batch_tokens=8), TRACE, A_SECOND)
    assert [answer.arrivals for answer in dry.served] == [answer.arrivals for answer in result.served]
    assert (dry.ticks, dry.came) == (result.ticks, result.came)


def test_static_batches_are_measured_and_write_what_a_solo_run_writes(seconds):
    result = replay_static(MODEL, TRACE, batch_size=2)
    for arrival, answer in zip(TRACE, result.served, strict=True):
        assert answer.ids == kv.generate(MODEL, arrival.prompt, arrival.max_new_tokens).ids
    dry = replay_static(None, TRACE, batch_size=2, step_cost=A_SECOND)
    assert [answer.arrivals for answer in dry.served] == [answer.arrivals for answer in result.served]


def test_a_chat_goes_on_from_what_the_model_said():
    trace = chat(3, 10, user=4, answer=5, vocab_size=97)
    result = replay(Engine(MODEL, num_blocks=32, block_size=4), trace, A_SECOND)
    text = []
    for arrival, answer in zip(trace, result.served, strict=True):
        text += arrival.prompt
        assert answer.prompt_length == len(text)
        assert answer.ids == kv.generate(MODEL, text, 5).ids
        text += answer.ids
    assert result.cached_tokens > 0


def test_speeds_share_out_the_time_that_something_was_computed():
    """Steps of a second: prefill of 4; a token of A; a token of A beside 3 of B; a token of B."""
    result = replay(engine(), [request(0.0, 4, 3), request(1.5, 3, 2)], A_SECOND)
    prefill_seconds, decode_seconds = 1 + 3 / 4, 1 + 1 / 4 + 1
    assert result.prefill_speed == pytest.approx(7 / prefill_seconds)
    assert result.decode_speed == pytest.approx(5 / decode_seconds)
    assert prefill_seconds + decode_seconds == result.busy


def test_answers_of_one_token_have_no_gaps_and_no_decode_speed():
    result = replay(engine(), [request(0.0, 4, 1)], A_SECOND)
    assert result.itl_percentile(50) is None
    with pytest.raises(ValueError, match="No step of this replay had decode_tokens"):
        _ = result.decode_speed


@pytest.mark.parametrize("p", [0, 100])
def test_percentiles_out_of_range_are_refused(p):
    with pytest.raises(ValueError, match="between 0 and 100"):
        replay(engine(), [request(0.0, 4, 1)], A_SECOND).ttft_percentile(p)


def test_a_refused_request_leaves_the_engine_empty():
    dry = engine(num_blocks=4)
    with pytest.raises(ValueError, match="the pool has 4"):
        replay(dry, [request(0.0, 4, 9), request(2.5, 40, 1)], A_SECOND)
    assert (dry.unfinished, dry.free_blocks) == (0, 4)
    assert len(replay(dry, [request(0.0, 4, 9)], A_SECOND).served[0].ids) == 9


def test_a_request_that_ends_early_is_no_result():
    dry = engine()
    with pytest.raises(RuntimeError, match="Request 0 of the trace ended early: aborted"):
        replay(dry, [request(0.0, 4, 9)], A_SECOND, on_step=lambda clock: dry.abort(0))


def test_a_busy_engine_is_refused():
    dry = engine()
    dry.submit([1, 2], 3)
    with pytest.raises(ValueError, match="still has 1 requests"):
        replay(dry, [request(0.0, 4, 1)], A_SECOND)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: replay(engine(), [], A_SECOND), "trace is empty"),
        (lambda: replay(engine(), [request(0.0, 4, 0)], A_SECOND), "max_new_tokens of arrival 0=0"),
        (lambda: replay_static(None, [request(0.0, 4, 1)], 2), "give a step_cost"),
        (lambda: replay_static(None, [request(0.0, 4, 1)], 0, step_cost=A_SECOND), "batch_size=0"),
        (lambda: replay_static(None, chat(2), 2, step_cost=A_SECOND), "without `after`"),
        (lambda: engine().submit([], 3), "is empty"),
        (lambda: engine().submit([1, 2], -3), "max_new_tokens=-3"),
        (lambda: engine().submit([1, 2], 2.5), "max_new_tokens=2.5"),
        (lambda: engine().submit("text", 2), "must be token ids"),
        (lambda: engine().submit([1, 2], 2, on_token=5), "on_token=5"),
        (lambda: engine().forget(7), "id 7 has ended"),
        (lambda: engine().abort(7), "No request has the id 7"),
    ],
)
def test_bad_input_is_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        bad()


BAD_TRACES = {
    "at of arrival 0=nan": Arrival(float("nan"), [1], 2),
    "at of arrival 0=inf": Arrival(float("inf"), [1], 2),
    "at of arrival 0=-5.0": Arrival(-5.0, [1], 2),
    "at of arrival 0='1'": Arrival("1", [1], 2),
    "after of arrival 0='0'": Arrival(0.0, [1], 2, after="0"),
    "prompt of arrival 0 is empty": Arrival(0.0, [], 2),
    "prompt of arrival 0 must be a list of token ids": Arrival(0.0, ["text"], 2),
    "Item 0 of the trace must be an Arrival": (0.0, [1], 2),
}


@pytest.mark.parametrize("message", BAD_TRACES)
@pytest.mark.parametrize("play", [replay, lambda none, *rest: replay_static(None, rest[0], 2, step_cost=rest[1])])
def test_a_trace_that_cannot_be_played_is_refused_before_any_step(play, message):
    plans = []
    with pytest.raises(ValueError, match=message):
        play(engine(), [BAD_TRACES[message]], lambda plan: plans.append(plan) or 1.0)
    assert plans == []


def test_a_follower_cannot_come_before_what_it_follows():
    with pytest.raises(ValueError, match="at of arrival 1=-50.0 must be a number of seconds, at least 0 and finite"):
        replay(engine(), [request(0.0, 3, 2), request(-50.0, 3, 2, after=0)], A_SECOND)


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), -1.0, None, "1"])
def test_a_step_takes_a_number_of_seconds(cost):
    dry, trace = engine(), [request(0.0, 4, 3)]
    for play in (lambda c: replay(dry, trace, c), lambda c: replay_static(None, trace, 2, step_cost=c)):
        with pytest.raises(ValueError, match=r"step_cost\(plan\)=.* must be a number of seconds"):
            play(lambda plan: cost)
        assert (dry.unfinished, dry.free_blocks) == (0, 64)
    for_nothing = replay(dry, trace, lambda plan: 0)
    assert for_nothing.seconds == 0
    with pytest.raises(ValueError, match="No time passed"):
        _ = for_nothing.throughput


def stop(clock):
    raise KeyboardInterrupt


def test_a_replay_leaves_nothing_in_the_engine_and_takes_nothing_out_of_it():
    real = Engine(MODEL, num_blocks=32, block_size=4)
    mine = real.submit([1, 2, 3], 1)
    real.step()
    replay(real, TRACE[:2], A_SECOND)
    with pytest.raises(KeyboardInterrupt):
        replay(real, TRACE, A_SECOND, on_step=stop)
    assert list(real.results) == list(real.run()) == [mine] and real.free_blocks == 32


@pytest.mark.parametrize("make", [engine, lambda: Engine(MODEL, num_blocks=64, block_size=4)])
def test_what_on_step_submits_runs_along(make):
    server, others = make(), []
    result = replay(
        server,
        [request(0.0, 4, 3)],
        A_SECOND,
        on_step=lambda clock: clock == 1.0 and others.append(server.submit([5], 4)),
    )
    assert result.served[0].arrivals == [1.0, 2.0, 3.0] and len(result.served) == 1
    assert list(server.results) == others and len(server.results[others[0]].ids) == 4


@pytest.mark.parametrize("make", [engine, lambda: Engine(MODEL, num_blocks=64, block_size=4)])
def test_no_tokens_and_callbacks_that_abort_are_as_with_a_model(make):
    server, heard = make(), []
    ids = [server.submit([1, 2], 0), server.submit([1, 2], 5, on_token=lambda token: [server.abort(i) for i in (1, 2)])]
    ids.append(server.submit([1, 2], 3, on_token=heard.append))
    assert server.unfinished == 2 and server.results[ids[0]].ids == []
    assert server.step() == ids[1:] and server.unfinished == 0 and heard == []
    assert [len(server.results[id].ids) for id in ids] == [0, 1, 1]
    assert [server.results[id].stop_reason for id in ids] == ["length", "aborted", "aborted"]


def test_aborting_twice_does_nothing():
    dry = engine()
    id = dry.submit([1, 2], 3)
    assert (dry.abort(id), dry.abort(id), dry.unfinished, dry.free_blocks) == (True, False, 0, 64)
