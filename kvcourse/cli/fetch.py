"""Fetch the chat model once; from then on the course needs no network."""

import signal
import sys

HELP = "download the chat model of the course (once)"


def add_arguments(parser) -> None:
    pass


def main(arguments) -> int:
    from kvcourse.cli.doctor import MODEL
    from kvcourse.weights.fetch import fetch

    obey_sigterm()
    path = fetch(MODEL)
    print(f"{MODEL} is at {path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


def obey_sigterm() -> None:
    """End like after Ctrl-C when another program asks for it, so that the pip or JupyterLab started here ends too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
