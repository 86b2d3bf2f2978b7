"""What the first cell of a notebook says where the course's own small model takes the place of the chat model."""

import textwrap

from kvcourse.entry import WIDTH
from kvcourse.text_files import read_object
from kvcourse.weights.fetch import stand_in
from kvcourse.weights.shipped import shipped_folder


def announce_stand_in(name: str = "smollm2-135m") -> None:
    """Print which model runs in place of `name`, why, and what that changes; nothing where it is `name` itself."""
    used = stand_in(name)
    if used == name:
        return
    config = read_object(shipped_folder(used) / "config.json")
    text = (
        f"KVCOURSE_OFFLINE is set and {name} is not on this computer, so this notebook runs on {used}. It is a small "
        f"model that travels with the course, trained on simple stories with a vocabulary of {config['vocab_size']:,} "
        "tokens. It is no chat model: where it is asked something, it goes on with the text. It reads at most "
        f"{config['max_position_embeddings']:,} tokens, so where the text names more, the cells use less. Your numbers "
        "and some verdicts will differ from those in the solutions."
    )
    print(textwrap.fill(text, WIDTH))
