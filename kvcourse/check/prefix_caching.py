"""Checkers of notebook 07: keys of blocks, what is found of a prompt, what is evicted."""

from collections.abc import Iterable

from kvcourse.check.diagnosis import matches, short
from kvcourse.check.framework import compare, exercise


@exercise
def block_keys(answer):
    """block_keys(tokens, block_size): one key for each full block of a text. Two blocks have the same key just when the
    texts up to their ends are the same. What a key is, is left open; it must be fit for a dict."""
    a, b, c = [5, 1, 49_151, 2], [3, 3, 812, 6], [7, 30_119, 2, 1]
    text, known = a + b + c, {}

    def keys(tokens, block_size=4):
        """Each key as its number in a dict: one that the dict does not find again gets a new number."""
        return [known.setdefault(key, len(known)) for key in list(answer(tokens, block_size))]

    made = answer(text, 4)
    if made is None or made is ...:
        return compare(lambda: made, lambda: [], cases=[()])
    for tokens, block_size, n in ((text, 4, 3), (text[:-1], 4, 2), (text[:3], 4, 0), (text, 5, 2), (text, 1, 12)):
        made = answer(tokens, block_size)
        if isinstance(made, str | bytes) or not isinstance(made, Iterable):
            yours = "None" if made is None else short(made)
            wanted = f"a list of keys is wanted, one for each full block: {n} for {len(tokens)} tokens in blocks of"
            return f"{wanted} {block_size}, yours is {yours}"
        if len(made := list(made)) != n:
            hint = "only full blocks get a key" if len(made) > n else "a block that is just full gets a key"
            return f"{len(tokens)} tokens in blocks of {block_size} have {n} full blocks, yours has {len(made)}: {hint}"
    once, again = list(answer(text, 4)), list(answer(text, 4))
    fit = "a key must be fit for a dict: use a number, bytes, a text, or a tuple of such, not a"
    try:
        found = set(once).issuperset(again)
    except TypeError:
        return f"{fit} list or an array"
    if not found and repr(once) == repr(again):  # they look the same, but a dict takes them for different ones
        return f"{fit} tensor, which a dict finds only by the object, not by its values"
    if not found:
        return "the same text got other keys the second time; equal texts must have equal keys"
    first = keys(text)
    if len(set(first)) < 3 or keys(a + c)[1] == first[1]:
        return "blocks of other tokens have the same key; the tokens of the block must be part of it"
    if keys(a + b + [0, 0, 0, 0])[:2] != first[:2]:
        return "the keys of the first blocks changed with what comes after them; a block knows only what is before it"
    return _in_a_chain(keys, a, b, c, first) or _told_apart(keys)


def _in_a_chain(keys, a, b, c, first) -> str | None:
    """What tells a chain from keys that leave something out of the text before."""
    if keys(b + b)[0] == keys(b + b)[1] or keys(c + b)[1] == first[1]:
        return (
            "a block has the same key whatever stands before it; its keys and values depend on that, so the key of the "
            "block before must be part of it"
        )
    if keys([0, *a[1:]] + b + c)[2] == first[2]:
        return "a change two blocks before is not seen; chain the key of the block before, not only its tokens"
    if keys(sorted(a))[0] == first[0] or keys(b + a)[1] == first[1]:
        return "the order does not count: the same tokens, or the same blocks, in another order got the same key"
    for place in range(12):
        changed = [*a, *b, *c]
        changed[place] = 100
        other = keys(changed)
        same = [one == two for one, two in zip(first, other, strict=True)]
        if same != [block < place // 4 for block in range(3)]:
            late = same[place // 4]
            fault = "the key of its block did not change" if late else "keys of blocks before it changed"
            return f"with another token at place {place} {fault}; a key must see each token of its block"
    return None


ALIKE = [  # two texts, and what can give them one key
    ([1, 2], [257, 2], "one byte holds 256 tokens, and a vocabulary has more"),
    ([1, 23], [12, 3], "the numbers of the tokens run together; set a mark between them, or take a tuple"),
    ([1, 515], [258, 3], "the bytes of the tokens run together; a small token must have as many bytes as any other"),
    *[
        ([0, base], [1, 0], "a sum of products is the same for many texts; take hash() of a tuple, or a digest")
        for base in (10, 16, 31, 33, 37, 53, 61, 101, 127, 131, 137, 256, 257, 1_000, 1_009, 1_024, 4_096, 10_007)
    ],
]


def _told_apart(keys) -> str | None:
    """What lets two different texts have one key, when their blocks are told apart by most tokens."""
    for one, other, fault in ALIKE:
        if keys(one, 2) == keys(other, 2):
            return f"the texts {one} and {other} have the same key: {fault}"
    if len(set(keys([0] * 8, 2))) < 4:
        return "a block of tokens 0 leaves no trace: it has the key of the block before, and another text ends here"
    return None


@exercise
def found_tokens(answer):
    """found_tokens(computed, prompt, block_size): how many tokens of `prompt` are found, when keys and values of
    `computed` lie in blocks: full blocks from the beginning, and at least one token of the prompt is left over."""
    count = list(range(40))

    def shared(computed, prompt):
        n = 0
        while n < min(len(computed), len(prompt)) and computed[n] == prompt[n]:
            n += 1
        return n

    def down(n, size):
        return n // size * size

    def right(computed, prompt, block_size):
        return down(min(shared(computed, prompt), len(prompt) - 1), block_size)

    def equal_blocks(computed, prompt, size):
        """Blocks that are equal, even behind one that is not."""
        starts = range(0, down(min(len(computed), len(prompt) - 1), size), size)
        return sum(size for i in starts if computed[i : i + size] == prompt[i : i + size])

    return compare(
        answer,
        right,
        cases=[
            (count[:17], count[:10] + [99] * 9, 4),
            (count[:8], count[:8], 4),
            (count[:8], count[:9], 4),
            (count[:9], count[:8], 4),
            (count[:3], count[:20], 4),
            (count[:12], [0, 99, 2, 3, 4, 5, 99, *range(7, 13)], 4),
            (count[:12], [99] + count[1:12] + [0], 4),
            (count[:12], count[:2] + [99] + count[3:12] + [0], 4),
            (count[:12], count[:5] + [99] + count[6:12] + [0], 4),
            (count[:8], count[:8], 1),
            (count[:16], count[:16], 16),
            (count[:30], count[:40], 16),
            ([], count[:5], 4),
            (count[:5], [7], 1),
        ],
        mistakes={
            "tokens of a block that is not full, or not equal to its end, are not found: round down to full blocks": (
                lambda c, p, size: min(shared(c, p), len(p) - 1)
            ),
            "nothing is left to compute where all of the prompt is known; without scores there is no next token": (
                lambda c, p, size: down(shared(c, p), size)
            ),
            "one token is left, but what is found must be made of full blocks: take the one token off first, then "
            "round down": lambda c, p, size: min(down(shared(c, p), size), len(p) - 1),
            "a block too few is found: leave one token over, not one block, and only where nothing else is left": (
                lambda c, p, size: max(0, down(shared(c, p), size) - size)
            ),
            "one token is taken off even where the prompt has more to compute: take it off the prompt's length": (
                lambda c, p, size: down(max(0, shared(c, p) - 1), size)
            ),
            "it is rounded up; of a block that is equal in part nothing can be used": (
                lambda c, p, size: min(-(-shared(c, p) // size) * size, len(p) - 1)
            ),
            "these are blocks; tokens are wanted": lambda c, p, size: right(c, p, size) // size,
            "blocks behind the first difference are counted; their keys and values depend on what is before them": (
                equal_blocks
            ),
            "tokens behind the first difference are counted; what is found ends there": lambda c, p, size: down(
                min(sum(one == two for one, two in zip(c, p, strict=False)), len(p) - 1), size
            ),
            "only the lengths are compared; the tokens must be the same": lambda c, p, size: down(
                min(len(c), len(p) - 1), size
            ),
            "these are the tokens left to compute; those found are wanted": lambda c, p, size: (
                len(p) - right(c, p, size)
            ),
        },
    )


@exercise
def next_to_go(answer):
    """next_to_go(blocks): which block is taken next when memory is needed; `blocks` is `{name: (parent, users,
    last_used)}`. None when all are in use."""
    tree = {
        "system": (None, 0, 9),
        "A1": ("system", 0, 3),
        "A2": ("A1", 0, 3),
        "B1": ("system", 0, 9),
        "B2": ("B1", 0, 9),
    }
    used = {
        "system": (None, 1, 8),
        "A1": ("system", 0, 2),
        "A2": ("A1", 0, 5),
        "B1": ("system", 1, 1),
        "B2": ("B1", 1, 1),
    }
    busy = {"system": (None, 2, 4), "A1": ("system", 1, 4), "B1": ("system", 1, 4)}

    def leaves(blocks):
        parents = {parent for parent, _, _ in blocks.values()}
        return [name for name in blocks if name not in parents]

    def unused(blocks, names):
        return [name for name in names if blocks[name][1] == 0]

    def by_use(blocks, names, pick=min):
        return pick(names, key=lambda name: blocks[name][2]) if names else None

    def right(blocks):
        return by_use(blocks, unused(blocks, leaves(blocks)))

    def said(blocks):
        """The answer; None is one too, where it is not the only one."""
        return "None" if (name := answer(blocks)) is None else name

    cases = [
        tree,
        used,
        {"x": (None, 0, 1)},
        {name: tree[name] for name in ("system", "B1", "A1")},
        {"root": (None, 0, 1), "leaf": ("root", 0, 7), "other": (None, 0, 5)},
    ]
    mistakes = {
        "a block goes that has no parent, the beginning of a text; a leaf is a block that is nobody's parent": (
            lambda blocks: by_use(blocks, unused(blocks, [name for name in blocks if blocks[name][0] is None]))
        ),
        "a block goes on which another one depends; without it, what follows is never found: take leaves only": (
            lambda blocks: by_use(blocks, unused(blocks, blocks))
        ),
        "the block goes that was used last; what was not used for longest is missed least": lambda blocks: by_use(
            blocks, unused(blocks, leaves(blocks)), max
        ),
        "a block goes that somebody is reading; only those with no users may go": lambda blocks: by_use(
            blocks, leaves(blocks)
        ),
        "the first leaf goes; of the leaves it is the one not used for longest": lambda blocks: (
            unused(blocks, leaves(blocks)) or [None]
        )[0],
    }
    written = any(answer(blocks) is not None for blocks in cases)
    fault = compare(said if written else answer, right, cases, mistakes)
    if fault in mistakes:
        return fault
    if fault:  # a dict is too long for the message of `compare`, and without it nobody can tell what is wrong
        blocks = next(blocks for blocks in cases if not matches(said(blocks), right(blocks)))
        name = answer(blocks)
        yours = repr(name) if name is None or isinstance(name, str) else short(name)
        return f"with blocks = {blocks}, expected {right(blocks)!r}, yours is {yours}"
    if answer(busy) is not None:
        return "all blocks are in use, so none can go: return None"
    return None
