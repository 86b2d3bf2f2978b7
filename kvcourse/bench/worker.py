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

    model = contestant.model
    gc.collect()
    return {
        "program": contestant.program,
        "means": contestant.means,
        "vocab_size": model.config.vocab_size,
        "max_seq_len": model.config.max_seq_len,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "peak_without_loading": forget_peak(model.device),
    }


def serve(contestant: "Contestant", prompt: list[int], most_gaps: int | None = None) -> dict:
    """Write on after `prompt` and say when each token arrived; without `most_gaps`, only how clear the choice was."""
    from kvcourse.bench.memory import peak_memory

    if most_gaps is None:
        return {"lead": contestant.lead(prompt)}
    gaps = min(most_gaps, contestant.most_gaps(len(prompt)))
    # While others had their turn, threads fell asleep and caches were filled anew. A GPU moreover loads its kernels at
    # the first text of a length; there a whole prompt is cheap.
    contestant.generate(prompt if contestant.model.device.type == "cuda" else prompt[:1], 4)
    made = contestant.generate(prompt, gaps + 1)
    return {
        "tokens": made.ids,
        "arrivals": made.arrivals,
        "step_bytes": contestant.step_bytes(len(prompt)),
        "peak_bytes": peak_memory(contestant.model.device),
    }


def short(error: Exception) -> str:
    """The first line of what an exception says, with its kind unless it was raised to be read."""
    said = str(error).strip().split("\n")[0]
    if type(error) in (ValueError, RuntimeError, FileNotFoundError) and said:
        return said
    return f"{type(error).__name__}: {said}".rstrip(": ")


if __name__ == "__main__":
    main(*sys.argv[1:])
