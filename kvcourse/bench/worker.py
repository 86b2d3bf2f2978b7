"""One contestant in a process of its own: `python -m kvcourse.bench.worker MODULE:CLASS MODEL`.

It loads the model and then answers requests. Each request is a line of JSON on the standard input, each answer one
on the standard output; an answer with the key "error" is the last. It ends when the input does.
"""

import gc
import json
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # else not before `main` has seen to what a library prints when it is imported
    from kvcourse.bench.contestants import Contestant
    from kvcourse.metrics import Generation

TRIES = 4  # runs in which something may still be compiled


def main(where: str, model: str) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not stand among the answers

    def answer(**content) -> None:
        print(json.dumps(content), file=answers, flush=True)

    try:
        module, name = where.split(":")
        contestant = getattr(import_module(module), name)(model)
        answer(**describe(contestant))
        for line in sys.stdin:
            answer(**serve(contestant, **json.loads(line)))
    except KeyboardInterrupt:
        pass
    except Exception as error:
        answer(error=short(error))


def describe(contestant: "Contestant") -> dict:
    """What the one who asks must know. Memory is counted from here on."""
    from kvcourse.bench.memory import forget_peak

    gc.collect()
    return {
        "program": contestant.program,
        "means": contestant.means,
        "weights": contestant.weights,
        "device": str(contestant.device),
        "reason": contestant.reason,
        "peak_without_loading": forget_peak(contestant.device),
    }


def serve(contestant: "Contestant", measure: str, prompt: list[int] = (), most_gaps: int = 0) -> dict:
    """What there is to `measure`: "speed", "lead" (of the token after the prompt), "perplexity"; or "facts"."""
    if measure == "speed":
        return speed(contestant, prompt, most_gaps)
    if measure == "facts":
        return contestant.facts()
    return {measure: contestant.lead(prompt) if measure == "lead" else contestant.perplexity()}


def speed(contestant: "Contestant", prompt: list[int], most_gaps: int) -> dict:
    """Write on after `prompt`, and say when each token arrived."""
    from kvcourse.bench.memory import peak_memory

    gaps = min(most_gaps, contestant.most_gaps(len(prompt)))
    # While others had their turn, threads fell asleep and caches were filled anew. A GPU moreover loads its kernels at
    # the first text of a length; there a whole text is cheap.
    warm_up = (prompt, gaps + 1) if contestant.device.type == "cuda" else (prompt[:1], 4)
    contestant.generate(*warm_up)
    made = without_compiling(contestant, prompt, gaps + 1)
    return {
        "tokens": made.ids,
        "arrivals": made.arrivals,
        "step_bytes": contestant.step_bytes(len(prompt)),
        "peak_bytes": peak_memory(contestant.device),
        "compilations": contestant.compilations,
        "compile_seconds": contestant.compile_seconds,
    }


def without_compiling(contestant: "Contestant", prompt: list[int], new_tokens: int) -> "Generation":
    """What `generate` gives in a run in which nothing was compiled: one that does was part of the warming up."""
    for _ in range(TRIES):
        before = contestant.compilations
        made = contestant.generate(prompt, new_tokens)
        if contestant.compilations == before:
            return made
    raise RuntimeError(f"it compiled something in each of {TRIES} runs of the same text, so nothing could be timed")


def short(error: Exception) -> str:
    """The first line of what an exception says, with its kind unless it was raised to be read."""
    said = str(error).strip().split("\n")[0]
    if type(error) in (ValueError, RuntimeError, FileNotFoundError) and said:
        return said
    return f"{type(error).__name__}: {said}".rstrip(": ")


if __name__ == "__main__":
    main(*sys.argv[1:])
