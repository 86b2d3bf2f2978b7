"""Texts in blocks without a model: a slot holds the token that was written to it, so a wrong page reads wrong.

`Texts` does what a serving engine does to a pool, at random, and after each operation compares everything with the slow
obvious version: the texts themselves, references counted over all tables, and a dict of all known prefixes.
"""

import random
from collections import Counter
from dataclasses import dataclass

from kvcourse.serving.blocks import BlockPool, BlockTable, OutOfBlocks
from kvcourse.serving.prefix import Identity, PrefixIndex

IDENTITY = Identity(model="none", dtype="float64")
POISON = None


@dataclass(eq=False)
class Text:
    tokens: list[int]
    table: BlockTable
    computed: int = 0  # tokens that were written
    start: int = 0  # the first token whose block was not given back


class Texts:
    """`num_blocks` blocks, with a prefix index or without, and texts of up to five blocks drawn with `seed`."""

    OPERATIONS = ("admit", "step", "step", "step", "fork", "truncate", "window", "end")

    def __init__(self, num_blocks: int, block_size: int, prefix: bool = False, seed: int = 0):
        self.random = random.Random(seed)
        self.pool = BlockPool(num_blocks, block_size)
        self.slots = [POISON] * (num_blocks * block_size)
        self.texts: list[Text] = []
        self.known: dict[tuple[int, ...], int] = {}  # each known prefix of full blocks, and its last block
        self.seen = Counter()
        self.index = None
        if prefix:
            self.index = PrefixIndex(self.pool, IDENTITY)
            forget = self.index.forget
            self.pool.on_reuse = lambda block: (self.note_reuse(block), forget(block))

    def run(self, operations: int) -> None:
        for _ in range(operations):
            getattr(self, self.random.choice(self.OPERATIONS))()
            self.poison()
            self.check()

    # What an engine does.

    def admit(self):
        self.texts.append(Text(*self.match(self.some_tokens())))
        self.texts[-1].computed = len(self.texts[-1].table.blocks) * self.pool.block_size

    def step(self):
        """Some texts write a chunk each. As in an engine, all blocks are reserved before anything is copied or written,
        and a text that finds none has another one preempted."""
        copies, plan = [], {}
        for text in self.some_texts(3):
            if text not in self.texts:
                continue  # preempted a moment ago
            if text.computed == len(text.tokens):
                text.tokens.append(self.random.randrange(2))
            stop = self.random.randint(text.computed + 1, len(text.tokens))
            before, needed = self.state(), text.table.shortage(text.computed, stop)
            try:
                copies += text.table.reserve(text.computed, stop)
                plan[text] = stop
                assert before[0] - self.pool.free_blocks <= needed
            except OutOfBlocks:
                assert self.state() == before and needed > self.pool.free_blocks
                victim = self.random.choice(self.texts)
                plan.pop(victim, None)
                self.give_up(victim)
                self.seen["preemptions"] += 1
        size = self.pool.block_size
        for source, target in copies:
            self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]
        for text, stop in plan.items():
            slots = text.table.slots(text.computed, stop)
            for slot, token in zip(slots, text.tokens[text.computed : stop], strict=True):
                self.slots[slot] = token
            self.publish(text, stop)
            text.computed = stop
        self.seen["copies"] += len(copies)

    def fork(self):
        for text in self.some_texts(1):
            length = self.random.randint(text.start, text.computed)
            tokens = text.tokens[:length] + self.some_tokens()
            self.texts.append(Text(tokens, text.table.fork(length), length, text.start))

    def truncate(self):
        for text in self.some_texts(1):
            text.computed = self.random.randint(text.start, text.computed)
            text.tokens = text.tokens[: text.computed] + self.some_tokens()
            text.table.truncate(text.computed)

    def window(self):
        for text in self.some_texts(1):
            position = self.random.randint(-1, text.computed)
            text.table.release_before(position)
            text.start = max(text.start, position // self.pool.block_size * self.pool.block_size)

    def end(self):
        for text in self.some_texts(1):
            self.give_up(text)

    def give_up(self, text: Text):
        text.table.free()
        self.texts.remove(text)

    def some_texts(self, at_most: int) -> list[Text]:
        return self.random.sample(self.texts, min(len(self.texts), at_most))

    def some_tokens(self) -> list[int]:
        """Few different ones, and often the beginning of another text, so that prefixes meet."""
        size = self.pool.block_size
        head = self.random.choice(self.texts).tokens if self.texts and self.random.random() < 0.7 else []
        head = head[: self.random.randint(0, 4 * size)]
        return head + [self.random.randrange(2) for _ in range(self.random.randint(1, size))]

    # The prefix index, beside the slow version of it.

    def match(self, tokens: list[int]) -> tuple[list[int], BlockTable]:
        if self.index is None:
            return tokens, BlockTable(self.pool)
        size, expected = self.pool.block_size, []
        while (len(expected) + 1) * size < len(tokens):
            block = self.known.get(tuple(tokens[: (len(expected) + 1) * size]))
            if block is None:
                break
            expected.append(block)
        blocks = self.index.match(tokens)
        assert blocks == expected
        self.seen["hits"] += len(blocks)
        return tokens, BlockTable(self.pool, blocks)

    def publish(self, text: Text, stop: int) -> None:
        """Blocks that are full now are known, and those before them back to the last known one."""
        if self.index is None:
            return
        size, blocks = self.pool.block_size, text.table.blocks
        i = text.computed // size
        if stop // size > i:
            while i > 0 and blocks[i - 1] not in self.known.values():
                i -= 1
        for j in range(i, stop // size):
            if blocks[j] is not None:
                self.known.setdefault(tuple(text.tokens[: (j + 1) * size]), blocks[j])
        self.index.publish(text.tokens, blocks, text.computed, stop)

    def note_reuse(self, block: int) -> None:
        assert all(block not in text.table.blocks for text in self.texts), "a block in use was taken"
        self.known = {prefix: other for prefix, other in self.known.items() if other != block}
        self.seen["evictions"] += 1

    # What must hold after each operation.

    def state(self) -> tuple:
        return (
            self.pool.free_blocks,
            list(self.pool.refs),
            list(self.pool.queue),
            [t.table.blocks[:] for t in self.texts],
        )

    def poison(self) -> None:
        """What nobody may read any more becomes unreadable."""
        size = self.pool.block_size
        for block in self.pool.queue.keys() - self.pool.kept:
            self.slots[block * size : (block + 1) * size] = [POISON] * size

    def check(self) -> None:
        pool = self.pool
        held = Counter(block for text in self.texts for block in text.table.blocks if block is not None)
        assert pool.refs == [held[block] for block in range(pool.num_blocks)]
        assert set(pool.queue) == {block for block in range(pool.num_blocks) if pool.refs[block] == 0}
        assert pool.free_blocks == len(pool.queue) and pool.free_blocks + pool.used_blocks == pool.num_blocks
        kept_or_not = [block in pool.kept for block in pool.queue]
        assert pool.evictable == sum(kept_or_not) and kept_or_not == sorted(kept_or_not)
        for text in self.texts:
            blocks = [block for block in text.table.blocks if block is not None]
            assert len(set(blocks)) == len(blocks), "a table lists a block twice"
            assert len(text.table.blocks) == pool.blocks_for(text.computed) or text.computed == 0
            read = [self.slots[slot] for slot in text.table.slots(text.start, text.computed)]
            assert read == text.tokens[text.start : text.computed]
        if self.index is not None:
            assert pool.kept == set(self.known.values()) and len(self.index) == len(self.known)

    def end_all(self) -> None:
        """After the last text every block is free: none has leaked."""
        while self.texts:
            self.end()
            self.poison()
            self.check()
        assert self.pool.free_blocks == self.pool.num_blocks and not any(self.pool.refs)
