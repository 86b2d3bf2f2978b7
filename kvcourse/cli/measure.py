"""Measure how good the course's small models are: perplexity of stories they have not read, recall by
distance, and how many of the sentences they write are right."""

from pathlib import Path

HELP = "measure perplexity, recall and sentences of the course's small models"
TEXTS = 40  # that each model writes


def add_arguments(parser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="tiny-mha, tiny-gqa, ... (default: all four)")
    parser.add_argument("--models", type=Path, metavar="DIR", help="measure DIR/NAME (default: the course's models)")
    parser.add_argument("--questions", type=int, default=200, metavar="N", help="asked at each distance (default: 200)")


def main(arguments) -> int:
    from kvcourse.cli.bench import show
    from kvcourse.cli.train import pick
    from kvcourse.lm import find_model, load_model
    from kvcourse.require import require_whole
    from kvcourse.training import recipe as recipes
    from kvcourse.training.report import measure, text

    picked = [name for given in arguments.names or ["all"] for name in pick(given, [*recipes.VARIANTS])]
    names = list(dict.fromkeys(picked))  # each once
    questions = require_whole("--questions", arguments.questions)
    folders = [find_model(name if arguments.models is None else arguments.models / name) for name in names]
    lms = [load_model(folder, dtype="float32") for folder in folders]
    other = next((lm.name for lm in lms if lm.tokenizer.tokens != lms[0].tokenizer.tokens), None)
    if other:
        raise ValueError(f"{other} has another tokenizer than {lms[0].name}: measure them one by one.")
    rows = {split: held_out_rows(recipes, folders[0], split) for split in ("validation", "test")}
    show(text([measure(lm, rows, questions, texts=TEXTS) for lm in lms]))
    return 0


def held_out_rows(recipes, folder: Path, split: str):
    """Token ids `(N, T + 1)` of the recipe's rows of a split, written with the tokenizer in `folder`."""
    import torch
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return torch.cat([batch.tokens for batch in recipes.held_out(recipes.Recipe(), tokenizer, split)])
