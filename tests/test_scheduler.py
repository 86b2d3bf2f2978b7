"""The scheduler: hand-worked plans, and random requests whose answers must be those each gets alone."""

import random
import sys
from time import perf_counter

import pytest
from scheduled_texts import IDENTITY, Machine

from kvcourse.serving import scheduler as scheduler_module
from kvcourse.serving.blocks import BlockPool
from kvcourse.serving.prefix import PrefixIndex
from kvcourse.serving.scheduler import Plan, Request, Scheduler


def spans(plan):
    return [(chunk.request.id, chunk.start, chunk.stop) for chunk in plan.chunks]


def steps(machine, n):
    return [spans(machine.step()) for _ in range(n)]


def machine_of(num_blocks, block_size, *requests, **options):
    machine = Machine(num_blocks, block_size, **options)
    for length, max_new_tokens in requests:
        machine.add([machine.random.randrange(3) for _ in range(length)], max_new_tokens)
    return machine


def test_decodes_first_then_pieces_of_prompts_then_those_who_wait():
    machine = machine_of(100, 4, (5, 3), (10, 2), (4, 2), max_batch_tokens=8)
    assert steps(machine, 5) == [
        [(0, 0, 5), (1, 0, 3)],  # 8 tokens: all of the first prompt, and the beginning of the second
        [(0, 5, 6), (1, 3, 10)],  # a decode takes one, the rest of the budget goes on with the prompt
        [(0, 6, 7), (1, 10, 11), (2, 0, 4)],  # now there is room for the third
        [(2, 4, 5)],  # 0 has three tokens, and 1 two: the last ones are never fed back
        [],
    ]
    machine.run()


def test_a_budget_of_one_token_serves_one_after_the_other():
    machine = machine_of(100, 4, (3, 2), (2, 2), max_batch_tokens=1)
    assert sum(steps(machine, 7), []) == [(0, i, i + 1) for i in range(4)] + [(1, i, i + 1) for i in range(3)]


def test_at_most_max_running_have_pages():
    machine = machine_of(100, 4, (3, 2), (3, 2), (3, 2), max_running=2)
    assert [[id for id, _, _ in step] for step in steps(machine, 4)] == [[0, 1], [0, 1], [2], [2]]


def test_nobody_is_admitted_without_blocks_for_the_whole_text_nor_overtakes():
    """Six blocks of four: the first takes three for its prompt, so the second, which needs four, waits, and so does the
    third, although it needs only one: else a stream of small requests could keep a large one waiting for ever."""
    machine = machine_of(6, 4, (12, 2), (13, 2), (2, 2), max_batch_tokens=4)
    assert steps(machine, 4) == [[(0, 0, 4)], [(0, 4, 8)], [(0, 8, 12)], [(0, 12, 13)]]
    assert steps(machine, 1) == [[(1, 0, 4)]]
    assert len(machine.requests[1].table.blocks) == 4  # taken at once, so that a later one cannot take them away
    machine.run()


def test_the_latest_is_preempted_waits_in_its_old_place_and_is_computed_anew():
    """Five blocks of four, two prompts of eight: both want a third block for their ninth token. The first gets it, the
    second loses its pages, and comes before the third request when the first has ended."""
    machine = machine_of(5, 4, (8, 4), (8, 4), (1, 1))
    first, second, third = machine.requests
    assert steps(machine, 1) == [[(0, 0, 8), (1, 0, 8), (2, 0, 1)]]
    assert third.state == "finished"
    machine.add([1], 1)
    plan = machine.step()
    assert spans(plan) == [(0, 8, 9)] and plan.preempted == [second]
    assert (second.state, second.preemptions, len(second.tokens)) == ("preempted", 1, 9)
    assert machine.scheduler.waiting == [second, machine.requests[3]]
    assert steps(machine, 3) == [[(0, 9, 10)], [(0, 10, 11)], [(1, 0, 9), (3, 0, 1)]]  # 8 of prompt, 1 of output
    machine.run()
    assert [request.preemptions for request in machine.requests] == [0, 1, 0, 0]


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 4, 5, 8, 17])
def test_samples_share_the_pages_of_their_prompt_and_compute_its_last_token(block_size, length):
    machine = machine_of(100, block_size, (length, 6))
    source = machine.requests[0]
    for _ in range(2):
        machine.add(source.tokens, 6, source)
    if length > 1:  # the pages are not there yet
        assert spans(machine.step()) == [(0, 0, length)]
    plan = machine.step()
    expected = [(0, length, length + 1)] if length > 1 else [(0, 0, 1)]
    assert spans(plan) == expected + [(1, length - 1, length), (2, length - 1, length)]
    assert plan.reused == 2 * (length - 1) and len(plan.copies) == (2 if (length - 1) % block_size else 0)
    whole = (length - 1) // block_size
    tables = [request.table.blocks for request in machine.requests]
    assert tables[0][:whole] == tables[1][:whole] == tables[2][:whole]
    assert len({table[whole] for table in tables}) == 3, "the block that is written to is each one's own"
    assert [request.cached_tokens for request in machine.requests] == [0, length - 1, length - 1]
    machine.run()


def test_a_sample_waits_for_a_prompt_in_pieces_and_not_for_one_that_is_gone():
    machine = machine_of(100, 4, (10, 6), max_batch_tokens=4)
    source = machine.requests[0]
    sample = machine.add(source.tokens, 6, source)
    assert steps(machine, 2) == [[(0, 0, 4)], [(0, 4, 8)]]
    machine.scheduler.finish(source)
    assert steps(machine, 1) == [[(1, 0, 4)]] and sample.cached_tokens == 0
    machine.run()


def test_a_sample_does_not_take_pages_that_the_window_of_its_source_has_passed():
    machine = machine_of(100, 4, (10, 30), window=4, max_running=1)
    source = machine.requests[0]
    sample = machine.add(source.tokens, 3, source)
    steps(machine, 20)
    assert source.table.blocks[:6] == [None] * 6
    machine.scheduler.max_running = 2
    assert spans(machine.step())[1:] == [(1, 0, 10)] and sample.cached_tokens == 0
    machine.run()


def test_blocks_behind_the_window_come_back_while_the_text_is_written():
    machine = machine_of(8, 4, (10, 20), window=4)
    used = []
    while machine.scheduler.running or machine.scheduler.waiting:
        machine.step()
        used.append(machine.pool.used_blocks)
    assert max(used[1:]) == 2  # two blocks of four have the last four tokens and the next one
    machine.run()


def test_what_can_never_run_is_refused_with_the_numbers_and_the_next_one_finishes():
    machine = Machine(4, 4)
    for length, max_new_tokens, blocks in [(40, 1, 10), (10, 30, 10), (16, 2, 5)]:
        message = f"{length} tokens of prompt and {max_new_tokens} new .* take {blocks} blocks of 4, but the pool has 4"
        with pytest.raises(ValueError, match=message):
            machine.add([1] * length, max_new_tokens)
    machine.add([1] * 5, 3)
    machine.add([1] * 16, 1)  # exactly the pool: the last token needs no place
    machine.run()
    assert [request.state for request in machine.requests] == ["finished"] * 2


def test_when_nobody_can_go_on_it_says_so():
    machine = machine_of(4, 4, (8, 2))
    mine = [machine.pool.take() for _ in range(3)]  # somebody else holds blocks of this pool
    with pytest.raises(RuntimeError, match="0 requests run and 1 wait, with 1 of 4 blocks free, and none can go on"):
        machine.scheduler.schedule()
    for block in mine:
        machine.pool.release(block)
    machine.run()


@pytest.mark.parametrize("option", ["max_batch_tokens", "max_running", "window"])
def test_a_scheduler_needs_sizes_of_at_least_one(option):
    with pytest.raises(ValueError, match=option):
        Scheduler(BlockPool(4, 4), **{option: 0})


def test_a_request_ends_in_any_state_and_twice():
    machine = machine_of(4, 4, (8, 6), (4, 6), (4, 6), max_batch_tokens=12)
    steps(machine, 2)
    for request, state in zip(machine.requests, ["running", "preempted", "waiting"], strict=True):
        assert request.state == state
        if state != "running":
            with pytest.raises(ValueError, match=f"is {state}: only a running one can be preempted"):
                machine.scheduler.preempt(request)
        for _ in range(2):
            machine.scheduler.finish(request)
            machine.check_books()
    assert machine.pool.free_blocks == 4 and machine.step() == Plan([], [], [], 0, 0)


@pytest.mark.parametrize("length", [4, 5, 8, 9])  # where a block is just full, and one token after
@pytest.mark.parametrize("prefix", [False, True])
def test_preempted_at_the_edge_of_a_block(length, prefix):
    """Known failure 32: prompt and output are computed anew, but what is still known is not."""
    machine = machine_of(20, 4, (3, 12), prefix=prefix)
    request = machine.requests[0]
    while len(request.tokens) < length:
        machine.step()
    machine.scheduler.preempt(request)
    known = (length - 1) // 4 * 4 if prefix else 0
    assert spans(machine.step()) == [(0, known, length)]
    machine.run()


def test_equal_prompts_that_arrive_together_do_not_share_what_is_not_yet_computed():
    """Known failure 31: the second one computes all of it too; a third one, later, does not."""
    machine = machine_of(20, 4, prefix=True)
    for tail in (0, 1):
        machine.add([2] * 8 + [tail], 4)
    assert spans(machine.step()) == [(0, 0, 9), (1, 0, 9)]
    machine.add([2] * 8 + [2], 4)
    assert spans(machine.step()) == [(0, 9, 10), (1, 9, 10), (2, 8, 9)]
    machine.run()


SETTINGS = [
    (6, 4, True, dict()),
    (40, 1, True, dict(max_batch_tokens=7)),
    (8, 4, True, dict(prefix=True, max_batch_tokens=9, max_running=3)),
    (6, 16, True, dict(prefix=True)),
    (40, 1, False, dict(prefix=True, max_batch_tokens=1)),
    (9, 4, True, dict(window=6, max_batch_tokens=5)),
    (6, 4, True, dict(window=6, prefix=True)),
    (9, 4, True, dict(window=1)),
]


@pytest.mark.parametrize(("num_blocks", "block_size", "tight", "options"), SETTINGS)
def test_after_each_of_2000_random_operations_all_rules_hold_and_all_answers_are_those_alone(
    num_blocks, block_size, tight, options
):
    """`tight`: whether running requests take blocks from each other."""
    machine = Machine(num_blocks, block_size, seed=1, **options)
    machine.random_operations(2000)
    assert all(machine.seen[f"aborted {state}"] for state in ("waiting", "running", "finished"))
    assert machine.seen["reused"] and (machine.seen["preemptions"] > 0) == tight
    assert (machine.seen["copies"] > 0) == (block_size > 1)


def keep_pages(scheduler, request, state):
    request.table, request.computed, request.state = None, 0, state
    scheduler.running.remove(request)


def keep_computed(scheduler, request, state):
    computed = request.computed
    STOP(scheduler, request, state)
    request.computed = computed


def keep_only_the_prompt(scheduler, request):
    PREEMPT(scheduler, request)
    del request.tokens[request.prompt_length :]


def preempt_the_earliest(scheduler, copies):
    scheduler.running.reverse()
    result = GO_ON(scheduler, copies)
    scheduler.running.reverse()
    return result


def forget_copies(scheduler):
    return SCHEDULE(scheduler)._replace(copies=[])


def publish_before_the_forward_pass(scheduler):
    plan = SCHEDULE(scheduler)
    for request, start, stop in plan.chunks:
        scheduler.prefix.publish(request.tokens, request.table.blocks, start, stop)
    other = scheduler._first_waiting()
    if other is not None and scheduler.prefix.lookup(other.tokens):
        plan.chunks[:0] = scheduler.schedule().chunks  # the next plan builds on what is not there
    return plan


def give_back_one_too_many(scheduler, chunk):
    ADVANCE(scheduler, chunk)
    chunk.request.table.release_before(chunk.stop - scheduler.window + 1 + scheduler.pool.block_size)


def trust_the_window_of_the_source(scheduler, source, position):
    return True


def do_not_wait_for_the_source(scheduler, request):
    return False


def last_come_first_served(queue, item):
    queue.insert(0, item)


STOP, PREEMPT, GO_ON, SCHEDULE = Scheduler._stop, Scheduler.preempt, Scheduler._go_on, Scheduler.schedule
ADVANCE = Scheduler.advance
BROKEN = {
    keep_pages: (Scheduler, "_stop"),
    keep_computed: (Scheduler, "_stop"),
    keep_only_the_prompt: (Scheduler, "preempt"),
    preempt_the_earliest: (Scheduler, "_go_on"),
    forget_copies: (Scheduler, "schedule"),
    publish_before_the_forward_pass: (Scheduler, "schedule"),
    give_back_one_too_many: (Scheduler, "advance"),
    trust_the_window_of_the_source: (Scheduler, "_still_has"),
    do_not_wait_for_the_source: (Scheduler, "_source_is_on_its_way"),
    last_come_first_served: (scheduler_module, "heappush"),
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_the_random_operations_go_red_when_a_rule_is_broken(monkeypatch, broken):
    monkeypatch.setattr(*BROKEN[broken], broken)
    with pytest.raises((AssertionError, AttributeError, ValueError, RuntimeError)):
        for seed in range(3):
            Machine(6, 4, prefix=True, window=7, max_batch_tokens=9, seed=seed).random_operations(2000)


def steady(finished, waiting):
    """Eight requests that decode for a long time, a large one that finds no place, others behind it, and a past."""
    scheduler = Scheduler(BlockPool(200, 4))
    scheduler = Scheduler(scheduler.pool, PrefixIndex(scheduler.pool, IDENTITY))
    for number in range(finished):
        scheduler.add(Request(-number, [number % 3], 1))
        for chunk in scheduler.schedule().chunks:
            scheduler.advance(chunk)
            scheduler.finish(chunk.request)
    for number in range(8):
        scheduler.add(Request(number, [number % 3] * 9, 60))
    scheduler.add(Request(8, [1] * 796, 2))
    for number in range(waiting):
        scheduler.add(Request(9 + number, [1], 1))
    return scheduler


def bytecodes(scheduler, steps=20, running=8):
    """How many instructions Python runs for so many steps: the same each time, which seconds are not."""
    executed = 0

    def trace(frame, event, _):
        nonlocal executed
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        executed += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        for _ in range(steps):
            for chunk in scheduler.schedule().chunks:
                scheduler.advance(chunk)
                chunk.request.tokens.append(1)
    finally:
        sys.settrace(None)
    assert len(scheduler.running) == running
    return executed


def look_at_all(scheduler):
    return next(iter(scheduler.waiting), None)


def test_the_cost_of_a_step_does_not_grow_with_those_that_wait_or_have_ended(monkeypatch):
    few, many = bytecodes(steady(0, 3)), bytecodes(steady(300, 3000))
    assert many < 1.02 * few
    monkeypatch.setattr(Scheduler, "_first_waiting", look_at_all)
    assert bytecodes(steady(300, 3000)) > 5 * few


def instructions_of_publishing(n_texts, stop, **options):
    """Instructions that Python runs until texts of equal tokens, decoding side by side, have `stop` tokens."""
    pool = BlockPool(1000, 4)
    scheduler = Scheduler(pool, PrefixIndex(pool, IDENTITY), **options)
    for number in range(n_texts):
        scheduler.add(Request(number, [1] * 9, 2000))
    counts = [bytecodes(scheduler, 40, n_texts) for _ in range(stop // 40)]
    return counts[0 if options else 1], counts[-1]


@pytest.mark.parametrize(("n_texts", "options"), [(2, {}), (1, {"window": 1})], ids=["equal texts", "a window of 1"])
def test_the_cost_of_a_step_does_not_grow_with_the_text(monkeypatch, n_texts, options):
    """Of two equal texts one's blocks are never known; behind a window smaller than a block there are none left."""
    early, late = instructions_of_publishing(n_texts, 600, **options)
    assert late < 1.1 * early
    publish = PrefixIndex.publish
    monkeypatch.setattr(PrefixIndex, "publish", lambda index, *parts: publish(index, *parts[:4]))
    early, late = instructions_of_publishing(n_texts, 600, **options)
    assert late > 1.3 * early


def test_10_000_requests_without_a_model():
    """Prints how many steps a second the books of a busy server allow."""
    rng = random.Random(0)
    pool = BlockPool(300, 4)
    scheduler = Scheduler(pool, PrefixIndex(pool, IDENTITY))
    for number in range(10_000):
        scheduler.add(Request(number, [rng.randrange(50) for _ in range(rng.randint(1, 20))], rng.randint(1, 8)))
    marks, steps, finished = [perf_counter()], 0, 0
    while chunks := scheduler.schedule().chunks:
        ending = [chunk.request for chunk in chunks if chunk.ends]
        for chunk in chunks:
            scheduler.advance(chunk)
        for request in ending:
            request.tokens.append(rng.randrange(50))
            if len(request.tokens) == request.prompt_length + request.max_new_tokens:
                scheduler.finish(request)
                finished += 1
        steps += 1
        if steps % 200 == 0:
            marks.append(perf_counter())
    assert finished == 10_000 and pool.free_blocks == 300
    rates = [200 / (after - before) for before, after in zip(marks, marks[1:], strict=False)]
    print(f"{steps} steps; steps/s in the first to the last 200: {', '.join(f'{rate:,.0f}' for rate in rates)}")
