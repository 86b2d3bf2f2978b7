"""A `Transformer` that computes what the plain one does in fewer and larger steps."""

import torch
from torch import Tensor, nn

from kvcourse.caches import Step
from kvcourse.caches.dense import UniformStep
from kvcourse.caches.packed import PackedStep
from kvcourse.caches.paged import PagedStep
from kvcourse.fast.function import CompiledFunction, cannot_compile, varying
from kvcourse.fast.graphs import Graphs
from kvcourse.fast.layer import (
    after,
    before,
    one_product,
    one_token,
    one_token_each,
    one_token_of_many,
    sizes_of,
)
from kvcourse.fast.pages import reads_of
from kvcourse.fast.weights import Dense, joined, layer_weights, twin
from kvcourse.model import Transformer

BEFORE, AFTER, ONE_TOKEN, ONE_HEAD, ONE_OF_MANY, ONE_EACH = range(6)  # places in `CompiledTransformer.functions`


class CompiledTransformer(Transformer):
    """A `Transformer` over joined weights, whose layers run as compiled functions. `compiled` makes one.

    It takes tokens, positions and caches as any other, so `generate`, `Engine` and `perplexity` work with it. Functions
    are compiled when first used, seconds each (`warm_up` sees to those of `generate`): one for one token after a
    `DenseCache`, whatever its length (a cache that this token fills is compiled once more); one for a token of each of
    many texts in pages that are read in place (a text alone is compiled once more); two, for the parts of a layer
    before and after attention, for any number of tokens and any cache (a single token is compiled once more); and one
    for the head. `reason` says in one sentence why nothing is compiled on this machine, or is None; the joined weights
    then remain, with the plain operations.
    """

    def __init__(self, source: Transformer):
        nn.Module.__init__(self)
        self.config, sizes = source.config, sizes_of(source.config)
        # Modules of its own over the same memory: moving the source does not move this one.
        self.embed_tokens, self.norm, self.lm_head = map(twin, (source.embed_tokens, source.norm, source.lm_head))
        self.weights, self.held = [], nn.ModuleList()
        for layer in source.layers:
            with torch.inference_mode(False):
                weights, modules = layer_weights(layer)
            self.weights.append(weights)
            self.held.extend(modules)
        if self.lm_head is None:
            self.scores = Dense(self.embed_tokens.weight, None)
        else:
            self.scores, self.held_head = joined([self.lm_head])
        self.reason = cannot_compile(source.device.type)
        self.functions = [
            CompiledFunction(before, sizes),
            CompiledFunction(after, sizes),
            CompiledFunction(one_token, sizes),
            CompiledFunction(one_product),
            CompiledFunction(one_token_of_many, sizes),
            CompiledFunction(one_token_each, sizes),
        ]
        on_gpu = self.device.type == "cuda" and self.reason is None
        self.graphs = Graphs(self.run_fixed) if on_gpu else None
        self.slots = torch.empty(self.config.max_seq_len + 1, device=self.device)  # only its length is ever looked at
        self.full_context = not any(self.config.windows)
        self.training = False  # not .eval(): what is shared with the source stays as it is there

    @property
    def layers(self):
        raise ValueError("A compiled model has its weights joined, and no layers: use the model that it was made from.")

    @property
    def compilations(self) -> int:
        """How often a function has been compiled so far."""
        return sum(function.compilations for function in self.functions)

    @property
    def compile_seconds(self) -> float:
        """What that took."""
        return sum(function.seconds for function in self.functions)

    def _apply(self, fn, recurse: bool = True):
        """What `.to`, `.cuda`, `.bfloat16` and others call."""
        raise ValueError("A compiled model stays where and as it is: move the model that it was made from.")

    def __deepcopy__(self, memo):
        raise TypeError("A compiled model cannot be copied: compile the model that it was made from once more.")

    def __reduce_ex__(self, protocol):
        raise TypeError("A compiled model cannot be pickled: compile the model that it was made from once more.")

    def load_state_dict(self, *arguments, **options):
        raise ValueError("A compiled model has its weights joined: load them into a Transformer, and compile that.")

    def forward(self, *arguments, **options) -> Tensor:
        """That of `Transformer`, in inference mode always: a compiled function tells tensors of it from others."""
        with torch.inference_mode():
            logits = super().forward(*arguments, **options)
        return logits if torch.is_inference_mode_enabled() else logits.clone()

    def run_layers(self, x: Tensor, rotary: tuple[Tensor, Tensor], step: Step) -> Tensor:
        if self.is_one(step, x):
            return self.run_one(x[0, 0], rotary, step)[None, None]
        if (packed := self.one_each(step, x)) is not None:
            return self.run_each(x, rotary, packed)
        return self.run_all(x, rotary, step)

    def is_one(self, step: Step, x: Tensor) -> bool:
        """Whether the step is one new token of one text after others in a dense cache. Nothing else goes that way: with
        8 bits it rounds less, and what a request gets must not depend on how many others there are."""
        if self.reason is not None or not self.full_context or not isinstance(step, UniformStep):
            return False
        return len(x) == 1 and step.stop - step.start == 1 and step.stop > 1

    def run_one(self, x: Tensor, rotary: tuple[Tensor, Tensor], step: UniformStep) -> Tensor:
        """x `(d_model,)` of one new token -> the same after all layers. The step's cache is written to."""
        cos, sin = (table[0, 0, 0] for table in rotary)
        slots, cache = varying(self.slots[: step.stop], 0), step.cache
        if self.graphs is not None:
            return self.graphs.run(x, cos, sin, cache, step.stop)
        for index, weights in enumerate(self.weights):
            keys, values = varying(cache.keys[index, 0], 1), varying(cache.values[index, 0], 1)
            x = self.functions[ONE_TOKEN](weights, x, cos, sin, keys, values, slots)
        return x

    def run_fixed(self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The same with nothing left to Python but the order of the calls: what `Graphs` records."""
        for weights, k, v in zip(self.weights, keys, values, strict=True):
            x = self.functions[ONE_OF_MANY](weights, x, cos, sin, k, v, position)
        return x

    def one_each(self, step: Step, x: Tensor) -> PackedStep | None:
        """The packed step that this one is or has, if it is one new token of each of some texts, read in place."""
        packed = step.packed if isinstance(step, PagedStep) else step
        if self.reason is not None or not isinstance(packed, PackedStep) or packed.attention != "direct":
            return None
        alone = len(packed.runs) == 1 and packed.runs[0].widths == [1] * x[..., 0].numel()
        return packed if alone else None

    def run_each(self, x: Tensor, rotary: tuple[Tensor, Tensor], step: PackedStep) -> Tensor:
        """x, one new token of each of N texts, `(1, N, d_model)` or `(N, 1, d_model)` -> the same after all layers."""
        shape, pages = x.shape, step.pages
        x = varying(x.flatten(0, 1), 0)
        cos, sin = (varying(table.transpose(1, 2).flatten(0, 1), 0) for table in rotary)
        reads = {window: reads_of(step.runs[0], window) for window in set(step.windows)}
        slots = varying(step.slots.view(len(x), -1), 0)
        for weights, keys, values, window in zip(self.weights, pages.keys, pages.values, step.windows, strict=True):
            x = self.functions[ONE_EACH](weights, x, cos, sin, keys, values, slots, reads[window])
        return x.view(shape)

    def run_all(self, x: Tensor, rotary: tuple[Tensor, Tensor], step: Step) -> Tensor:
        """x `(B, T, d_model)` -> the same after all layers; between two functions the cache attends."""
        before, after = self.functions[BEFORE], self.functions[AFTER]
        if self.reason is not None:
            before, after = before.plain, after.plain
        shape = x.shape[:2]
        x = varying(x.flatten(0, 1), 0)
        cos, sin = (varying(table.transpose(1, 2).expand(*shape, -1, -1).flatten(0, 1), 0) for table in rotary)
        for index, weights in enumerate(self.weights):
            q, k, v = (part.unflatten(0, shape).transpose(1, 2) for part in before(weights, x, cos, sin))
            attended = step.attend(index, q, k, v).transpose(1, 2).reshape(len(x), -1)
            x = after(weights, x, varying(attended, 0))
        return x.unflatten(0, shape)

    def score(self, x: Tensor, step: Step) -> Tensor:
        if not self.is_one(step, x):
            return super().score(x, step)
        wide = torch.promote_types(x.dtype, torch.float32)
        return self.functions[ONE_HEAD](self.norm(x)[0, 0].to(wide), self.scores, x.dtype).to(x.dtype)[None, None]
