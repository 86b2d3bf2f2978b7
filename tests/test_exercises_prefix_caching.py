"""The exercises of notebook 07: worked answers and other right ways pass, the usual mistakes are named."""

import random

import pytest
from exercises import as_torch, shared_tests, solution

from kvcourse.serving.bill import Rates, Usage, chat_tokens, invoice
from kvcourse.serving.blocks import BlockPool, BlockTable
from kvcourse.serving.prefix import Identity, PrefixIndex, chain

NOTEBOOK = "07_prefix_caching"

RIGHT = {
    "block_keys": [
        """
        def block_keys(tokens, block_size):
            keys, parent = [], 0
            for end in range(block_size, len(tokens) + 1, block_size):
                parent = hash((parent, tuple(tokens[end - block_size : end])))
                keys.append(parent)
            return keys
        """,
        """
        def block_keys(tokens, block_size):  # the whole beginning is a key too, only a long one
            return [tuple(tokens[:end]) for end in range(block_size, len(tokens) + 1, block_size)]
        """,
        """
        import hashlib

        def block_keys(tokens, block_size):
            keys, parent = [], b""
            for start in range(0, len(tokens) // block_size * block_size, block_size):
                block = tokens[start : start + block_size]
                parent = hashlib.sha256(parent + repr(block).encode()).digest()
                keys.append(parent)
            return keys
        """,
        """
        def block_keys(tokens, block_size):
            key = ()
            for i in range(len(tokens) // block_size):
                key = (key, *tokens[i * block_size : (i + 1) * block_size])
                yield key
        """,
        """
        def block_keys(tokens, block_size):  # two bytes hold every token of the course's vocabularies
            ends = range(block_size, len(tokens) + 1, block_size)
            return [np.array(tokens[:end], dtype=np.uint16).tobytes() for end in ends]
        """,
    ],
    "found_tokens": [
        """
        def found_tokens(computed, prompt, block_size):
            same = 0
            while same < min(len(computed), len(prompt)) and computed[same] == prompt[same]:
                same += 1
            return min(same, len(prompt) - 1) // block_size * block_size
        """,
        """
        def found_tokens(computed, prompt, block_size):
            found = 0
            while found + block_size < len(prompt) and found + block_size <= len(computed):
                if computed[found : found + block_size] != prompt[found : found + block_size]:
                    break
                found += block_size
            return found
        """,
        """
        def found_tokens(computed, prompt, block_size):
            ends = range(0, min(len(computed), len(prompt) - 1) + 1, block_size)
            return max(end for end in ends if computed[:end] == prompt[:end])
        """,
    ],
    "next_to_go": [
        """
        def next_to_go(blocks):
            parents = {parent for parent, _, _ in blocks.values()}
            free = [name for name, (_, users, _) in blocks.items() if users == 0 and name not in parents]
            return min(free, key=lambda name: blocks[name][2], default=None)
        """,
        """
        def next_to_go(blocks):
            best = None
            for name, (_, users, last_used) in blocks.items():
                leaf = all(parent != name for parent, _, _ in blocks.values())
                if leaf and users == 0 and (best is None or last_used < blocks[best][2]):
                    best = name
            return best
        """,
        """
        def next_to_go(blocks):  # what is no leaf is struck off, and the rest goes by age
            leaves = dict(blocks)
            for parent, _, _ in blocks.values():
                leaves.pop(parent, None)
            by_age = sorted(leaves, key=lambda name: leaves[name][2])
            return next((name for name in by_age if not leaves[name][1]), None)
        """,
    ],
    "request_price": [
        """
        def request_price(prompt_tokens, cached_tokens, output_tokens, prices):
            uncached, cached, output = prices
            dollars = (prompt_tokens - cached_tokens) * uncached + cached_tokens * cached + output_tokens * output
            return dollars / 1e6
        """,
        """
        def request_price(prompt_tokens, cached_tokens, output_tokens, prices):
            tokens = (prompt_tokens - cached_tokens, cached_tokens, output_tokens)
            return float(np.dot(tokens, prices)) / 1_000_000
        """,
        """
        def request_price(prompt_tokens, cached_tokens, output_tokens, prices):
            dollars = 0.0
            for tokens, price in zip((prompt_tokens - cached_tokens, cached_tokens, output_tokens), prices):
                dollars += tokens / 1e6 * price
            return torch.tensor(dollars, dtype=torch.float64)
        """,
    ],
    "tokens_computed": [
        """
        def tokens_computed(turns, system, question, reply, caching):
            if caching:
                return system + turns * question + (turns - 1)
            return sum(system + turn * question + (turn - 1) * reply for turn in range(1, turns + 1))
        """,
        """
        def tokens_computed(turns, system, question, reply, caching):
            n = turns
            if caching:
                return system + question + (n - 1) * (question + 1)
            return n * system + question * n * (n + 1) // 2 + reply * n * (n - 1) // 2
        """,
        """
        def tokens_computed(turns, system, question, reply, caching):
            from kvcourse.serving.bill import chat_tokens
            return chat_tokens(turns, system, question, reply, 1 if caching else None).uncached
        """,
    ],
}

KEY_OF_BEGINNING = """
def block_keys(tokens, block_size):
    return [{} for end in range(block_size, len(tokens) + 1, block_size)]
"""
ROLLING = """
def block_keys(tokens, block_size):
    keys, key = [], 7
    for i, token in enumerate(tokens, 1):
        key = key * {base} + token
        if i % block_size == 0:
            keys.append(key)
    return keys
"""

MISTAKES = {
    "block_keys": [
        (
            """
            def block_keys(tokens, block_size):
                return [object() for _ in range(len(tokens) // block_size)]
            """,
            "second time",
        ),
        (("hash((parent, tuple", "hash((0, tuple"), "whatever stands before it"),
        (("parent = hash((parent,", "parent = 3 * 0 + hash((len(keys),"), "whatever stands before it"),
        (("hash((parent, tuple(tokens[end - block_size : end])))", "hash((parent, end))"), "must be part of it"),
        (("len(tokens) + 1", "len(tokens) + block_size"), "only full blocks"),
        (("len(tokens) + 1", "len(tokens)"), "just full"),
        (("tuple(tokens[end - block_size : end])", "sum(tokens[end - block_size : end])"), "order"),
        (("tuple(tokens", "tuple(tokens[-1:] + tokens"), "what comes after them"),
        (("parent = hash((parent, tuple(tokens[end - block_size : end])))", "parent = tokens[:end]"), "fit for a dict"),
        (
            (
                "hash((parent, tuple(tokens[end - block_size : end])))",
                "parent + hash(tuple(tokens[end - block_size : end]))",
            ),
            "order",
        ),
        (("tokens[end - block_size : end]", "tokens[end - block_size : end - 1]"), "did not change"),
        (
            (
                "hash((parent, tuple(tokens[end - block_size : end])))",
                "hash(tuple(tokens[max(0, end - 2 * block_size) : end]))",
            ),
            "two blocks before",
        ),
        (("return keys", "return parent"), "a list of keys is wanted, one for each full block: 3"),
        (("return keys", "return str(parent)"), "a list of keys is wanted"),
        (("return keys", "return keys or None"), "0 for 3 tokens in blocks of 4, yours is None"),
        (("repr(block).encode()", "bytes(block)"), "ValueError: bytes must be in range(0, 256)"),
        (("repr(block).encode()", "bytes(token % 256 for token in block)"), "one byte holds 256 tokens"),
        (("repr(block).encode()", "''.join(map(str, block)).encode()"), "run together"),
        (
            ("repr(block).encode()", "b''.join(t.to_bytes(-(-t.bit_length() // 8), 'big') for t in block)"),
            "as many bytes as any other",
        ),
        (KEY_OF_BEGINNING.format("''.join(map(str, tokens[:end]))"), "[1, 23] and [12, 3]"),
        *[(ROLLING.format(base=base), f"[0, {base}] and [1, 0]") for base in (31, 33, 131, 257, 1000, 10_007)],
        (KEY_OF_BEGINNING.format("int.from_bytes(np.array(tokens[:end], dtype='>u2').tobytes())"), "leaves no trace"),
        *[
            (KEY_OF_BEGINNING.format(key), "fit for a dict")
            for key in (
                "torch.tensor(tokens[:end])",
                "torch.tensor(hash(tuple(tokens[:end])))",
                "(end, torch.tensor(tokens[:end]))",
                "np.array(tokens[:end])",
            )
        ],
    ],
    "found_tokens": [
        ((" // block_size * block_size", ""), "round down to full blocks"),
        (("min(same, len(prompt) - 1)", "same"), "nothing is left to compute"),
        (
            (
                "min(same, len(prompt) - 1) // block_size * block_size",
                "min(same // block_size * block_size, len(prompt) - 1)",
            ),
            "take the one token off first",
        ),
        (
            ("min(same, len(prompt) - 1) // block_size * block_size", "max(0, same // block_size - 1) * block_size"),
            "not one block",
        ),
        (("min(same, len(prompt) - 1)", "max(0, same - 1)"), "take it off the prompt's length"),
        (("// block_size * block_size", "// block_size"), "these are blocks"),
        (("return min(same, len(prompt) - 1)", "return min(len(computed), len(prompt) - 1)"), "only the lengths"),
        (
            ("return min(same", "same = sum(a == b for a, b in zip(computed, prompt))\n    return min(same"),
            "tokens behind the first difference",
        ),
        (
            (
                "return min(same, len(prompt) - 1)",
                "starts = range(0, min(len(computed), len(prompt) - 1) - block_size + 1, block_size)\n"
                "    equal = [computed[i : i + block_size] == prompt[i : i + block_size] for i in starts]\n"
                "    same = block_size * sum(equal)\n"
                "    return min(same, len(prompt) - 1)",
            ),
            "blocks behind the first difference",
        ),
        (("return min(same, len(prompt) - 1)", "return len(prompt) - min(same, len(prompt) - 1)"), "left to compute"),
    ],
    "next_to_go": [
        ((" and name not in parents", ""), "another one depends"),
        (("min(free", "max(free"), "used last"),
        (("users == 0 and ", ""), "somebody is reading"),
        (("name not in parents", "blocks[name][0] is None"), "nobody's parent"),
        (("users == 0 and name not in parents", "blocks[name][0] is None"), "nobody's parent"),
        (("min(free, key=lambda name: blocks[name][2], default=None)", "free[0] if free else None"), "first"),
        (
            (
                "return min(free, key=lambda name: blocks[name][2], default=None)",
                "return min(free or list(blocks), key=lambda name: blocks[name][2])",
            ),
            "all blocks are in use",
        ),
        (("return min(free", "return 7 if 'x' in blocks else min(free"), "{'x': (None, 0, 1)}, expected 'x'"),
        (("users == 0 and", "users == 0 and blocks[name][2] > 1 and"), "expected 'x', yours is None"),
        (("lambda name: blocks[name][2]", "str"), "'other': (None, 0, 5)}, expected 'other', yours is 'leaf'"),
    ],
    "request_price": [
        (("(prompt_tokens - cached_tokens)", "prompt_tokens"), "paid twice"),
        (("cached_tokens * cached", "cached_tokens * uncached"), "at the full price"),
        ((" + cached_tokens * cached", ""), "cheap, not free"),
        ((" / 1e6", ""), "divide by 1,000,000"),
        ((" + output_tokens * output", ""), "the output is missing"),
        (("uncached, cached, output = prices", "cached, uncached, output = prices"), "swapped"),
        (("(prompt_tokens - cached_tokens) * uncached", "(prompt_tokens - cached_tokens) * cached"), "all of"),
    ],
    "tokens_computed": [
        ((" + (turns - 1)\n", "\n"), "never run through the model"),
        ((" + (turns - 1)\n", " + (turns - 1) * reply\n"), "computed again"),
        ((" + (turns - 1)\n", " + turns\n"), "turns - 1 of them"),
        (("return system + turns", "return turns * system + turns"), "once it is known"),
        ((" + (turn - 1) * reply", ""), "the answers are missing"),
        (("(turn - 1) * reply", "turn * reply"), "the first prompt holds no answer"),
        (("sum(system + turn", "system + sum(turn"), "counted once"),
        (("range(1, turns + 1)", "range(turns, turns + 1)"), "the last prompt alone"),
        (("if caching", "if not caching"), "swapped"),
        (("range(1, turns + 1)", "range(1, turns)"), "one short"),
        (("range(1, turns + 1)", "range(turns)"), "begin at 0"),
        ((" + (turns - 1)\n", " + (turns - 1) * (reply - 1)\n"), "the other way round"),
    ],
}

ONE_FORM = {"block_keys": [as_torch]}  # a dict does not find a tensor by its values
TestExercises = shared_tests(NOTEBOOK, RIGHT, MISTAKES, ONE_FORM)


def test_worked_answers_by_hand():
    keys = solution(NOTEBOOK, "block_keys")
    assert len(keys(list(range(9)), 4)) == 2
    assert keys([1, 2, 3, 4], 2)[0] == keys([1, 2, 9, 9], 2)[0]
    assert keys([1, 2, 3, 4], 2)[1] != keys([9, 9, 3, 4], 2)[1]
    found = solution(NOTEBOOK, "found_tokens")
    eight = list(range(8))
    assert [found(eight, eight[:n], 4) for n in (4, 5, 7, 8)] == [0, 4, 4, 4]
    assert found(eight, [*eight, 8], 4) == 8
    go = solution(NOTEBOOK, "next_to_go")
    assert go({"a": (None, 0, 1), "b": ("a", 0, 5), "c": ("a", 0, 3)}) == "c"
    assert solution(NOTEBOOK, "request_price")(1000, 800, 100, (3.0, 0.3, 15.0)) == pytest.approx(0.00234)
    # 2 turns, 100 of system, 10 a question, 20 a reply: 110 + 140 without; 110, then the reply's last token and 10
    assert solution(NOTEBOOK, "tokens_computed")(2, 100, 10, 20, False) == 250
    assert solution(NOTEBOOK, "tokens_computed")(2, 100, 10, 20, True) == 121


def texts(seed, n=40):
    """Short texts of a small vocabulary, which share beginnings of many lengths."""
    draw = random.Random(seed)
    made = [[draw.randrange(3) for _ in range(draw.randrange(1, 20))] for _ in range(n)]
    return [text + made[draw.randrange(n)][: draw.randrange(8)] for text in made]


def test_keys_are_equal_where_those_of_the_package_are():
    def chained(tokens, size):
        keys, key = [], b""
        for end in range(size, len(tokens) + 1, size):
            key = chain(key, tokens[end - size : end])
            keys.append(key)
        return keys

    ours = solution(NOTEBOOK, "block_keys")
    pairs = [pair for text in texts(0) for pair in zip(ours(text, 2), chained(text, 2), strict=True)]
    assert len({one for one, _ in pairs}) == len({two for _, two in pairs}) == len(set(pairs)) < len(pairs)


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_what_is_found_is_what_the_index_finds(block_size):
    found = solution(NOTEBOOK, "found_tokens")
    seen = set()
    for computed, prompt in zip(texts(1), texts(2), strict=True):
        prompt = computed[: len(prompt) // 2 * 2] + prompt[:3] if len(prompt) % 2 else prompt
        index = PrefixIndex(BlockPool(64, block_size), Identity("tiny", "float32"))
        table = BlockTable(index.pool)
        table.reserve(0, len(computed))
        index.publish(computed, table.blocks, 0, len(computed))
        expected = len(index.match(prompt)) * block_size
        assert found(computed, prompt, block_size) == expected
        seen.add(expected > 0)
    assert seen == {True, False}


def test_the_next_to_go_is_the_one_the_pool_takes():
    """Three texts over one beginning end one after the other; then all of the pool is taken, block by block."""
    pool = BlockPool(7, 2)
    index, known = PrefixIndex(pool, Identity("tiny", "float32")), {}
    for number, text in enumerate(([1, 2, 3, 4, 5, 6], [1, 2, 7, 8, 9, 9], [1, 2, 3, 4, 0, 0])):
        shared = index.match([*text, 0])
        table = BlockTable(pool, shared)
        table.reserve(2 * len(shared), 6)
        index.publish(text, table.blocks, 2 * len(shared), 6)
        for parent, block in zip([None, *table.blocks], table.blocks, strict=False):
            known[block] = (parent, 0, number)
        table.free()
    while pool.free_blocks > pool.evictable:
        pool.take()  # the empty ones go first
    order = []
    while known:
        order.append(solution(NOTEBOOK, "next_to_go")(known))
        del known[order[-1]]
    assert order == [pool.take() for _ in order] and len(order) == 6


@pytest.mark.parametrize("prompt, cached, output", [(1000, 800, 100), (64, 0, 7), (17, 16, 1)])
def test_the_price_is_that_of_the_package(prompt, cached, output):
    rates = Rates(3.0, 0.3, 15.0)
    bill = invoice(Usage(prompt - cached, cached, output), rates)
    assert solution(NOTEBOOK, "request_price")(prompt, cached, output, (3.0, 0.3, 15.0)) == pytest.approx(bill.total)


@pytest.mark.parametrize("turns", [1, 2, 7])
def test_tokens_computed_are_those_of_the_package(turns):
    computed = solution(NOTEBOOK, "tokens_computed")
    assert computed(turns, 100, 9, 5, False) == chat_tokens(turns, 100, 9, 5).uncached
    assert computed(turns, 100, 9, 5, True) == chat_tokens(turns, 100, 9, 5, 1).uncached
