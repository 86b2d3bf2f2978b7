"""A recipe in small: a training run of a second, on random words, with questions at known places.

Each row is `<|end|>` and random tokens, and twice in it a pair (key, value), the second time as a question: the
answer is the value. It has the names of `kvcourse.training.recipe`, so that commands can be run with it.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import kvcourse as kv

VOCAB = 40
VARIANTS = {"tiny-mha": {"n_kv_heads": 4}, "tiny-gqa": {"n_kv_heads": 2}, "tiny-window": {"window": 6}}


@dataclass(frozen=True)
class Recipe:
    steps: int = 8
    peak_lr: float = 3e-3
    weight_decay: float = 0.1
    clip: float = 1.0
    answer_weight: float = 4.0
    lengths: tuple[int, ...] = (12, 24)
    seed: int = 0

    def learning_rate(self, step: int) -> float:
        return self.peak_lr * (1 - step / (2 * self.steps))


def config(variant: str) -> kv.ModelConfig:
    sizes = dict(vocab_size=VOCAB, n_layers=2, n_heads=4, d_model=32, d_ff=48, max_seq_len=64, tie_embeddings=True)
    return kv.ModelConfig(**sizes, **VARIANTS[variant])


def new_model(recipe: Recipe, variant: str, device="cpu") -> kv.Transformer:
    model = kv.Transformer(config(variant), device, torch.float32)
    generator = torch.Generator().manual_seed(recipe.seed)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, 0.1, generator=generator)
    return model.requires_grad_(True).train()


def batch_at(recipe: Recipe, tokenizer, step: int) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(1000 * recipe.seed + step)
    length = recipe.lengths[step * len(recipe.lengths) // recipe.steps if step < recipe.steps else -1]
    tokens = torch.randint(1, VOCAB, (4, length + 1), generator=generator)
    tokens[:, 0] = 0
    tokens[:, 8:10] = tokens[:, 2:4]
    weights = torch.ones(4, length)
    weights[:, 8] = recipe.answer_weight
    question = SimpleNamespace(start=9, end=10, distance=6)
    return SimpleNamespace(tokens=tokens, weights=weights, asked=[[question]] * 4)


def held_out(recipe: Recipe, tokenizer, split: str, rows: int = 8) -> list[SimpleNamespace]:
    return [batch_at(recipe, tokenizer, {"validation": 10_000, "test": 20_000}[split] + i) for i in range(2)]


def train_tokenizer_of(recipe: Recipe) -> Tokenizer:
    vocabulary = {"<|end|>": 0} | {letter: id for id, letter in enumerate("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLM", 1)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer
