"""Many texts at once as a row of the table: what the engine makes of weights that are read once for all of them."""

from kvcourse.bench.batches import BLOCK_SIZE
from kvcourse.bench.contestants import ROOM, Contestant
from kvcourse.metrics import Generation, Stopwatch
from kvcourse.serving.engine import Engine


class PagedBatch(Contestant):
    """16 texts that have nothing in common. Their prompts are computed once and stay in the prefix cache, so each later
    run begins with the first new token of all of them."""

    title = "paged batch"
    means = "16 texts at once in the Engine, weights in 8 bits: tokens/s of all together, TTFT of one text alone"
    compiled = "int8"
    exact = False
    texts = 16

    def __init__(self, name: str):
        super().__init__(name)
        longest = min(ROOM, self.model.config.max_seq_len)
        blocks = -(-longest // BLOCK_SIZE) + 4  # new tokens of earlier runs stay for a while too
        self.engine = Engine(self.model, self.texts * blocks, BLOCK_SIZE, max_running=self.texts)
        self.alone = Engine(self.model, blocks, BLOCK_SIZE, prefix_caching=False, max_batch_tokens=longest)

    def generate(self, prompt: list[int], new_tokens: int) -> Generation:
        """The tokens of the first text. It arrives as if alone; the gaps are those of all texts together."""
        made = Generation(len(prompt), arrivals=[self.wait_alone(prompt)])
        texts = [self.shifted(prompt, by) for by in range(self.texts)]
        self.run(texts, 1)  # prompts, where they are not cached
        made.ids, steps = self.run(texts, new_tokens)
        if len(steps) != new_tokens:
            raise RuntimeError(f"{self.texts} texts took {len(steps)} steps to make {new_tokens} tokens together.")
        made.arrivals += [made.arrivals[0] + step - steps[0] for step in steps[1:]]
        return made

    def shifted(self, prompt: list[int], by: int) -> list[int]:
        """Another text of the same length, in which every token is another one."""
        return [(token + by) % self.model.config.vocab_size for token in prompt]

    def wait_alone(self, prompt: list[int]) -> float:
        """Seconds until the first token when nobody else is there and nothing is cached."""
        id = self.alone.submit(prompt, 1)
        self.alone.run()
        return self.alone.forget(id).ttft

    def run(self, texts: list[list[int]], new_tokens: int) -> tuple[list[int], list[float]]:
        """The new tokens of the first text, and the moments, in seconds, at which each step ended."""
        ids = [self.engine.submit(text, new_tokens) for text in texts]
        watch, moments = Stopwatch(self.device), []
        while self.engine.unfinished:
            self.engine.step()
            moments.append(watch.read())
        served = [self.engine.forget(id) for id in ids]
        return served[0].ids, moments
