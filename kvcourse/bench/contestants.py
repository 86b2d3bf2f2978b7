"""The ways of generating text that are measured against each other. To add one, add a class and name it in `ROWS`."""

from importlib.metadata import version

import torch

from kvcourse.bench.peers import check_installed, to_transformers
from kvcourse.cost import bytes_moved
from kvcourse.generation import generate, generate_naive
from kvcourse.lm import load_model
from kvcourse.metrics import Generation, Stopwatch
from kvcourse.model import Transformer


class Contestant:
    """One row of the table, alone in its process: the model `name`, loaded, and one way of writing text with it."""

    title: str
    means = ""  # how it writes, for whoever reads the table
    program = "kvcourse"  # what runs, with its version

    def __init__(self, name: str):
        self.model = load_model(name).model

    def generate(self, prompt: list[int], new_tokens: int) -> Generation:
        """Exactly `new_tokens` tokens after `prompt`, the most probable one each time."""
        raise NotImplementedError

    def most_gaps(self, prompt_length: int) -> int:
        """How many gaps between tokens are worth their time after such a prompt."""
        return 16

    def step_bytes(self, context: int) -> int:
        """Bytes that a decode step must move at least, with a cache that holds `context` tokens."""
        return bytes_moved(self.model.config, 1, context, bits=8 * self.model.dtype.itemsize).total

    def lead(self, text: list[int]) -> float:
        """By how much the best next token is ahead of the second best, as a difference of logits."""
        return lead(self.model, text)


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


class Transformers(Contestant):
    """Hugging Face's `generate` with its own cache (`DynamicCache`), over the same weights."""

    title = "transformers"
    means = "Hugging Face's generate with its own KV cache, over the same weights"

    def __init__(self, name: str):
        check_installed()
        super().__init__(name)
        from transformers import GenerationConfig

        self.program = f"transformers {version('transformers')}"
        self.peer = to_transformers(self.model)
        self.peer.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)

    def generate(self, prompt: list[int], new_tokens: int) -> Generation:
        tokens = torch.tensor([prompt], device=self.model.device)
        clock = Clock(self.model.device, len(prompt))
        self.peer.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new_tokens, streamer=clock)
        made = len(clock.generation.ids)
        if made != new_tokens:
            raise RuntimeError(f"transformers made {made} tokens where {new_tokens} were asked for.")
        return clock.generation


class Clock:
    """A streamer of transformers: `put` gets the prompt first, then each token as it is made."""

    def __init__(self, device: torch.device, prompt_length: int):
        self.generation = Generation(prompt_length)
        self.prompt_seen = False
        self.watch = Stopwatch(device)

    def put(self, tokens: torch.Tensor) -> None:
        if self.prompt_seen:
            self.generation.arrivals.append(self.watch.read())
            self.generation.ids += tokens.flatten().tolist()
        self.prompt_seen = True

    def end(self) -> None:
        """Nothing is held back, so nothing is left to do."""


@torch.inference_mode()
def lead(model: Transformer, text: list[int]) -> float:
    """By how much the best token after `text` is ahead of the second best, as a difference of logits."""
    first, second = model(torch.tensor([text]), last_only=True)[0, 0].float().topk(2).values.tolist()
    return first - second


COURSE = [Naive, Dense]  # the course's own rows
PEERS = [Transformers]  # other programs
