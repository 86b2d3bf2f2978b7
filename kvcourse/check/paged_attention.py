"""Checkers of notebook 06: blocks and slots, giving blocks back, copying on write. `step_budget` has its last one."""

from functools import partial

from kvcourse.check.framework import compare, error_of, exercise


@exercise
def blocks_for(answer):
    """blocks_for(length, block_size): (blocks, empty): how many blocks a text of `length` tokens takes, and how many
    slots in them hold no token."""

    def right(length, block_size):
        blocks = -(-length // block_size)
        return blocks, blocks * block_size - length

    def one_more(length, block_size):
        return length // block_size + 1, (length // block_size + 1) * block_size - length

    return compare(
        answer,
        right,
        cases=[(7, 4), (10, 4), (1, 16), (33, 16), (8, 4), (16, 1), (0, 4)],
        mistakes={
            "the last, partly filled block is not counted: a part of a block is taken whole": lambda n, b: (
                n // b,
                n % b,
            ),
            "the blocks are rounded down, so slots are missing; a part of a block is taken whole": lambda n, b: (
                n // b,
                n // b * b - n,
            ),
            "blocks are rounded to the nearest, so slots can be missing; a part of one is taken whole": lambda n, b: (
                round(n / b),
                round(n / b) * b - n,
            ),
            "the blocks are right; empty are the slots of the last block that hold no token, and those that do were "
            "counted": lambda n, b: (right(n, b)[0], n % b),
            "a text that ends with a full block takes no further one": one_more,
            "the blocks are right; a last block that is full has no empty slot": lambda n, b: (
                right(n, b)[0],
                b - n % b,
            ),
            "a text without tokens takes no block": lambda n, b: (
                max(1, right(n, b)[0]),
                max(1, right(n, b)[0]) * b - n,
            ),
            "the blocks are rounded to the nearest; a part of a block is taken whole": lambda n, b: (
                round(n / b),
                abs(round(n / b) * b - n),
            ),
        },
    )


@exercise
def slot_mapping(answer):
    """slot_mapping(table, block_size, start, stop): the slots in the pool of the tokens start to stop - 1 of a text
    whose blocks are `table`."""

    def mapped(slot):
        """`slot(position, table, block_size)` for each of the positions."""
        return lambda table, block_size, start, stop: [slot(p, table, block_size) for p in range(start, stop)]

    right = mapped(lambda p, table, b: table[p // b] * b + p % b)

    def whole_blocks(table, block_size, start, stop):
        first, last = start // block_size, -(-stop // block_size)
        return right(table, block_size, first * block_size, last * block_size)

    return compare(
        answer,
        right,
        cases=[
            ([9, 0, 4, 1], 2, 1, 7),  # more blocks than slots in one: a mistake finds a place in the table
            ([7, 2, 5], 4, 6, 9),
            ([7, 2, 5], 4, 0, 11),
            ([3], 16, 4, 5),
            ([9, 0, 4, 1], 2, 1, 8),
            ([6, 3], 8, 3, 3),
        ],
        mistakes={
            "these are the positions themselves: the table is not used": mapped(lambda p, table, b: p),
            "these are the blocks of the tokens; a block has block_size slots, of which a token has one": mapped(
                lambda p, table, b: table[p // b]
            ),
            "these are the places within the blocks; add where the block begins": mapped(lambda p, table, b: p % b),
            "each token gets the first slot of its block; add its place within the block": mapped(
                lambda p, table, b: table[p // b] * b
            ),
            "a block begins at block x block_size, not at its own number": mapped(
                lambda p, table, b: table[p // b] + p % b
            ),
            "// and % are swapped: position // block_size is the place in the table": mapped(
                lambda p, table, b: table[p % b] * b + p // b
            ),
            "the slots are given from token 0 on; `start` is the first asked for": lambda t, b, start, stop: right(
                t, b, 0, stop
            ),
            "it counts from 0 again at `start`: the positions are start, start + 1, ...": lambda t, b, start, stop: (
                right(t, b, 0, stop - start)
            ),
            "`stop` itself is not asked for; as in range, the last is stop - 1": lambda t, b, start, stop: right(
                t, b, start, stop + 1
            ),
            "these are all slots of the blocks; only those of the tokens start to stop - 1 are asked for": whole_blocks,
        },
    )


@exercise
def give_back(answer):
    """give_back(table, refs, free): (refs, free) after the text with the blocks `table` has ended: each of its blocks
    is held once less, and those held no more are free. The order of the free blocks does not matter."""

    def tidy(table, refs, free):
        """The learner's answer with its free blocks in order, where it has the right form."""
        got = answer(table, refs, free)
        try:
            new_refs, new_free = got
            return new_refs, sorted(new_free)
        except (TypeError, ValueError, RuntimeError):  # not two values, or not a list: `compare` says so
            return got

    def right(table, refs, free, joins=lambda left: left == 0, left=lambda count: count - 1):
        refs, free = list(refs), list(free)
        for block in table:
            refs[block] = left(refs[block])
            if joins(refs[block]):
                free.append(block)
        return refs, sorted(free)

    def all_at_zero(table, refs, free):
        refs, _ = right(table, refs, free)
        return refs, sorted([*free, *(block for block, count in enumerate(refs) if count == 0)])

    return compare(
        tidy,
        right,
        cases=[
            ([2, 0], [1, 0, 1, 0], [3, 1]),
            ([4, 1, 3], [0, 2, 1, 1, 3], [0]),
            ([0, 1], [3, 2, 0], [2]),
            ([], [1, 1], []),
        ],
        mistakes={
            "blocks are freed that another text still holds: only one that nobody holds any more is free": (
                lambda t, r, f: right(t, r, f, joins=lambda left: True)
            ),
            "a block that another text still holds must keep a count: take 1 off, do not set it to 0": (
                lambda t, r, f: right(t, r, f, left=lambda count: 0)
            ),
            "the counts are not lowered: each block of the text is held by one text less": lambda t, r, f: (
                list(r),
                right(t, r, f)[1],
            ),
            "the counts are right, but no block has become free": lambda t, r, f: (right(t, r, f)[0], sorted(f)),
            "a block is freed too soon: look at its count after 1 was taken off": lambda t, r, f: right(
                t, r, f, joins=lambda left: left <= 1
            ),
            "the blocks that were free before are missing": lambda t, r, f: (
                right(t, r, f)[0],
                right(t, r, [])[1],
            ),
            "only the last block is given back; the text held all of its table": lambda t, r, f: right(t[-1:], r, f),
            "a block that was free before joins the list again: look only at the blocks of this text": all_at_zero,
        },
    )


@exercise
def copy_on_write(answer):
    """copy_on_write(table, refs, start, stop, block_size): the blocks of `table` that must be copied before the tokens
    start to stop - 1 are written."""

    def touched(table, start, stop, block_size):
        return table[start // block_size : -(-stop // block_size)] if stop > start else []

    def right(table, refs, start, stop, block_size):
        return [block for block in touched(table, start, stop, block_size) if refs[block] > 1]

    def once_a_token(table, refs, start, stop, block_size):
        places = [p // block_size for p in range(start, stop)]
        return [table[i] for i in places if i < len(table) and refs[table[i]] > 1]

    def by_place(table, refs, start, stop, block_size):
        places = range(start // block_size, min(-(-stop // block_size), len(table)))
        return [table[i] for i in places if refs[i] > 1]

    refs = [1, 3, 2, 0, 1, 2]
    there = [  # the table has all blocks that are written to
        ([2, 1, 5], refs, 5, 6, 4),  # in the second of three shared blocks
        ([1, 2, 5], refs, 2, 3, 4),  # in the first
        ([1, 2, 5], refs, 9, 10, 4),  # in the last
        ([1, 4], refs, 6, 7, 4),  # its own block
        ([1, 2, 5, 0], refs, 6, 14, 4),  # over two shared blocks and one of its own
        ([1, 2, 5], refs, 4, 8, 4),  # one block to its end
        ([2], refs, 0, 4, 16),
        ([1, 2, 5], refs, 3, 6, 4),  # fewer tokens than a block has, in two shared blocks
        ([1, 2, 5], refs, 3, 5, 4),  # two tokens, each in a block of its own
    ]
    lacking = ([1, 2], refs, 8, 12, 4)  # in a block that the table does not have yet
    examine = partial(
        compare,
        answer,
        right,
        mistakes={
            "every shared block of the text is copied; only those that are written to must be": (
                lambda t, r, a, z, b: right(t, r, 0, len(t) * b, b)
            ),
            "a block that one text alone holds is copied; it may be written to as it is": lambda t, r, a, z, b: touched(
                t, a, z, b
            ),
            "every block is copied that is written to after `start`, also those behind `stop`": (
                lambda t, r, a, z, b: right(t, r, a, len(t) * b, b)
            ),
            "the blocks before `start` are only read; they may be shared": lambda t, r, a, z, b: right(t, r, 0, z, b),
            "only the first block is looked at; several tokens may touch several blocks": lambda t, r, a, z, b: right(
                t, r, a, min(z, a + 1), b
            ),
            "one block too many: when `stop` begins a block, that block is not written to": (
                lambda t, r, a, z, b: [block for block in t[a // b : z // b + 1] if r[block] > 1]
            ),
            "these are places in the table; the blocks that stand there are wanted": lambda t, r, a, z, b: [
                t.index(block) for block in right(t, r, a, z, b)
            ],
            "a block is shared when two hold it: more than 1, not more than 2": lambda t, r, a, z, b: [
                block for block in touched(t, a, z, b) if r[block] > 2
            ],
            "the block in which the last token falls is missing: go to that of stop - 1, inclusive": (
                lambda t, r, a, z, b: [block for block in t[a // b : z // b] if r[block] > 1]
            ),
            "`refs` is asked by the number of the block, not by its place in the table": by_place,
            "a block is copied once, however many tokens are written to it": once_a_token,
            "few tokens can lie in two blocks: go from the block of `start` to that of stop - 1, and do not count how "
            "many blocks as many tokens fill": lambda t, r, a, z, b: [
                block for block in t[a // b : a // b + -(-(z - a) // b)] if r[block] > 1
            ],
            "the block of `start` is missing when `start` is the last token of it": lambda t, r, a, z, b: right(
                t, r, (a + 1) // b * b, z, b
            ),
            "the block of the last token is missing: the last is stop - 1, not stop - 2": lambda t, r, a, z, b: right(
                t, r, a, max(a, z - 2) + 1, b
            ),
        },
    )
    fault = examine(there)
    if fault is None and isinstance(error_of(answer, *lacking), IndexError):
        return "the table may lack the blocks of the last tokens: new ones are taken for those, and need no copy"
    return fault or examine([*there, lacking])
