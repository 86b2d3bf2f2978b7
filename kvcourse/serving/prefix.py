"""Texts that begin alike share the blocks of their common beginning.

The keys and values of a token depend on it and on all tokens before it. So a full block is known by its own tokens and
the block before it: a chain, and all chains together are a tree of prefixes. A link is found by a hash of the one
before it and its tokens, as in vLLM's automatic prefix caching. Keeping what ended texts leave behind, and evicting the
least recently used leaves first, is RadixAttention (Zheng et al. 2024, "SGLang: Efficient Execution of Structured
Language Model Programs", section 3).
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from weakref import WeakValueDictionary

from kvcourse.serving.blocks import BlockPool


@dataclass(frozen=True)
class Identity:
    """What keys and values depend on besides the tokens: those of one identity are of no use to another."""

    model: str
    dtype: str
    window: int | tuple[int | None, ...] | None = None
    quantization: str | None = None


@dataclass(eq=False, slots=True, weakref_slot=True)
class Entry:
    """One full block of tokens after the ones of its `parent`, and the block that holds its keys and values, if any."""

    key: bytes
    parent: "Entry | None"
    tokens: tuple[int, ...]
    block: int | None = None


def chain(parent_key: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block of `tokens` that follows the block with `parent_key`."""
    return blake2b(parent_key + array("q", tokens).tobytes(), digest_size=16).digest()


class PrefixIndex:
    """The full blocks of `pool` whose contents are known, by the tokens from the start of the text.

    A block is known from the moment a forward pass has filled it until the pool takes it for something else, so a text
    that ended still serves the next one. `queries` and `hits` count tokens: looked up by `match`, and found.
    """

    def __init__(self, pool: BlockPool, identity: Identity):
        if pool.on_reuse is not None:
            raise ValueError("This pool has a prefix index already: give each index a pool of its own.")
        self.pool = pool
        self.identity = identity
        self.queries = 0
        self.hits = 0
        self._root = Entry(chain(repr(identity).encode(), ()), None, ())
        self._of_block: dict[int, Entry] = {}
        # An entry lives as long as its block is known, one that follows it is, or a text goes on from it: so there is
        # never a second one for the same tokens, "the same parent" is a plain `is`, and a block whose parent was
        # evicted is found again as soon as the parent has been computed again.
        self._entries: WeakValueDictionary[bytes, Entry] = WeakValueDictionary()
        pool.on_reuse = self.forget

    def __len__(self) -> int:
        """Blocks known, used and free."""
        return len(self._of_block)

    def lookup(self, tokens: Sequence[int]) -> list[int]:
        """The blocks `match` would give, without holding or counting them."""
        size = self.pool.block_size
        entry, blocks = self._root, []
        for start in range(0, len(tokens) - size, size):  # at least one token stays: its scores give the next one
            entry = self._entry(entry, tuple(tokens[start : start + size]))
            if entry is None or entry.block is None:
                break
            blocks.append(entry.block)
        return blocks

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The blocks of the longest known beginning of `tokens` that is made of full blocks and leaves at least one
        token to compute. Each is held once more, for the caller: put them in a `BlockTable(pool, blocks)`."""
        blocks = self.lookup(tokens)
        for block in blocks:
            self.pool.share(block)
        self.queries += len(tokens)
        self.hits += len(blocks) * self.pool.block_size
        return blocks

    def publish(
        self, tokens: Sequence[int], blocks: Sequence[int | None], start: int, stop: int, last: Entry | None = None
    ) -> Entry | None:
        """Tokens `start` to `stop - 1` of a text have just been computed: make known every block that is full now.

        `blocks` is the text's table. Contents that another block already holds stay known under that one, and None
        (given back behind a window) is skipped; in both cases the chain goes on to the blocks after it.

        Returns the entry of the last full block, None if there is none yet. Give it as `last` when the same text is
        published again: without it the way back to a known block is walked, and where blocks are not known under this
        text's own numbers, that is further for each block that fills.
        """
        size = self.pool.block_size
        if not (0 <= start <= stop <= len(tokens) and stop // size <= len(blocks)):
            raise ValueError(
                f"publish(start={start}, stop={stop}) with {len(tokens)} tokens and {len(blocks)} blocks of {size}: "
                "start and stop must lie in the text, and every full block in the table."
            )
        first, full = start // size, stop // size
        if first == full:
            return last
        entry = last
        if entry is None:
            while first > 0 and blocks[first - 1] not in self._of_block:
                first -= 1
            entry = self._of_block[blocks[first - 1]] if first else self._root
        for i in range(first, full):
            entry = self._entry(entry, tuple(tokens[i * size : (i + 1) * size]), add=True)
            if entry is None:
                return None  # a colliding key: what was there first stays
            if entry.block is None and blocks[i] is not None:
                entry.block = blocks[i]
                self._of_block[blocks[i]] = entry
                self.pool.kept.add(blocks[i])
        return entry

    def forget(self, block: int) -> None:
        """The pool calls this as it takes a known block for something else."""
        self._of_block.pop(block).block = None
        self.pool.kept.remove(block)

    def _entry(self, parent: Entry, tokens: tuple[int, ...], add: bool = False) -> Entry | None:
        """The entry for `tokens` after `parent`, made if there is none and `add` is set. Hashes can collide, and a
        wrong entry would hand out another text's keys and values: so what is found is compared, and None if it differs.
        """
        key = chain(parent.key, tokens)
        entry = self._entries.get(key)
        if entry is None and add:
            entry = self._entries[key] = Entry(key, parent, tokens)
        same = entry is not None and entry.parent is parent and entry.tokens == tokens
        return entry if same else None
