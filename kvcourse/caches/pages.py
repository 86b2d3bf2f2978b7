"""Pages: one pool of memory for the keys and values of many texts, cut into blocks of a few tokens each.

A text needs no piece of memory of its own, only a list of blocks, its block table: block i of it holds the tokens from
i * block_size on, wherever in the pool it lies. So nothing is reserved that is not used, but for the rest of the last
block, and texts that begin alike can share blocks (PagedAttention, arXiv 2309.06180, section 4).

Which block belongs to whom is not known here: `kvcourse.serving.blocks` keeps the books.
"""

import torch
from torch import Tensor

from kvcourse.config import ModelConfig, require_config
from kvcourse.cost import slot_bytes
from kvcourse.device import as_dtype, resolve
from kvcourse.require import require_whole


class Pages:
    """Keys and values, `(n_layers, num_blocks, n_kv_heads, block_size, d_head)` each.

    What one head keeps of one block lies in one piece. So blocks are read in pieces of block_size x d_head numbers, and
    side by side they give keys `(B, H_kv, S, D)` as attention reads them best. (Token by token, all heads of one token
    beside each other, copying and attending took 1.3 times as long at 16 x 2,000 tokens, and as long at 16 x 512.)

    Raises `ValueError` for sizes below 1 and for memory that cannot be had.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int = 16, dtype=None, device=None):
        self.config = require_config(config)
        self.num_blocks = require_whole("num_blocks", num_blocks)
        self.block_size = require_whole("block_size", block_size)
        self.device, self.dtype = resolve(device, dtype)
        shape = (config.n_layers, self.num_blocks, config.n_kv_heads, self.block_size, config.d_head)
        try:
            with torch.inference_mode(False):  # usable in and out of inference mode, wherever they are made
                self.keys = torch.zeros(shape, dtype=self.dtype, device=self.device)
                self.values = torch.zeros_like(self.keys)
        except (RuntimeError, TypeError) as error:  # what PyTorch raises depends on how far too large it is
            size = self.bytes_for(config, num_blocks, block_size, self.dtype) / 1e9
            raise ValueError(
                f"A pool of {num_blocks:,} blocks of {block_size:,} tokens takes {size:,.1f} GB, which could not be "
                f"had on {self.device}: give a smaller num_blocks."
            ) from error

    @staticmethod
    def bytes_for(config: ModelConfig, num_blocks: int, block_size: int = 16, dtype=torch.float32) -> int:
        """Bytes such a pool allocates: keys and values of every layer, key/value head and slot."""
        require_config(config)
        slots = require_whole("num_blocks", num_blocks) * require_whole("block_size", block_size)
        return slot_bytes(config, config.n_layers * slots, bits=8 * as_dtype(dtype).itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of memory really allocated."""
        return self.keys.untyped_storage().nbytes() + self.values.untyped_storage().nbytes()

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks in all layers, `(source, target)` each, as if one after the other."""
        origin: dict[int, int] = {}  # whose contents a target ends up with, when a target is the source of a later copy
        for source, target in pairs:
            origin[target] = origin.get(source, source)
        if origin:
            sources, targets = list(origin.values()), list(origin)
            for tensor in (self.keys, self.values):
                tensor[:, targets] = tensor[:, sources]

    def fill(self, value: float, blocks: list[int] | None = None) -> None:
        """Fill `blocks`, or all, with one number. A test writes NaN where nobody may read."""
        for tensor in (self.keys, self.values):
            tensor[:, slice(None) if blocks is None else blocks] = value

    def slots(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """Where a layer keeps N tokens, at `offsets` of `blocks` (both of the same shape): rows `(N * n_kv_heads,)` of
        its keys or values seen as `(num_blocks * n_kv_heads * block_size, d_head)`."""
        heads = torch.arange(self.config.n_kv_heads)
        rows = (blocks[..., None] * len(heads) + heads) * self.block_size + offsets[..., None]
        return rows.flatten().to(self.device)

    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write the keys and values `(N, H_kv, D)` of N tokens into their `slots(...)`."""
        for pool, new in ((self.keys, k), (self.values, v)):
            pool[layer].view(-1, self.config.d_head).index_copy_(0, slots, new.flatten(0, 1))

    def clear(self, slots: Tensor) -> None:
        """Write zeros into `slots(...)` of every layer."""
        for pool in (self.keys, self.values):
            pool.view(len(pool), -1, self.config.d_head).index_fill_(1, slots, 0)

    def pieces(self, blocks: Tensor) -> Tensor:
        """Where a layer keeps `blocks` `(B, n)`: rows `(B * n_kv_heads * n,)` of its keys or values seen as
        `(num_blocks * n_kv_heads, block_size * d_head)`, ordered so that the blocks of one head follow each other."""
        heads = torch.arange(self.config.n_kv_heads)[:, None]
        return (blocks[:, None] * len(heads) + heads).flatten().to(self.device)


def side_by_side(pool: Tensor, pieces: Tensor, n_texts: int) -> Tensor:
    """A copy of the blocks at `Pages.pieces(...)` from one layer's keys or values, `(n_texts, H_kv, S, D)`."""
    heads, d_head = pool.shape[1], pool.shape[3]
    return pool.flatten(2).flatten(0, 1).index_select(0, pieces).view(n_texts, heads, -1, d_head)
