"""Fetch the chat model once; from then on the course needs no network. The other models come with the course."""

import signal
import sys

from kvcourse.cli.doctor import MODEL
from kvcourse.weights.shipped import SHIPPED

HELP = "download the chat model of the course (once)"


def add_arguments(parser) -> None:
    text = f"{MODEL}, the chat model (default); {', '.join(SHIPPED)} come with the course"
    parser.add_argument("name", metavar="NAME", nargs="?", default=MODEL, help=text)


def main(arguments) -> int:
    from kvcourse.weights.fetch import fetch

    obey_sigterm()
    path = fetch(arguments.name)
    if path.is_dir():
        print(f"{arguments.name} comes with the course: it is at {path}")
    else:
        print(f"{arguments.name} is at {path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


def obey_sigterm() -> None:
    """End like after Ctrl-C when another program asks for it, so that the pip or JupyterLab started here ends too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
