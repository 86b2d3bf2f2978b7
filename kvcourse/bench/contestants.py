"""The course's own ways of generating text that are measured against each other, one text at a time.

To add one, add a class and name it in `rows.py`.
"""

import torch

from kvcourse.bench.bytes_read import weights_read
from kvcourse.bench.process import Worker
from kvcourse.cost import bytes_moved
from kvcourse.evaluation import evaluation_text
from kvcourse.generation import generate, generate_naive
from kvcourse.lm import LM, find_model, load_model
from kvcourse.metrics import Generation
from kvcourse.model import Transformer
from kvcourse.quality import perplexity

CONTEXTS = (0, 512, 2000)  # tokens of text before the measured ones; 0 stands for a prompt of one token
ROOM = 2048  # tokens: the longest of these texts with its new tokens fits
SCORED = 2048  # tokens of the evaluation text that perplexity is measured on


class Contestant:
    """One row of the table, alone in its process: the model `name`, loaded, and one way of writing text with it."""

    title: str
    means = ""  # how it writes, for whoever reads the table
    program = "kvcourse"  # what runs, with its version
    compiled: bool | str | None = None  # what `load_model` is told; None: a plain model
    exact = True  # it computes what the plain model computes: other tokens are wrong ones
    texts = 1  # written at a time

    @classmethod
    def start(cls, name: str) -> Worker:
        """Its process."""
        return Worker(f"{cls.__module__}:{cls.__qualname__}", name)

    def __init__(self, name: str):
        self.name = name
        options = {} if self.compiled is None else {"compiled": self.compiled}
        self.lm = load_model(name, **options)

    @property
    def model(self) -> Transformer:
        return self.lm.model

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def weights(self) -> str:
        """The numbers that its weights are kept in."""
        name = self.compiled if isinstance(self.compiled, str) else str(self.model.dtype)
        return name.removeprefix("torch.")

    @property
    def compilations(self) -> int:
        """How many functions were compiled so far."""
        return getattr(self.model, "compilations", 0)

    @property
    def compile_seconds(self) -> float:
        return getattr(self.model, "compile_seconds", 0.0)

    @property
    def reason(self) -> str | None:
        """Why nothing is compiled, where something should be."""
        return getattr(self.model, "reason", None)

    def facts(self) -> dict:
        """What all rows have in common: the model's numbers, and the ids of a text for them to go on with."""
        config = self.model.config
        text = first_tokens(self.lm, max(CONTEXTS)) or random_ids(config.vocab_size, max(CONTEXTS))
        dtype = str(self.model.dtype).removeprefix("torch.")
        about = {"vocab_size": config.vocab_size, "max_seq_len": config.max_seq_len, "text": text}
        return about | {"device": str(self.device), "dtype": dtype, "rounded": rounded_to(self.name)}

    def generate(self, prompt: list[int], new_tokens: int) -> Generation:
        """Exactly `new_tokens` tokens after `prompt`, the most probable one each time."""
        raise NotImplementedError

    def most_gaps(self, prompt_length: int) -> int:
        """How many gaps between tokens are worth their time after such a prompt."""
        return 16

    def step_bytes(self, context: int) -> int:
        """Bytes that a decode step must move at least: the weights as this row keeps them, and for each text the keys
        and values of `context` tokens, read, and those of the new one, written."""
        moved = bytes_moved(self.model.config, 1, context, self.texts, bits=8 * self.model.dtype.itemsize)
        return weights_read(self.model, self.texts) + moved.cache_read + moved.cache_written

    def lead(self, text: list[int]) -> float | None:
        """By how much the best next token is ahead of the second best, as a difference of logits."""
        return lead(self.model, text)

    def perplexity(self) -> float | None:
        """Of the start of the course's evaluation text; None without a tokenizer to read it."""
        text = first_tokens(self.lm, SCORED)
        return text and perplexity(self.model, text, min(SCORED, self.model.config.max_seq_len))


class Naive(Contestant):
    title = "naive"
    means = "recomputes the whole text for each token"

    def generate(self, prompt: list[int], new_tokens: int) -> Generation:
        return generate_naive(self.model, prompt, new_tokens)

    def most_gaps(self, prompt_length: int) -> int:
        """Each token costs a whole prefill: at 2,000 tokens, seconds."""
        return 16 if prompt_length < 128 else 2


class Dense(Contestant):
    title = "dense"
    means = "keeps keys and values in a KV cache that is allocated once"

    def generate(self, prompt: list[int], new_tokens: int) -> Generation:
        return generate(self.model, prompt, new_tokens)


class Compiled(Dense):
    title = "compiled"
    means = "dense with joined matrices and compiled layers, in the model's own dtype"
    compiled = True


class Int8(Compiled):
    title = "int8"
    means = "compiled, weights and activations in 8 bits"
    compiled = "int8"
    exact = False


class Int4(Compiled):
    title = "int4"
    means = "compiled, weights in 4 bits and the head in 8, activations and cache in bfloat16"
    compiled = "int4"
    exact = False


def first_tokens(lm: LM, n: int) -> list[int] | None:
    """The first `n` tokens of the course's evaluation text, or None for a model without a tokenizer."""
    return None if lm.tokenizer is None else lm.encode(evaluation_text())[:n]


def rounded_to(name: str) -> str | None:
    """The type in which a `.gguf` file keeps most of a model, if that is one of few bits, else None."""
    path = find_model(name)
    if path.suffix != ".gguf":
        return None
    from kvcourse.bench.llama_cpp import main_type, open_gguf  # imports a library that takes a while

    kind = main_type(open_gguf(path)[1])
    return None if kind in ("F64", "F32", "F16", "BF16") else kind


def random_ids(vocab_size: int, n: int) -> list[int]:
    """The same ones each time. What they are does not change how long they take."""
    return torch.randint(0, vocab_size, (n,), generator=torch.Generator().manual_seed(0)).tolist()


@torch.inference_mode()
def lead(model: Transformer, text: list[int]) -> float:
    """By how much the best token after `text` is ahead of the second best, as a difference of logits."""
    first, second = model(torch.tensor([text]), last_only=True)[0, 0].float().topk(2).values.tolist()
    return first - second
