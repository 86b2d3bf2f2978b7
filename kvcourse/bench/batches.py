"""One batch of requests, sent at once: output tokens per second of the course's engine, of a static batch, and of vLLM.

All get the same prompts and make exactly as many tokens. They take turns, for a machine is not equally fast all the
time, and each makes a few tokens first, for while others had their turn its threads fell asleep.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from tempfile import TemporaryDirectory

from tqdm.auto import tqdm

from kvcourse.bench.contestants import lead
from kvcourse.bench.race import Difference, Row, WorkerError, first_difference, rotated
from kvcourse.bench.report import spread
from kvcourse.bench.vllm_row import VLLM
from kvcourse.evaluation import evaluation_text
from kvcourse.generation import generate, make_cache
from kvcourse.lm import LM
from kvcourse.metrics import Stopwatch
from kvcourse.model import Transformer
from kvcourse.serving.engine import Engine
from kvcourse.weights.hf_export import export_hf

BLOCK_SIZE = 16
BUDGET = 2048  # tokens of a pass at most, which is vLLM's own default: 16 prompts of 64 tokens are one pass for both
Written = tuple[list[list[int]], float]  # the new tokens of each prompt, and the seconds until the last of them


class Ours:
    """A way of this package: `write` answers all prompts with exactly `new_tokens` tokens each."""

    title: str
    means: str
    program = "kvcourse"

    def __init__(self, model: Transformer):
        self.model = model

    def write(self, prompts: list[list[int]], new_tokens: int) -> Written:
        raise NotImplementedError


class EngineBatch(Ours):
    title = "engine"
    means = "the course's Engine: all prompts are submitted, then run() ends them; pages were allocated before"

    def write(self, prompts: list[list[int]], new_tokens: int) -> Written:
        engine = make_engine(self.model, prompts, new_tokens)
        watch = Stopwatch(self.model.device)
        ids = [engine.submit(prompt, new_tokens) for prompt in prompts]
        served = engine.run()
        seconds = watch.read()
        return [served[id].ids for id in ids], seconds


class StaticBatch(Ours):
    title = "static"
    means = "generate with the list of prompts, in a cache that was allocated before"

    def write(self, prompts: list[list[int]], new_tokens: int) -> Written:
        cache = make_cache(self.model, len(prompts), max(map(len, prompts)) + new_tokens - 1)
        watch = Stopwatch(self.model.device)
        made = generate(self.model, prompts, new_tokens, cache=cache)
        seconds = watch.read()
        return [row.ids for row in made], seconds


def make_engine(model: Transformer, prompts: list[list[int]], new_tokens: int) -> Engine:
    """A new engine, in which nothing is cached, with pages for all of the texts at once."""
    blocks = sum(-(-(len(prompt) + new_tokens - 1) // BLOCK_SIZE) for prompt in prompts)
    return Engine(model, blocks, BLOCK_SIZE, max_batch_tokens=BUDGET, max_running=len(prompts))


def prompts_of(lm: LM, n: int, length: int, seed: int = 0) -> list[list[int]]:
    """`n` different prompts of `length` tokens: pieces of a plain text, or random ids for a model without tokenizer."""
    random = Random(f"prompts {seed}")
    if lm.tokenizer is None:
        return [[random.randrange(lm.config.vocab_size) for _ in range(length)] for _ in range(n)]
    text = lm.encode(evaluation_text())
    return [text[start : start + length] for start in random.sample(range(len(text) - length), n)]


@contextmanager
def vllm_rows(python: str, model: Transformer, max_len: int) -> Iterator[list[VLLM | Row]]:
    """vLLM with `model`, in bfloat16 and in float32: a `Row` with the cause stands for one that could not begin."""
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        export_hf(LM(model, None, "model"), folder)
        rows = []
        for dtype in ("bfloat16", "float32"):
            try:
                rows.append(VLLM(python, folder, dtype, max_len))
                stack.callback(rows[-1].close)
            except WorkerError as error:
                rows.append(Row(f"vllm {dtype}", error=str(error)))
        yield rows


class Batches:
    """All rounds of all ways, for several sizes of a batch. Afterwards `rows` and `differences` say what happened.

    A `Row` has samples `{"size", "round", "tokens", "seconds"}`; one that fails says so in its `error`, and the others
    go on. `differences` are texts in which a row wrote another token than the engine, in its first round.
    """

    def __init__(self, prompts: list[list[int]], sizes: list[int], new_tokens: int, rounds: int):
        self.prompts, self.sizes, self.new_tokens, self.rounds = prompts, sizes, new_tokens, rounds
        self.rows: list[Row] = []
        self.differences: list[dict] = []

    def run(self, ways: list) -> None:
        """`ways`: the course's own, the engine first, then what `vllm_rows` gave."""
        self.rows = [
            way if isinstance(way, Row) else Row(way.title, {"program": way.program, "means": way.means})
            for way in ways
        ]
        turns = [(row, way) for row, way in zip(self.rows, ways, strict=True) if row is not way]
        with tqdm(total=self.rounds * len(self.sizes) * len(turns), unit="run", leave=False) as bar:
            for number in range(self.rounds):
                for size in self.sizes:
                    for row, way in rotated(turns, number):
                        bar.set_description(f"round {number + 1}, {row.title}, batch {size}")
                        self.measure(row, way, size, number)
                        bar.update()

    def measure(self, row: Row, way, size: int, number: int) -> None:
        if row.error is not None:
            return
        prompts = self.prompts[:size]
        try:
            way.write(prompts, min(4, self.new_tokens))
            tokens, seconds = way.write(prompts, self.new_tokens)
        except WorkerError as error:
            row.error = str(error)
            return
        made = sorted({len(text) for text in tokens})
        if len(tokens) != size or made != [self.new_tokens]:
            row.error = f"it made {made} tokens for {len(tokens)} of {size} prompts; {self.new_tokens} were asked for"
            return
        row.samples.append({"size": size, "round": number, "tokens": tokens, "seconds": seconds})

    def compare(self, model: Transformer) -> None:
        """Find the texts that a row wrote differently from the engine, and how clear the engine's choice was there."""
        for size in self.sizes:
            expected = self.tokens_of(self.rows[0], size)
            for row in self.rows[1:]:
                for number, (text, other) in enumerate(zip(self.tokens_of(row, size), expected, strict=False)):
                    place = first_difference(text, other)
                    if place is not None:
                        choice = lead(model, self.prompts[number] + other[:place])
                        found = row.title, self.rows[0].title, len(self.prompts[number])
                        difference = Difference(*found, place, text[place], other[place], choice)
                        self.differences.append({"size": size, "text": number, **vars(difference)})

    def tokens_of(self, row: Row, size: int) -> list[list[int]]:
        return next((sample["tokens"] for sample in row.samples if sample["size"] == size), [])

    def summary(self) -> list[dict]:
        """For each row and size the output tokens per second, and how many times as fast the engine was."""
        return [
            {
                "title": row.title,
                "error": row.error,
                **{key: row.about.get(key) for key in ("program", "means")},
                "batches": [self.speeds(row, size) for size in self.sizes],
                "samples": row.samples,
            }
            for row in self.rows
        ]

    def speeds(self, row: Row, size: int) -> dict:
        """Ratios are taken round by round: what slowed a whole round down is not in them."""
        engine, this = (
            {sample["round"]: sample["seconds"] for sample in which.samples if sample["size"] == size}
            for which in (self.rows[0], row)
        )
        return {
            "size": size,
            "tokens_per_second": spread([size * self.new_tokens / seconds for seconds in this.values()]),
            "engine_over_this": spread([this[number] / engine[number] for number in this if number in engine]),
        }
