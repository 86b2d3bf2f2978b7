"""The engine's calls: what they refuse, in which states a request can be ended, and what an interrupt leaves behind."""

import sys
from contextlib import nullcontext
from itertools import count
from pathlib import Path

import pytest
import torch
from served_models import MODEL, prompt_of, solo

import kvcourse as kv
from kvcourse.serving.blocks import BlockTable
from kvcourse.serving.engine import Engine
from kvcourse.serving.scheduler import Scheduler
from kvcourse.serving.served import Served

PROMPTS = [prompt_of(n, seed=n) for n in (5, 9, 14)]
NEW = 8
ALONE = [solo(prompt, NEW) for prompt in PROMPTS]
DRAW = dict(temperature=1.5, seed=3)


def engine_of(num_blocks=30, block_size=4, **options):
    return Engine(MODEL, num_blocks, block_size, **options)


def submit_all(engine, **options):
    return [engine.submit(prompt, NEW, **options) for prompt in PROMPTS]


def test_a_result_says_what_came_when_and_why_it_ended():
    engine = engine_of()
    waited = engine.clock.read()
    id = engine.submit(PROMPTS[0], NEW, id="mine")
    assert (id, engine.unfinished, engine.results) == ("mine", 1, {})
    results = engine.run()
    served = results["mine"]
    assert isinstance(served, Served) and isinstance(served, kv.Generation) and engine.results == results
    assert served.ids == ALONE[0] and served.tokens.tolist() == ALONE[0] and served.prompt_length == 5
    assert (served.stop_reason, served.error, served.cached_tokens, served.preemptions) == ("length", None, 0, 0)
    assert len(served.arrivals) == NEW and served.arrivals == sorted(served.arrivals)
    assert 0 < served.ttft < served.total < engine.clock.read() - waited and len(served.itl) == NEW - 1
    assert engine.unfinished == 0 and engine.run() == {}


def test_run_returns_what_has_ended_since_the_last_run():
    engine = engine_of()
    first = engine.submit(PROMPTS[0], 2)
    while engine.unfinished:
        engine.step()
    second = engine.submit(PROMPTS[1], 2)
    assert list(engine.run()) == [first, second]
    third = engine.submit(PROMPTS[1], 2)
    assert list(engine.run()) == [third] and list(engine.results) == [first, second, third]


def test_a_step_returns_who_got_a_token():
    engine = engine_of(max_batch_tokens=8)
    submit_all(engine)
    # The prompts have 5, 9 and 14 tokens: 5 + 3, 1 + 6 + 1, 1 + 1 + 6, 1 + 1 + 6, 1 + 1 + 1.
    assert [engine.step() for _ in range(5)] == [[0], [0, 1], [0, 1], [0, 1], [0, 1, 2]]
    engine.run()
    assert engine.step() == []


def test_statistics_add_up():
    engine = engine_of(12, prefix_caching=False)
    submit_all(engine)
    results = engine.run()
    stats = engine.stats
    texts = sum(map(len, PROMPTS)) + 3 * (NEW - 1)  # the last token of each is never fed back
    assert stats.output_tokens == 3 * NEW and stats.reused_tokens == 0
    assert stats.preemptions == sum(served.preemptions for served in results.values()) > 0
    assert stats.computed_tokens > texts and stats.steps >= NEW
    roomy = engine_of(prefix_caching=True)
    for _ in range(2):
        submit_all(roomy)
        roomy.run()
    found = sum((len(prompt) - 1) // 4 * 4 for prompt in PROMPTS)
    assert (roomy.stats.computed_tokens, roomy.stats.reused_tokens) == (2 * texts - found, found)
    ids = roomy.submit_samples(PROMPTS[0] + [7], 3, 2, seed=1)
    roomy.run()
    assert roomy.stats.copied_blocks == 2 and [roomy.results[id].cached_tokens for id in ids] == [4, 5, 5]


def test_no_tokens_asked_for_is_no_work(monkeypatch):
    monkeypatch.setattr(kv.Transformer, "forward", lambda *a, **k: pytest.fail("no work for no tokens"))
    engine = engine_of()
    id = engine.submit(PROMPTS[0], 0)
    served = engine.run()[id]
    assert (served.ids, served.stop_reason, served.ttft) == ([], "length", None) and engine.free_blocks == 30


def test_prompts_may_be_lists_or_tensors_and_ids_are_given_if_none_is():
    engine = engine_of()
    ids = [
        engine.submit(torch.tensor(PROMPTS[0]), NEW),
        engine.submit(iter(PROMPTS[0]), NEW),
        engine.submit(PROMPTS[0], NEW, id=3),
        engine.submit(PROMPTS[0], NEW, id=("user", 1)),
        engine.submit(PROMPTS[0], NEW),
        engine.submit(PROMPTS[0], NEW),
    ]
    assert ids == [0, 1, 3, ("user", 1), 2, 4]
    assert all(served.ids == ALONE[0] for served in engine.run().values())


BAD_REQUESTS = {
    "Prompt 0 is empty": ([], 3, {}),
    "ids go from 0 to 96": ([1, 97], 3, {}),
    "Token id -1": ([-1], 3, {}),
    "For text, use lm": ("text", 3, {}),
    "takes one prompt, but 2 were given": ([[1], [2]], 3, {}),
    "max_new_tokens=-1": ([1], -1, {}),
    "max_new_tokens=2.5": ([1], 2.5, {}),
    "200 of prompt and 58 new ones need 257 places .* the model's context has room for 256": ([1] * 200, 58, {}),
    "40 tokens of prompt and 3 new .* take 11 blocks of 4, but the pool has 10": ([1] * 40, 3, {}),
    "temperature=-1": ([1], 3, dict(temperature=-1)),
    "temperature=None": ([1], 3, dict(temperature=None)),
    "top_p=2": ([1], 3, dict(top_p=2)),
    "top_k=-2": ([1], 3, dict(top_k=-2)),
    "seed=-3": ([1], 3, dict(seed=-3)),
    "Token id 99 in stop_ids": ([1], 3, dict(stop_ids=[99])),
    "on_token=5": ([1], 3, dict(on_token=5)),
    "id='there' was given": ([1], 3, dict(id="there")),
    "id='gone' was given": ([1], 3, dict(id="gone")),
    r"id=\[1\] cannot be the key of a dict": ([1], 3, dict(id=[1])),
    "id=nan is not equal to itself": ([1], 3, dict(id=float("nan"))),
}


@pytest.mark.parametrize("message", BAD_REQUESTS)
def test_a_request_that_cannot_work_is_refused_at_once(message):
    engine = engine_of(10)
    engine.submit([1], 1, id="gone")
    engine.run()
    engine.submit(PROMPTS[0], NEW, id="there")
    prompt, max_new_tokens, options = BAD_REQUESTS[message]
    with pytest.raises(ValueError, match=message):
        engine.submit(prompt, max_new_tokens, **options)
    if "id" not in options:
        with pytest.raises(ValueError, match=message):
            engine.submit_samples(prompt, 2, max_new_tokens, **options)
    assert engine.unfinished == 1 and {id: served.ids for id, served in engine.run().items()} == {"there": ALONE[0]}


def test_samples_have_numbers_for_ids_and_there_is_at_least_one():
    engine = engine_of()
    with pytest.raises(ValueError, match="leave id out"):
        engine.submit_samples([1], 2, 3, id="mine")
    with pytest.raises(ValueError, match="n=0"):
        engine.submit_samples([1], 0, 3)
    with pytest.raises(TypeError, match="submit_samples has no option 'foo'; it takes seed, temperature"):
        engine.submit_samples([1], 2, 3, foo=1)
    assert engine.unfinished == 0
    stop = ALONE[0][2]
    engine.submit_samples(iter(PROMPTS[0]), 3, NEW, stop_ids=iter([stop]))
    ended = ALONE[0][: ALONE[0].index(stop) + 1]
    assert [served.ids for served in engine.run().values()] == [ended] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_blocks=0), "num_blocks=0"),
        (dict(num_blocks=-1), "num_blocks=-1"),
        (dict(block_size=0), "block_size=0"),
        (dict(max_batch_tokens=0), "max_batch_tokens=0"),
        (dict(max_running=0), "max_running=0"),
        (dict(prefix_caching="no"), "prefix_caching='no'"),
        (dict(attention="none"), "attention='none'"),
        (dict(num_blocks=10**12), "could not be had"),
    ],
)
def test_an_engine_that_cannot_work_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        engine_of(**options)
    with pytest.raises(ValueError, match="model must be a Transformer"):
        Engine("smollm2-135m", 10)


def test_larger_than_the_pool_is_refused_and_the_next_one_finishes():
    """Known failure 39: it would wait for ever, with all others behind it."""
    engine = engine_of(4)
    for length, max_new_tokens in [(40, 1), (10, 30)]:
        with pytest.raises(ValueError, match="take 10 blocks of 4, but the pool has 4"):
            engine.submit([1] * length, max_new_tokens)
    id = engine.submit(PROMPTS[0], NEW)
    assert engine.run()[id].ids == ALONE[0]


def abort_in_state(state):
    """An engine and the id of a request in that state."""
    engine = engine_of(6, max_batch_tokens=12, prefix_caching=False)
    ids = submit_all(engine)
    if state == "waiting":
        return engine, ids[2]
    if state == "in the middle of its prompt":
        engine.step()
        assert 0 < engine.scheduler.running[1].computed < len(PROMPTS[1])
        return engine, ids[1]
    if state == "ended":
        engine.run()
        return engine, ids[0]
    engine.step()
    while state == "preempted" and not engine.plan.preempted:
        engine.step()
    return engine, engine.plan.preempted[0].id if state == "preempted" else ids[0]


@pytest.mark.parametrize("state", ["waiting", "in the middle of its prompt", "preempted", "decoding", "ended"])
def test_abort_in_every_state_and_twice(state):
    """Known failure 41."""
    engine, id = abort_in_state(state)
    assert engine.abort(id) == (state != "ended")
    assert engine.abort(id) is False
    results = engine.results if state == "ended" else engine.run()
    assert engine.free_blocks == 6 and engine.unfinished == 0
    assert results[id].stop_reason == ("length" if state == "ended" else "aborted") and results[id].error is None
    for number, alone in enumerate(ALONE):
        made = results[number].ids
        assert made == alone[: len(made)] and (len(made) == NEW or number == id)


def test_an_id_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match="id='mine' is unknown"):
        engine_of().abort("mine")
    with pytest.raises(ValueError, match=r"id=\[1\] cannot be"):
        engine_of().abort([1])


def test_a_result_is_kept_until_it_is_forgotten():
    engine = engine_of()
    ids = [engine.submit([1], 1), engine.submit([1], 1), engine.submit([1], 1, id="mine")]
    for id in (ids[0], "other"):
        with pytest.raises(ValueError, match=f"id={id!r} has no result"):
            engine.forget(id)
    engine.step()
    assert engine.forget(ids[0]).id == ids[0]
    assert list(engine.run()) == list(engine.results) == ids[1:]
    engine.forget("mine")
    assert list(engine.results) == ids[1:2] and engine.submit([1], 1, id="mine") == "mine"


def test_on_token_hears_each_token_as_it_comes():
    engine, heard = engine_of(12), {}
    for number, prompt in enumerate(PROMPTS):
        heard[number] = []
        engine.submit(prompt, NEW, id=number, on_token=heard[number].append)
    while engine.unfinished:
        before = {number: len(tokens) for number, tokens in heard.items()}
        got_one = engine.step()
        assert [number for number in heard if len(heard[number]) > before[number]] == sorted(got_one)
    assert list(heard.values()) == ALONE and engine.stats.preemptions > 0


@pytest.mark.parametrize("after", [1, 3, NEW])
def test_a_callback_that_raises_ends_its_own_request(after):
    engine, heard = engine_of(), []

    def fail(token):
        heard.append(token)
        if len(heard) == after:
            raise RuntimeError("nobody reads any more")

    ids = [
        engine.submit(PROMPTS[0], NEW),
        engine.submit(PROMPTS[1], NEW, on_token=fail),
        engine.submit(PROMPTS[2], NEW),
    ]
    results = engine.run()
    assert [results[id].ids for id in ids] == [ALONE[0], ALONE[1][:after], ALONE[2]]
    assert [results[id].stop_reason for id in ids] == ["length", "error", "length"]
    assert str(results[ids[1]].error) == "nobody reads any more" and heard == ALONE[1][:after]
    assert engine.free_blocks == 30


def test_a_callback_may_abort_and_submit():
    engine, heard = engine_of(), []

    def first(token):
        heard.append(token)
        if len(heard) == 5:
            engine.abort("first")
            engine.abort("second")
            engine.submit(PROMPTS[2], NEW, id="third")

    engine.submit(PROMPTS[0], NEW, id="first", on_token=first)
    engine.submit(PROMPTS[1], NEW, id="second", on_token=heard.append)
    results = engine.run()
    assert heard == [ALONE[0][0], ALONE[1][0], ALONE[0][1], ALONE[1][1], ALONE[0][2]]
    assert {id: served.stop_reason for id, served in results.items()} == dict(
        first="aborted", second="aborted", third="length"
    )
    assert results["third"].ids == ALONE[2] and engine.free_blocks == 30


def test_scores_that_are_no_numbers_end_their_request_only():
    """A token whose embedding is damaged, for example by a half-precision overflow."""
    model = kv.Transformer(MODEL.config, "cpu", torch.float64)
    model.load_state_dict(MODEL.state_dict())
    lost = next(token for token in range(97) if token not in PROMPTS[0] + ALONE[0])
    model.embed_tokens.weight[lost] = torch.nan
    engine = Engine(model, 30, 4)
    bad, good = engine.submit([1, lost], NEW), engine.submit(PROMPTS[0], NEW)
    results = engine.run()
    assert results[good].ids == ALONE[0]
    assert (results[bad].ids, results[bad].stop_reason) == ([], "error")
    assert "overflowed or are damaged" in str(results[bad].error)


def interrupt_at_line(number):
    """Raise KeyboardInterrupt when the serving code runs its `number`-th line from now on; returns how to stop."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        if "serving" not in Path(frame.f_code.co_filename).parts:
            return None
        if event == "line":
            lines += 1
            if lines == number:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    return lambda: (sys.settrace(None), lines)[1]


SAMPLED = PROMPTS[1][:6]
DRAWN = [solo(prompt, NEW, **DRAW) for prompt in PROMPTS]
DRAWN += [solo(SAMPLED, 4, temperature=1.5, seed=3 + i) for i in range(2)]


def busy_engine():
    """An engine with five requests that share and take each other's pages, and what the callbacks of three hear."""
    engine, heard = engine_of(9), [[] for _ in PROMPTS]
    for prompt, tokens in zip(PROMPTS, heard, strict=True):
        engine.submit(prompt, NEW, on_token=tokens.append, **DRAW)
    engine.submit_samples(SAMPLED, 2, 4, **DRAW)
    return engine, heard


def count_lines():
    engine, _ = busy_engine()
    stop = interrupt_at_line(0)
    engine.run()
    assert engine.stats.preemptions > 0 and engine.stats.copied_blocks > 0
    return stop()


def answers_of(engine, others=range(5)):
    """Those of the five requests, after `run`; nothing leaked."""
    engine.run()
    assert engine.free_blocks == engine.num_blocks and engine.unfinished == 0
    return [engine.results[id].ids for id in others]


def test_an_interrupt_anywhere_leaves_an_engine_that_goes_on():
    """Ctrl-C at 30 places, spread over all lines that the serving code runs: no token is lost, told twice, or another,
    and no page leaks."""
    lines = count_lines()
    for number in range(1, lines, lines // 30):
        engine, heard = busy_engine()
        stop = interrupt_at_line(number)
        try:
            with pytest.raises(KeyboardInterrupt):
                engine.run()
        finally:
            stop()
        assert answers_of(engine) == DRAWN
        assert all(len(engine.results[id].arrivals) == NEW for id in range(3))
        assert sum(map(len, heard)) >= 3 * NEW - 1  # the interrupt may come between a token and its callback
        for tokens, alone in zip(heard, DRAWN, strict=False):
            assert tokens in [alone] + [alone[:i] + alone[i + 1 :] for i in range(NEW)]


def test_without_recomputing_an_interrupt_leaves_damage(monkeypatch):
    """The partner."""
    monkeypatch.setattr(Engine, "_recompute_after_an_interrupt", lambda engine: nullcontext())
    with pytest.raises((AssertionError, RuntimeError)):
        test_an_interrupt_anywhere_leaves_an_engine_that_goes_on()


def raise_once(monkeypatch, owner, name, after=False, call=1):
    """At its `call`-th call `owner.name` raises KeyboardInterrupt, in front of its work or `after` it."""
    work, calls = getattr(owner, name), count(1)

    def interrupted(*parts, **options):
        strikes = next(calls) == call
        if strikes and not after:
            raise KeyboardInterrupt
        result = work(*parts, **options)
        if strikes:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("where", [(Scheduler, "finish"), (Scheduler, "_stop"), (BlockTable, "free")])
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_while_a_source_of_samples_ends(monkeypatch, where, after):
    engine = engine_of(12, max_running=2)
    ids = [engine.submit(PROMPTS[0], 12), *engine.submit_samples(PROMPTS[1], 3, 6)]
    raise_once(monkeypatch, *where, after)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert answers_of(engine, ids) == [solo(PROMPTS[0], 12)] + [ALONE[1][:6]] * 3


def test_a_source_whose_abort_is_interrupted_holds_up_nobody(monkeypatch):
    engine = engine_of(12, max_batch_tokens=4)
    source, sample = engine.submit_samples(PROMPTS[1], 2, 6)
    engine.step()
    raise_once(monkeypatch, Scheduler, "finish")
    with pytest.raises(KeyboardInterrupt):
        engine.abort(source)
    assert answers_of(engine, [sample]) == [ALONE[1][:6]] and engine.results[source].stop_reason == "aborted"


@pytest.mark.parametrize("call", [1, 2, 5])
def test_a_second_interrupt_while_the_engine_begins_anew(monkeypatch, call):
    engine, _ = busy_engine()
    engine.step()
    with monkeypatch.context() as patch:
        raise_once(patch, kv.Transformer, "head")
        raise_once(patch, Scheduler, "add", call=call)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert answers_of(engine) == DRAWN


@pytest.mark.parametrize("after", [False, True])
def test_a_draw_that_is_interrupted_is_drawn_again(monkeypatch, after):
    engine, _ = busy_engine()
    raise_once(monkeypatch, torch, "multinomial", after, call=6)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert answers_of(engine) == DRAWN


def test_a_step_of_the_cache_that_was_left_open_spoils_nothing(monkeypatch):
    """As when an interrupt strikes between its beginning and its first line; it ends when its traceback is dropped."""
    engine, left = engine_of(attention="gather"), []
    ids = submit_all(engine)
    engine.step()

    def leave_open(model, tokens, cache, last_only):
        left.append(cache.step(cache.next_positions(tokens.shape[1])))
        left[0].__enter__()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(kv.Transformer, "forward", leave_open)
        engine.step()
    for _ in range(3):
        engine.step()
    left.pop().gen.close()
    assert answers_of(engine, ids) == ALONE and engine.packed.attention == "gather"


def test_what_the_cache_had_is_forgotten_with_the_pages_unless_a_token_was_made(monkeypatch):
    engine = engine_of()
    for _ in range(2):
        id = engine.submit(PROMPTS[2], 2)
        with monkeypatch.context() as patch:
            if id:
                assert engine.scheduler.prefix.lookup(PROMPTS[2])
                raise_once(patch, kv.Transformer, "head")
                with pytest.raises(KeyboardInterrupt):
                    engine.step()
        engine.run()
    assert (engine.results[id].cached_tokens, engine.results[id].preemptions) == (0, 1)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
def test_an_error_inside_the_model_undoes_the_step(monkeypatch, error):
    engine = engine_of()
    ids = [engine.submit(prompt, NEW, **DRAW) for prompt in PROMPTS]
    for _ in range(3):
        engine.step()
    head = kv.Transformer.head
    monkeypatch.setattr(kv.Transformer, "head", lambda *a: (_ for _ in ()).throw(error("in the middle")))
    with pytest.raises(error, match="in the middle"):
        engine.step()
    assert len(engine.scheduler.waiting) == 3 and engine.free_blocks == 30
    monkeypatch.setattr(kv.Transformer, "head", head)
    results = engine.run()
    assert [results[id].ids for id in ids] == [solo(prompt, NEW, **DRAW) for prompt in PROMPTS]
    assert [results[id].preemptions for id in ids] == [1, 1, 1]


def test_an_interrupt_in_a_callback_loses_no_token_of_the_others():
    engine, heard = engine_of(), [[] for _ in PROMPTS]

    def press_ctrl_c(token):
        heard[0].append(token)
        if len(heard[0]) == 2:
            raise KeyboardInterrupt

    for prompt, tokens in zip(PROMPTS, heard, strict=True):
        engine.submit(prompt, NEW, on_token=press_ctrl_c if tokens is heard[0] else tokens.append)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    results = engine.run()
    assert heard == ALONE == [results[id].ids for id in range(3)]
