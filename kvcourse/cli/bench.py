"""Measure ways of generating text on this machine: time to the first token, tokens per second, memory, quality.

With `--serving`: the engine that serves many requests at once.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from kvcourse.cli.doctor import MODEL
from kvcourse.weights.shipped import SHIPPED

HELP = "measure the course's ways of generating here, or its serving engine, beside other programs"
WEIGHTS = ("float32", "bfloat16", "int8", "int4")
DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser) -> None:
    text = f"what kv.load_model takes: {', '.join(SHIPPED)}, a folder, a .gguf file, a hub id (default: {MODEL})"
    parser.add_argument("model", metavar="MODEL", nargs="?", default=MODEL, help=text)
    text = "measure transformers and llama.cpp too, with the same weights"
    parser.add_argument("--peers", action="store_true", help=text)
    parser.add_argument("--vllm", metavar="PYTHON", help="a Python that has vLLM, to measure it too")
    text = 'measure these rows alone, by their titles, such as "dense,int8,paged batch"'
    parser.add_argument("--only", metavar="ROW,ROW", help=text)
    text = "measure the serving engine instead: batches, where a step's time goes, a trace of requests, its scheduler"
    parser.add_argument("--serving", action="store_true", help=text)
    text = "with --serving: compile the engine's model, its weights in these numbers (default: a plain model)"
    parser.add_argument("--weights", choices=WEIGHTS, help=text)
    text = "with --serving: what the engine computes in, its cache too (default: float32 on a CPU)"
    parser.add_argument("--dtype", choices=DTYPES, help=text)
    parser.add_argument("--rounds", type=int, metavar="N", help="how often to measure each row (default: 3)")
    parser.add_argument("--quick", action="store_true", help="one round and few tokens: rough numbers, sooner")
    text = "save bench.json and bench.png in this folder (with --serving bench.json alone)"
    parser.add_argument("--output", type=Path, metavar="DIR", help=text)
    parser.epilog = (
        "Every row holds the model in a process of its own: there must be memory for as many copies. Nothing "
        "is written without --output. The exit code is 1 when a row could not be measured, or wrote other tokens "
        "though it computes with the same numbers. With --serving the engine and the batch beside it share one process "
        "and one copy."
    )


def main(arguments) -> int:
    if arguments.serving and arguments.peers:
        raise ValueError("--peers belongs to the other table: leave out --serving, or give --vllm PYTHON instead.")
    if arguments.serving and arguments.only is not None:
        raise ValueError("--only chooses rows of the other table: leave out --serving, or --only.")
    if arguments.weights is not None and not arguments.serving:
        raise ValueError("--weights belongs to --serving; the other table has a row for each: choose them with --only.")
    if arguments.dtype is not None and not arguments.serving:
        raise ValueError("--dtype belongs to --serving: leave it out; the other table computes in the machine's own.")
    return serving(arguments) if arguments.serving else single_texts(arguments)


def single_texts(arguments) -> int:
    """One text at a time: the course's ways of generating, and those of others."""
    from kvcourse.bench.files import save, writable
    from kvcourse.bench.race import Race, learn_facts
    from kvcourse.bench.report import make_report, text
    from kvcourse.bench.rows import COURSE, PEERS, choose
    from kvcourse.bench.vllm_row import TITLES, require_vllm, vllm_texts
    from kvcourse.cli.fetch import obey_sigterm
    from kvcourse.lm import find_model
    from kvcourse.roof import measure_ceilings
    from kvcourse.weights.fetch import stand_in

    rounds = rounds_of(arguments)
    rows = COURSE + (PEERS if arguments.peers else [])
    vllm = [] if arguments.vllm is None else TITLES
    titles = choose([*(row.title for row in rows), *vllm], arguments.only)
    if vllm:
        require_vllm(arguments.vllm)
    folder = writable(arguments.output) if arguments.output else None
    obey_sigterm()
    find_model(arguments.model)  # fetched if need be, before anybody waits
    model = stand_in(arguments.model)  # the table must name the model that was measured
    tell(f"Loading {model} ...")
    facts = learn_facts(model)
    with ExitStack() as stack:
        if not set(titles).isdisjoint(vllm):
            rows = rows + stack.enter_context(vllm_texts(arguments.vllm, model))
        tell("Measuring how fast this machine reads memory ...")
        before = measure_ceilings()
        chosen = [row for row in rows if row.title in titles]
        race = Race(chosen, model, facts, rounds, 4 if arguments.quick else 16)
        race.run()
    ceilings = max(before, measure_ceilings(), key=lambda ceilings: ceilings.bytes_per_second)
    report = make_report(race, ceilings, arguments.quick)
    keep(text(report), lambda: save(report, folder) if folder else [])
    wrong = any(difference["wrong"] for difference in report["differences"])
    return int(wrong or any(row["error"] for row in report["rows"]))


def serving(arguments) -> int:
    """Many requests at once: the engine, beside a static batch and vLLM."""
    from kvcourse.bench.files import save, writable
    from kvcourse.bench.serving import measure_serving
    from kvcourse.bench.serving_report import text
    from kvcourse.bench.vllm_row import require_vllm
    from kvcourse.cli.fetch import obey_sigterm
    from kvcourse.lm import find_model
    from kvcourse.weights.fetch import stand_in

    rounds, files = rounds_of(arguments), ["bench.json"]
    folder = writable(arguments.output, files) if arguments.output else None
    if arguments.vllm is not None:
        require_vllm(arguments.vllm)
    obey_sigterm()
    find_model(arguments.model)
    model = stand_in(arguments.model)
    report = measure_serving(model, rounds, arguments.quick, arguments.vllm, arguments.weights, arguments.dtype)
    keep(text(report), lambda: save(report, folder, files) if folder else [])
    wrong = any(difference["title"] == "static" for difference in report["differences"])
    exact = arguments.weights in (None, "float32") and arguments.dtype in (
        None,
        "float32",
    )  # else near ties may fall either way
    return int((wrong and exact) or any(row["error"] for row in report["rows"]))


def tell(what: str) -> None:
    print(what, file=sys.stderr)


def rounds_of(arguments) -> int:
    from kvcourse.require import require_whole

    default = 1 if arguments.quick else 3
    return require_whole("--rounds", default if arguments.rounds is None else arguments.rounds)


def keep(text: str, save: Callable[[], list[str]]) -> None:
    """Save, and print `text` with what was saved. The numbers are not lost when a disk is full, nor the files when
    nobody reads what is printed."""
    saved = []
    try:
        saved = save()
    finally:
        show("\n".join([text, *saved]))


def show(text: str) -> None:
    """Print, with an escape for each letter that the terminal's encoding lacks: a model's name may have any."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))
