"""The exercises of notebook 06: worked answers and other right ways pass, the usual mistakes are named."""

import random

import pytest
from exercises import shared_tests, solution

from kvcourse.serving.blocks import BlockPool, BlockTable
from kvcourse.serving.scheduler import Request, Scheduler

NOTEBOOK = "06_paged_attention"

RIGHT = {
    "blocks_for": [
        """
        def blocks_for(length, block_size):
            blocks = -(-length // block_size)
            empty = blocks * block_size - length
            return blocks, empty
        """,
        """
        def blocks_for(length, block_size):
            blocks = int(np.ceil(length / block_size))
            return blocks, blocks * block_size - length
        """,
        """
        def blocks_for(length, block_size):
            return [(length + block_size - 1) // block_size, -length % block_size]
        """,
        """
        def blocks_for(length, block_size):  # both in one tensor
            blocks = -(-length // block_size)
            return torch.tensor([blocks, blocks * block_size - length])
        """,
    ],
    "slot_mapping": [
        """
        def slot_mapping(table, block_size, start, stop):
            return [table[p // block_size] * block_size + p % block_size for p in range(start, stop)]
        """,
        """
        def slot_mapping(table, block_size, start, stop):
            slots = []
            for block in table:
                slots += range(block * block_size, (block + 1) * block_size)
            return slots[start:stop]
        """,
        """
        def slot_mapping(table, block_size, start, stop):
            positions = torch.arange(start, stop)
            return torch.tensor(table)[positions // block_size] * block_size + positions % block_size
        """,
    ],
    "give_back": [
        """
        def give_back(table, refs, free):
            for block in table:
                refs[block] -= 1
                if refs[block] == 0:
                    free.append(block)
            return refs, free
        """,
        """
        def give_back(table, refs, free):
            refs = [count - (block in table) for block, count in enumerate(refs)]
            return refs, [block for block in table if refs[block] == 0] + free
        """,
        """
        def give_back(table, refs, free):
            for block in reversed(table):
                if refs[block] == 1:
                    free.insert(0, block)
                refs[block] -= 1
            return [refs, free]
        """,
    ],
    "copy_on_write": [
        """
        def copy_on_write(table, refs, start, stop, block_size):
            written = table[start // block_size : (stop - 1) // block_size + 1]
            return [block for block in written if refs[block] > 1]
        """,
        """
        def copy_on_write(table, refs, start, stop, block_size):
            copies = []
            for position in range(start, stop):
                place = position // block_size
                if place < len(table) and refs[table[place]] > 1 and table[place] not in copies:
                    copies.append(table[place])
            return copies
        """,
        """
        def copy_on_write(table, refs, start, stop, block_size):
            touched = {position // block_size for position in range(start, stop)}
            return [block for place, block in enumerate(table) if place in touched and refs[block] >= 2]
        """,
    ],
    "share_budget": [
        """
        def share_budget(left, budget):
            taken = [0] * len(left)
            for decodes in (True, False):
                for i, wanted in enumerate(left):
                    if (wanted == 1) == decodes:
                        taken[i] = min(wanted, budget)
                        budget -= taken[i]
            return taken
        """,
        """
        def share_budget(left, budget):
            taken = [0] * len(left)
            for i in sorted(range(len(left)), key=lambda i: left[i] > 1):
                taken[i] = min(left[i], budget)
                budget -= taken[i]
            return taken
        """,
        """
        def share_budget(left, budget):
            decodes = sum(n == 1 for n in left)
            ones, rest = min(decodes, budget), max(0, budget - decodes)
            taken = []
            for n in left:
                if n == 1:
                    taken.append(1 if ones > 0 else 0)
                    ones -= 1
                else:
                    taken.append(min(n, rest))
                    rest -= taken[-1]
            return taken
        """,
    ],
}


MISTAKES = {
    "blocks_for": [
        (("-(-length // block_size)", "length // block_size"), "rounded down, so slots are missing"),
        (("-(-length // block_size)", "length // block_size + 1"), "takes no further one"),
        (("-(-length // block_size)", "max(1, -(-length // block_size))"), "without tokens takes no block"),
        (("-(-length // block_size)", "round(length / block_size)"), "rounded to the nearest"),
        (("empty = blocks * block_size - length", "empty = length % block_size"), "those that do were"),
        (
            ("empty = blocks * block_size - length", "empty = block_size - length % block_size"),
            "a last block that is full",
        ),
        (("return blocks, empty", "return blocks"), "expected 2 values"),
    ],
    "slot_mapping": [
        (("table[p // block_size] * block_size + p % block_size", "p"), "the table is not used"),
        (("table[p // block_size] * block_size + p % block_size", "table[p // block_size]"), "has one"),
        (("table[p // block_size] * block_size + p % block_size", "p % block_size"), "within the blocks"),
        ((" + p % block_size", ""), "the first slot of its block"),
        (("table[p // block_size] * block_size", "table[p // block_size]"), "not at its own number"),
        (("range(start, stop)", "range(stop)"), "from token 0 on"),
        (("range(start, stop)", "range(stop - start)"), "counts from 0 again"),
        (("range(start, stop)", "range(start, min(stop + 1, len(table) * block_size))"), "`stop` itself"),
        (("table[p // block_size]", "table[p]"), "raises IndexError"),
        (
            (
                "table[p // block_size] * block_size + p % block_size",
                "table[p % block_size] * block_size + p // block_size",
            ),
            "// and % are swapped",
        ),
        (
            (
                "range(start, stop)",
                "range(start // block_size * block_size, -(-stop // block_size) * block_size)",
            ),
            "all slots of the blocks",
        ),
    ],
    "give_back": [
        (("if refs[block] == 0", "if True"), "that another text still holds"),
        (("refs[block] -= 1", "refs[block] = 0"), "do not set it to 0"),
        (("refs[block] -= 1\n        if refs[block] == 0", "if refs[block] == 1"), "are not lowered"),
        (("free.append(block)", "pass"), "no block has become free"),
        (("if refs[block] == 0", "if refs[block] <= 1"), "freed too soon"),
        (("for block in table:", "free = []\n    for block in table:"), "free before are missing"),
        (("for block in table:", "for block in table[-1:]:"), "only the last block"),
        (("return refs, free", "return free"), "expected 2 values"),
        (
            (
                "        if refs[block] == 0:\n            free.append(block)",
                "    free += [b for b, n in enumerate(refs) if not n]",
            ),
            "joins the list again",
        ),
    ],
    "copy_on_write": [
        (("start // block_size : (stop - 1) // block_size + 1", ":"), "every shared block"),
        ((" if refs[block] > 1", ""), "one text alone holds"),
        (("(stop - 1) // block_size + 1", ""), "also those behind `stop`"),
        (("table[start // block_size :", "table[:"), "before `start` are only read"),
        (("(stop - 1) // block_size + 1", "start // block_size + 1"), "only the first block"),
        (("(stop - 1) // block_size + 1", "stop // block_size + 1"), "one block too many"),
        (("[block for", "[table.index(block) for"), "places in the table"),
        (("refs[block] > 1", "refs[block] > 2"), "when two hold it"),
        (("(stop - 1) // block_size + 1", "stop // block_size"), "the last token falls is missing"),
        (
            (
                "for block in written if refs[block] > 1",
                "for i, block in enumerate(table) if block in written and refs[i] > 1",
            ),
            "by the number of the block",
        ),
        (
            (
                "table[start // block_size : (stop - 1) // block_size + 1]",
                "[table[p // block_size] for p in range(start, stop)]",
            ),
            "a block is copied once",
        ),
        (
            (
                "table[start // block_size : (stop - 1) // block_size + 1]",
                "[table[i] for i in range(start // block_size, (stop - 1) // block_size + 1)]",
            ),
            "may lack the blocks",
        ),
        (
            ("(stop - 1) // block_size + 1", "start // block_size - (start - stop) // block_size"),
            "few tokens can lie in two blocks",
        ),
        (("table[start // block_size :", "table[(start + 1) // block_size :"), "the block of `start` is missing"),
        (("(stop - 1) // block_size + 1", "max(start, stop - 2) // block_size + 1"), "not stop - 2"),
    ],
    "share_budget": [
        (("(True, False)", "(None,)"), "expected"),
        (("if (wanted == 1) == decodes", "if decodes"), "those that decode come first"),
        (("min(wanted, budget)", "wanted if wanted <= budget else 0"), "a prompt need not go in whole"),
        (("budget -= taken[i]", "pass"), "more than the budget is used"),
        (("min(wanted, budget)", "wanted"), "the budget is not looked at"),
        (("in enumerate(left):", "in sorted(enumerate(left), key=lambda p: p[1]):"), "not the shortest first"),
        (("in enumerate(left):", "in reversed(list(enumerate(left))):"), "the earliest first"),
        (("budget -= taken[i]", "budget -= taken[i] * (wanted > 1)"), "count as well"),
        (("min(wanted, budget)", "1 if decodes else min(wanted, max(0, budget))"), "when the budget is used up"),
        (("min(wanted, budget)", "1 if decodes else min(wanted, budget)"), "no text gets fewer than 0"),
        (
            ("(wanted == 1) == decodes", "(wanted == 1) == decodes and (decodes or not any(n > 1 for n in left[:i]))"),
            "only one prompt is read",
        ),
        (
            (
                "taken = [0] * len(left)",
                "ones = sum(n == 1 for n in left)\n"
                "    share = (budget - ones) // max(1, len(left) - ones)\n"
                "    return [n if n == 1 else min(n, share) for n in left]\n"
                "    taken = [0] * len(left)",
            ),
            "all prompts get the same share",
        ),
    ],
}

TestExercises = shared_tests(NOTEBOOK, RIGHT, MISTAKES)


@pytest.fixture(scope="module")
def worked():
    """The worked answers, each read from the notebook once."""
    return {name: solution(NOTEBOOK, name) for name in RIGHT}


def test_worked_answers_by_hand(worked):
    assert tuple(worked["blocks_for"](33, 16)) == (3, 15)
    assert worked["slot_mapping"]([7, 2], 4, 2, 6) == [30, 31, 8, 9]
    assert worked["give_back"]([2, 0], [2, 0, 1], [1]) == ([1, 0, 0], [1, 2])
    assert worked["copy_on_write"]([5, 1], [0, 2, 0, 0, 0, 2], 3, 5, 4) == [5, 1]
    assert worked["share_budget"]([100, 1, 50], 121) == [100, 1, 20]


def grown_tables(seed):
    """A pool, and tables of random lengths over it, some of them forks of others."""
    chance, pool = random.Random(seed), BlockPool(num_blocks=60, block_size=4)
    tables, lengths = [], []
    for _ in range(8):
        if tables and chance.random() < 0.5:
            source = chance.randrange(len(tables))
            lengths.append(chance.randint(1, lengths[source]))
            tables.append(tables[source].fork(lengths[-1]))
        else:
            lengths.append(chance.randint(1, 30))
            tables.append(BlockTable(pool))
            tables[-1].reserve(0, lengths[-1])
    return chance, pool, tables, lengths


@pytest.mark.parametrize("seed", range(20))
def test_the_books_by_hand_are_those_of_the_package(seed, worked):
    chance, pool, tables, lengths = grown_tables(seed)
    for table, length in zip(tables, lengths, strict=True):
        assert len(table.blocks) == worked["blocks_for"](length, 4)[0]
        start = chance.randint(0, length)
        assert worked["slot_mapping"](table.blocks, 4, start, length) == table.slots(start, length)
        stop = start + chance.randint(1, 6)
        if table.shortage(start, stop) <= pool.free_blocks:
            by_hand = worked["copy_on_write"](list(table.blocks), list(pool.refs), start, stop, 4)
            assert by_hand == [source for source, _ in table.reserve(start, stop)]
    for table in tables:
        refs, free = worked["give_back"](list(table.blocks), list(pool.refs), list(pool.queue))
        table.free()
        assert refs == pool.refs and sorted(free) == sorted(pool.queue)


@pytest.mark.parametrize("budget", [3, 8, 20, 64])
def test_the_budget_by_hand_is_that_of_the_scheduler(budget, worked):
    """Texts of several lengths that all run; the last to come still read their prompts while the first decode."""
    scheduler = Scheduler(BlockPool(200, 4), max_batch_tokens=budget)
    requests = [Request(i, [0] * length, 5) for i, length in enumerate((9, 30, 1, 2, 17))]
    for request in requests:
        scheduler.add(request)
    mixed = 0
    while scheduler.running or scheduler.waiting:
        before = list(scheduler.running)
        left = [request.left for request in before]
        chunks = {chunk.request: chunk.stop - chunk.start for chunk in scheduler.schedule().chunks}
        assert worked["share_budget"](left, budget) == [chunks.get(request, 0) for request in before]
        mixed += 1 in left and max(left) > 1
        advance(scheduler, chunks)
    assert mixed or budget == 64  # there everything fits into the first step


def advance(scheduler, chunks):
    for request, taken in chunks.items():
        scheduler.advance((request, request.computed, request.computed + taken))
        if request.left == 0:
            request.tokens.append(0)
            if len(request.tokens) == request.prompt_length + request.max_new_tokens:
                scheduler.finish(request)
