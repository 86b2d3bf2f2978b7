"""Make the course's own small models again, from nothing: stories, tokenizer, training, the folder that is shipped."""

import sys
from pathlib import Path

HELP = "train the course's small models again (about 25 minutes each on two cores)"


def add_arguments(parser) -> None:
    parser.add_argument("name", metavar="NAME", help="tiny-mha, tiny-gqa, tiny-mqa, tiny-window, or all of them: all")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("trained"),
        metavar="DIR",
        help="a model goes to DIR/NAME (default: trained)",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="steps to train, to try something out (default: recipe)")
    parser.add_argument("--seed", type=int, metavar="N", help="another start and other stories (default: 0)")
    parser.add_argument("--device", metavar="DEVICE", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--threads", type=int, metavar="N", help="how many CPU cores to use (default: all)")
    parser.add_argument("--restart", action="store_true", help="begin again, and replace the model that is there")
    parser.epilog = (
        "Ctrl-C stops after the step being computed; the same command goes on from there. A model that is already in "
        "DIR, trained in the same way, is left alone. `kvcourse measure --models DIR` tells how good they are."
    )


def main(arguments) -> int:
    import torch

    from kvcourse.device import resolve
    from kvcourse.require import require_whole
    from kvcourse.training import recipe as recipes
    from kvcourse.training.files import usable
    from kvcourse.training.provenance import commit

    names = pick(arguments.name, list(recipes.VARIANTS))
    given = {}
    if arguments.steps is not None:
        given["steps"] = require_whole("--steps", arguments.steps)
    if arguments.seed is not None:
        given["seed"] = require_whole("--seed", arguments.seed, least=0)
    recipe = recipes.Recipe(**given)
    device, _ = resolve(arguments.device)
    if device.type == "meta":
        raise ValueError('--device meta has shapes without numbers, so nothing can be trained there: use "cpu".')
    if arguments.threads is not None:
        torch.set_num_threads(require_whole("--threads", arguments.threads))
    folders = [usable(arguments.folder / name) for name in names]
    options = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    source = commit()
    say("Making the tokenizer and the rows that are held out ...")
    tokenizer = recipes.train_tokenizer_of(recipe)
    data = Data(recipes, recipe, tokenizer)
    for name, folder in zip(names, folders, strict=True):
        produce(data, name, folder, device, arguments.restart, ["kvcourse", "train", name, *options], source)
    return 0


class Data:
    """What is the same for every variant: the recipe, its tokenizer, what each step reads, and the rows held out."""

    def __init__(self, recipes, recipe, tokenizer):
        self.recipes, self.recipe, self.tokenizer = recipes, recipe, tokenizer
        self.validation = recipes.held_out(recipe, tokenizer, "validation", rows=32)  # often measured, so few

    def batch_at(self, step: int):
        return self.recipes.batch_at(self.recipe, self.tokenizer, step)


def produce(data: Data, name: str, folder: Path, device, restart: bool, command: list[str], source: dict) -> None:
    """Train one model and write its folder, unless it is there. Raises what `train` and `export` raise."""
    from kvcourse.training.checkpoint import CHECKPOINT
    from kvcourse.training.export import PROVENANCE, export, read_provenance
    from kvcourse.training.provenance import make_provenance
    from kvcourse.training.resume import compare, make_plan
    from kvcourse.training.trainer import Stopped, train

    plan = make_plan(data.recipe, name, data.batch_at(0).tokens)
    checkpoint = folder / CHECKPOINT
    if not restart and not checkpoint.exists() and (folder / PROVENANCE).exists():
        compare(folder / PROVENANCE, read_provenance(folder), plan)
        say(f"{name} is in {folder} already, trained in this way; --restart would train it again.")
        return
    if not restart and checkpoint.exists():
        say(f"Going on with {name} from {checkpoint}.")
    model = data.recipes.new_model(data.recipe, name, device)
    try:
        history = train(model, data.recipe, name, data.batch_at, data.validation, folder, resume=not restart)
    except Stopped as stopped:
        say(f"\n{stopped} The same command{' without --restart' * restart} goes on from there.")
        raise
    provenance = make_provenance(plan, history, device, command, source)
    export(model, data.tokenizer, folder, provenance, history.points)
    checkpoint.unlink()  # what is left is what is shipped
    print(
        f"{name} is in {folder}: validation loss {provenance['validation_loss']:.4f}, {provenance['minutes']} minutes"
    )


def pick(name: str, variants: list[str]) -> list[str]:
    """The variants that `name` asks for. Raises `ValueError` with near matches."""
    import difflib

    if name == "all":
        return variants
    if name in variants:
        return [name]
    near = difflib.get_close_matches(name.lower(), variants, cutoff=0.4)
    meant = f" Did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(f"There is no recipe for {name!r}.{meant} Give one of {', '.join(variants)}, or all.")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
