"""Hugging Face's transformers as rows of the table: its `generate` over the same weights, with two of its caches."""

from importlib.metadata import version

import torch

from kvcourse.bench.contestants import Contestant
from kvcourse.bench.peers import check_installed, to_transformers
from kvcourse.metrics import Generation, Stopwatch


class Transformers(Contestant):
    title = "transformers"
    means = "Hugging Face's generate over the same weights, not compiled, with its DynamicCache"
    cache: str | None = None  # what generate is told; by itself it takes a cache that grows

    def __init__(self, name: str):
        check_installed()
        super().__init__(name)
        from transformers import GenerationConfig

        self.program = f"transformers {version('transformers')}"
        self.peer = to_transformers(self.model)
        options = dict(do_sample=False, eos_token_id=None, pad_token_id=0, cache_implementation=self.cache)
        self.peer.generation_config = GenerationConfig(**options)

    def generate(self, prompt: list[int], new_tokens: int) -> Generation:
        tokens = torch.tensor([prompt], device=self.device)
        clock = Clock(self.device, len(prompt))
        self.peer.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new_tokens, streamer=clock)
        made = len(clock.generation.ids)
        if made != new_tokens:
            raise RuntimeError(f"transformers made {made} tokens where {new_tokens} were asked for.")
        return clock.generation

    def perplexity(self) -> None:
        """The weights are the course's."""


class TransformersStatic(Transformers):
    title = "transformers static"
    means = "the same with cache_implementation='static', which transformers compiles by itself on a GPU only"
    cache = "static"

    def generate(self, prompt: list[int], new_tokens: int) -> Generation:
        # generate makes a static cache as long as the longest text so far: each text here gets one of its own length
        self.peer._previous_max_cache_length = -1
        return super().generate(prompt, new_tokens)


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
