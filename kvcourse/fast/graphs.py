"""Whole decode steps as CUDA graphs: a GPU is told once what a step consists of, and then only to do it again.

A step of one token is some hundred small kernels, and each takes longer to order than to run. A recorded graph is
ordered in one piece. It repeats itself exactly: the same kernels, on the same addresses, with the same shapes. So the
token's embedding, rotary angles and position are copied to fixed places, and the step reads a fixed number of slots of
the cache, a *bucket*, of which those past the token are masked. A longer text needs the next bucket, and another
graph.

Written from PyTorch's documentation of `torch.cuda.graph`; no GPU was there to run the recording. The step that is
recorded runs on the CPU in the tests, and is compared with the plain model there.
"""

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

from kvcourse.caches import Cache

BUCKET = 256  # slots by which the recorded lengths grow: at most so many are read in vain
KEPT = 16  # recorded steps; each keeps its intermediate results in memory


class Graphs:
    """Recorded steps of one model, by cache and bucket. `recordings` counts how many have been made.

    `step(x, cos, sin, position, keys, values) -> x` computes all layers for one token: x `(d_model,)`, cos and sin
    `(D,)`, position `(1,)`, keys and values `(n_layers, H_kv, bucket, D)`, which it also writes to.
    """

    def __init__(self, step: Callable, record: Callable | None = None):
        self.step, self.record = step, record or on_cuda
        self.known: OrderedDict = OrderedDict()
        self.recordings = 0

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache, stop: int) -> Tensor:
        """The step of the token in slot `stop - 1` of a dense cache of one text."""
        bucket = min(cache.max_len, -(-stop // BUCKET) * BUCKET)
        place = cache.keys.data_ptr(), cache.values.data_ptr(), cache.keys.shape, bucket
        if place not in self.known:
            self.known[place] = self.make(x, cos, sin, cache, bucket)
            while len(self.known) > KEPT:
                self.known.popitem(last=False)
        self.known.move_to_end(place)
        inputs, replay, out = self.known[place]
        for fixed, new in zip(inputs, (x, cos, sin, torch.tensor([stop - 1])), strict=True):
            fixed.copy_(new)
        replay()
        return out.clone()  # the next replay writes there again

    def make(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache, bucket: int) -> tuple:
        """Record the step for one cache and bucket: (where its inputs are read, what repeats it, where it writes)."""
        keys, values = cache.keys[:, 0, :, :bucket], cache.values[:, 0, :, :bucket]
        inputs = x.clone(), cos.clone(), sin.clone(), torch.zeros(1, dtype=torch.int64, device=x.device)
        first = keys[:, :, 0].clone(), values[:, :, 0].clone()
        try:
            replay, out = self.record(lambda: self.step(*inputs, keys, values))
        finally:
            keys[:, :, 0], values[:, :, 0] = first  # recording has run the step, for a token at position 0
        self.recordings += 1
        return inputs, replay, out


def on_cuda(step: Callable[[], Tensor]) -> tuple[Callable, Tensor]:
    """Record `step`: (what repeats it, the tensor its result is in). It runs before, so that nothing is compiled or
    chosen for the first time while recording."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph.replay, out
