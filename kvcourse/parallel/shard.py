"""One rank's part of a model: tensor parallelism as Megatron-LM does it (arXiv 1909.08053, section 3).

Two matrices that follow each other are cut so that nothing need be said between them:

    the first by its outputs    q, k, v (whole heads) and gate, up     each rank gets x, makes its part of the output
    the second by its inputs    o and down                             each rank has just that part of the input

What the second gives is then one term of a sum over the ranks. An `all_reduce` adds the terms, and every rank has the
whole x again. There are two of them in a layer, one after attention and one after the feed-forward layer.

A rank holds whole key/value heads and the query heads that they serve, so its attention is ordinary attention, its
cache an ordinary cache with fewer heads. With more ranks than key/value heads, several ranks hold a copy of the same
head and share its query heads: the cache per rank then shrinks no further. vLLM does the same (`QKVParallelLinear` in
vllm/model_executor/layers/linear.py).

Embedding, norms and head are whole on every rank. That is simpler than in vLLM, which splits the vocabulary too
(`VocabParallelEmbedding`), and it is what keeps the weights of a small model with a large vocabulary from halving.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from kvcourse.config import ModelConfig, require_config
from kvcourse.lm import LM
from kvcourse.model import Transformer
from kvcourse.require import require_number, require_whole

AllReduce = Callable[[Tensor], Tensor]  # a term of a sum -> the sum over all ranks, which every rank gets


class SummedLinear(nn.Module):
    """A linear layer of which this rank has some of the inputs. The bias is added to the sum, not to each term."""

    def __init__(self, part: nn.Linear, all_reduce: AllReduce):
        super().__init__()
        self.weight, self.bias, self.all_reduce = part.weight, part.bias, all_reduce

    def forward(self, x: Tensor) -> Tensor:
        """x `(..., inputs of this rank)` -> `(..., outputs)`."""
        total = self.all_reduce(nn.functional.linear(x, self.weight))
        return total if self.bias is None else total + self.bias


def split(model: LM | Transformer, rank: int, world: int, all_reduce: AllReduce) -> Transformer:
    """The part of `model` that rank `rank` of `world` holds, in memory of its own: a `Transformer` with fewer heads.

    All ranks together, each on its own part with the same tokens, give the logits of the whole model, on every rank.
    `all_reduce` is called with each term, twice a layer. Raises `ValueError` unless the heads and d_ff can be shared
    out (`shard_config`), and for a model whose layers are not the plain ones of `Transformer`.
    """
    weights = shard_weights(model, rank, world)
    return assemble(shard_config(plain(model).config, world), weights, all_reduce)


@torch.inference_mode(False)  # usable in and out of inference mode, wherever they are made
def shard_weights(model: LM | Transformer, rank: int, world: int) -> dict[str, Tensor]:
    """The parameters of a rank, by name. Arguments and errors are those of `split`."""
    model = plain(model)
    shard_config(model.config, world)
    rank = require_whole("rank", rank, least=0)
    if rank >= world:
        raise ValueError(f"rank={rank} is none of world={world} ranks: they go from 0 to {world - 1}.")
    return {name: part(name, weight, rank, world, model.config) for name, weight in model.state_dict().items()}


def assemble(config: ModelConfig, weights: dict[str, Tensor], all_reduce: AllReduce) -> Transformer:
    """The shard with these `weights`, whose terms go through `all_reduce`; `config` is that of `shard_config`."""
    shard = Transformer(config, "meta", weights["norm.weight"].dtype)
    shard.load_state_dict(weights, assign=True)
    for layer in shard.layers:
        layer.self_attn.o_proj = SummedLinear(layer.self_attn.o_proj, all_reduce)
        layer.mlp.down_proj = SummedLinear(layer.mlp.down_proj, all_reduce)
    return shard.requires_grad_(False)


def shard_config(config: ModelConfig, world: int) -> ModelConfig:
    """The configuration of each of `world` shards. Raises `ValueError` when heads or d_ff cannot be shared out."""
    world = require_whole("world", world)
    heads, kv_heads, width = require_config(config).n_heads, config.n_kv_heads, config.d_ff
    # Each rank holds whole key/value heads, or each key/value head stands on so many ranks.
    allowed = [
        n for n in range(1, heads + 1) if (kv_heads % n == 0 or n % kv_heads == 0) and heads % n == 0 and width % n == 0
    ]
    if world not in allowed:
        raise ValueError(
            f"world={world} ranks cannot share the model's {heads} query heads, {kv_heads} key/value heads and "
            f"d_ff={width} evenly: world can be {', '.join(map(str, allowed))}."
        )
    return replace(
        config,
        n_heads=heads // world,
        n_kv_heads=max(1, kv_heads // world),
        d_head=config.d_head,
        d_ff=width // world,
    )


def part(name: str, weight: Tensor, rank: int, world: int, config: ModelConfig) -> Tensor:
    """What a rank holds of one parameter: some rows (outputs), some columns (inputs), or all of it."""
    layer, kind = name.split(".")[-2:]
    if layer in ("q_proj", "gate_proj", "up_proj"):
        weight = weight.chunk(world)[rank]
    elif layer in ("k_proj", "v_proj"):  # with fewer heads than ranks, neighbours hold the same one
        parts = min(world, config.n_kv_heads)
        weight = weight.chunk(parts)[rank * parts // world]
    elif layer in ("o_proj", "down_proj") and kind == "weight":
        weight = weight.chunk(world, dim=1)[rank]
    return weight.clone(memory_format=torch.contiguous_format)


def sent_bytes(config: ModelConfig, world: int, bits: float = 16) -> float:
    """Bytes that each rank sends for one token, and as many that it receives: closed form.

    Two all_reduces a layer, of d_model numbers each. Around a ring, a rank first sends `world - 1` pieces of 1 / world
    of them, until each piece is summed somewhere, and then as many again, until everybody has every sum (Patarasuk and
    Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"):

        2 x n_layers x d_model x bits / 8 x 2 (world - 1) / world
    """
    world = require_whole("world", world)
    numbers = 2 * require_config(config).n_layers * config.d_model
    return numbers * require_number("bits", bits) / 8 * 2 * (world - 1) / world


def plain(model: LM | Transformer) -> Transformer:
    """The model that computes, if its parameters are those of a plain `Transformer`; else `ValueError`."""
    model = model.model if isinstance(model, LM) else model
    if not isinstance(model, Transformer):
        raise ValueError(f"model must be an LM, as load_model gives it, or a Transformer, not {type(model).__name__}.")
    names = Transformer(model.config, "meta", model.dtype).state_dict().keys()
    if model.state_dict().keys() != names or any(isinstance(m, SummedLinear) for m in model.modules()):
        raise ValueError(
            "Only a plain model can be split: this one is compiled, quantized or a shard already; give the one it was "
            "made from."
        )
    return model
