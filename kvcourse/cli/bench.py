"""Measure the course's ways of generating text on this machine: time to the first token, tokens per second, memory."""

import sys
from pathlib import Path

from kvcourse.cli.doctor import MODEL
from kvcourse.weights.shipped import SHIPPED

HELP = "measure naive and cached generation here, beside other programs"


def add_arguments(parser) -> None:
    text = f"what kv.load_model takes: {', '.join(SHIPPED)}, a folder, a .gguf file, a hub id (default: {MODEL})"
    parser.add_argument("model", metavar="MODEL", nargs="?", default=MODEL, help=text)
    parser.add_argument("--peers", action="store_true", help="measure transformers too, with the same weights")
    parser.add_argument("--rounds", type=int, metavar="N", help="how often to measure each row (default: 3)")
    parser.add_argument("--quick", action="store_true", help="one round and few tokens: rough numbers, sooner")
    parser.add_argument("--output", type=Path, metavar="DIR", help="save bench.json and bench.png in this folder")
    parser.epilog = (
        "Every row holds the model in a process of its own: there must be memory for as many copies. Nothing "
        "is written without --output. The exit code is 1 when a row could not be measured or wrote other tokens."
    )


def main(arguments) -> int:
    from kvcourse.bench.contestants import COURSE, PEERS
    from kvcourse.bench.files import save, writable
    from kvcourse.bench.race import Race, check_loads
    from kvcourse.bench.report import make_report, text
    from kvcourse.cli.fetch import obey_sigterm
    from kvcourse.lm import find_model
    from kvcourse.require import require_whole
    from kvcourse.roof import measure_ceilings
    from kvcourse.weights.fetch import stand_in

    default = 1 if arguments.quick else 3
    rounds = require_whole("--rounds", default if arguments.rounds is None else arguments.rounds)
    folder = writable(arguments.output) if arguments.output else None
    obey_sigterm()
    find_model(arguments.model)  # fetched if need be, before anybody waits
    model = stand_in(arguments.model)  # the table must name the model that was measured
    print(f"Loading {model} ...", file=sys.stderr)
    check_loads(model)
    print("Measuring how fast this machine reads memory ...", file=sys.stderr)
    before = measure_ceilings()
    race = Race(COURSE + (PEERS if arguments.peers else []), model, rounds, 4 if arguments.quick else 16)
    race.run()
    ceilings = max(before, measure_ceilings(), key=lambda ceilings: ceilings.bytes_per_second)
    report = make_report(race, ceilings, arguments.quick)
    saved = []
    try:
        saved = save(report, folder) if folder else []
    finally:  # the numbers are not lost when a disk is full, nor the files when nobody reads what is printed
        show("\n".join([text(report), *saved]))
    return int(any(row["error"] for row in report["rows"]) or bool(report["differences"]))


def show(text: str) -> None:
    """Print, with an escape for each letter that the terminal's encoding lacks: a model's name may have any."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))
