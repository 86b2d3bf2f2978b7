"""Measure a server from outside: time to first token, gaps between tokens, tokens per second, of any OpenAI-compatible
streaming endpoint (llama.cpp, vLLM, SGLang)."""

import json
import os
from pathlib import Path

HELP = "measure TTFT, ITL and tokens per second of an OpenAI-compatible server"
FILE = "meter.json"


def add_arguments(parser) -> None:
    parser.add_argument("url", metavar="URL", help="the base of the server, such as http://127.0.0.1:8080")
    add = parser.add_argument
    add(
        "--concurrency",
        type=int,
        metavar="N",
        help="users who each wait for an answer before they ask again (default: 1)",
    )
    add("--rate", type=float, metavar="R", help="instead: R requests a second, at random times, whoever waits")
    add("--requests", type=int, metavar="N", help="send so many at most (default: 32)")
    add("--seconds", type=float, default=60, metavar="S", help="send none after so many seconds (default: 60)")
    text = "tokens of a prompt: 256, or 128-512 (default: 256)"
    add("--prompt-tokens", type=lengths, metavar="N", help=text)
    text = "how many of them, at the front, are the same in all prompts (default: 0)"
    add("--shared-prefix", type=int, default=0, metavar="N", help=text)
    add("--new-tokens", type=int, default=64, metavar="N", help="tokens of an answer at most (default: 64)")
    add("--ignore-eos", action="store_true", help="ask for all of them (llama.cpp, vLLM and SGLang know how)")
    add("--model", metavar="NAME", help="the model to ask for (default: the only one there)")
    add("--chat", action="store_true", help="send chats, not texts to continue")
    text = "the key that the server asks for; other users see it there: better set KVCOURSE_API_KEY"
    add("--api-key", metavar="KEY", help=text)
    text = "seconds that the server may send nothing, and that requests may still take at the end (default: 60)"
    add("--timeout", type=float, default=60, metavar="S", help=text)
    text = "the same prompts and times again, which a server's prefix cache may know (default: new ones)"
    add("--seed", type=int, metavar="N", help=text)
    add("--extra", metavar="JSON", help="more fields of each request, such as '{\"return_token_ids\": true}'")
    add("--output", type=Path, metavar="DIR", help=f"save {FILE}, with every request, in this folder")
    parser.epilog = (
        "At most --requests are sent, and none after --seconds. Ctrl-C ends it sooner, with the figures so far. The "
        "exit code is 1 when a request failed, or none finished."
    )


def lengths(text: str) -> int | tuple[int, int]:
    """256, or (128, 512) of "128-512"."""
    numbers = [int(number) for number in text.split("-")]
    if len(numbers) > 2:
        raise ValueError("one number, or two")
    return numbers[0] if len(numbers) == 1 else tuple(numbers)


def main(arguments) -> int:
    from kvcourse.bench.files import writable
    from kvcourse.cli.bench import keep
    from kvcourse.endpoint.load import meter

    extra = parse_extra(arguments.extra)
    folder = writable(arguments.output, [FILE]) if arguments.output else None
    names = "concurrency rate requests seconds prompt_tokens shared_prefix new_tokens ignore_eos".split()
    names += "model chat api_key timeout seed".split()
    report = meter(arguments.url, extra=extra, **{name: getattr(arguments, name) for name in names})
    keep(str(report), lambda: [save(report, folder / FILE)] if folder else [])
    return 130 if report.interrupted else int(not report.ok)


def parse_extra(text: str | None) -> dict | None:
    if text is None:
        return None
    try:
        extra = json.loads(text)
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise ValueError(f"--extra {text} must be a JSON object, such as '{{\"return_token_ids\": true}}'.")
    return extra


def save(report, file: Path) -> str:
    done = "Replaced" if os.path.lexists(file) else "Written"
    file.write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")
    return f"{done}: {file}"
