"""Fetch the chat model once; from then on the course needs no network."""

HELP = "download the chat model of the course (once)"


def add_arguments(parser) -> None:
    pass


def main(arguments) -> int:
    from kvcourse.cli.doctor import MODEL
    from kvcourse.weights.fetch import fetch

    path = fetch(MODEL)
    print(f"{MODEL} is at {path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0
