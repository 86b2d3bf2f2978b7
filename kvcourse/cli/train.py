"""Make the course's own small models again, from nothing: stories, tokenizer, training, the folder that is shipped."""

import os
import sys
from contextlib import ExitStack
from pathlib import Path

HELP = "train the course's small models again (about 20 minutes each on two cores)"
MOST_STEPS = 1_000_000  # days on a GPU
MOST_SEED = 2**32 - 1


def add_arguments(parser) -> None:
    parser.add_argument("name", metavar="NAME", help="tiny-mha, tiny-gqa, tiny-mqa, tiny-window, or all of them: all")
    parser.add_argument(
        "--folder", default="trained", metavar="DIR", help="a model goes to DIR/NAME (default: trained)"
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
    from kvcourse.model_folder import hold, usable
    from kvcourse.training import recipe as recipes
    from kvcourse.training.provenance import origin

    names = pick(arguments.name, list(recipes.VARIANTS))
    changes = recipe_changes(arguments)
    recipe = recipes.Recipe(**changes)
    options = [text for name, value in changes.items() for text in (f"--{name}", str(value))]
    device = pick_device(arguments.device)
    set_threads(arguments.threads)
    if not arguments.folder:
        raise ValueError('--folder "" names no folder: give one, such as trained.')
    folders = [usable(Path(arguments.folder) / name) for name in names]
    computer = origin(device)
    with ExitStack() as held:  # whatever can be refused is, of all models before the first is trained
        for folder in folders:
            held.enter_context(hold(folder))
        runs = [Run(name, folder, arguments.restart) for name, folder in zip(names, folders, strict=True)]
        for run in runs:
            run.follow(recipe)
        say("Making the tokenizer and the rows that are held out ...")
        data = Data(recipes, recipe)
        tokens = data.batch_at(0).tokens
        for run in runs:
            run.follow(recipe, tokens)
        for run in runs:
            produce(run, data, device, computer, options)
    return 0


class Run:
    """A model that is asked for: its name and folder, what an earlier run left there, and what is planned."""

    def __init__(self, name: str, folder: Path, restart: bool):
        from kvcourse.training.resume import find_earlier

        self.name, self.folder, self.restart = name, folder, restart
        self.earlier = find_earlier(folder, restart)

    def follow(self, recipe, tokens=None) -> None:
        """Plan by the recipe. Raises `ValueError` when the earlier run was planned in another way."""
        from kvcourse.training.resume import compare, make_plan

        self.plan = make_plan(recipe, self.name, tokens)
        if self.earlier:
            compare(*self.earlier, self.plan)


class Data:
    """What is the same for every variant: the recipe, its tokenizer, what each step reads, and the rows held out."""

    def __init__(self, recipes, recipe):
        self.recipes, self.recipe = recipes, recipe
        self.tokenizer = recipes.train_tokenizer_of(recipe)
        self.validation = recipes.held_out(recipe, self.tokenizer, "validation", rows=32)  # often measured, so few

    def batch_at(self, step: int):
        return self.recipes.batch_at(self.recipe, self.tokenizer, step)


def produce(run: Run, data: Data, device, computer: dict, options: list[str]) -> None:
    """Train one model and write its folder, unless it is there. Raises what `train` and `export` raise."""
    from kvcourse.training.checkpoint import CHECKPOINT
    from kvcourse.training.export import export
    from kvcourse.training.provenance import make_provenance
    from kvcourse.training.trainer import Stopped, train

    checkpoint = run.folder / CHECKPOINT
    if run.earlier and run.earlier[0] != checkpoint:
        say(f"{run.name} is in {run.folder} already, trained in this way; --restart would train it again.")
        return
    if run.earlier:
        say(f"Going on with {run.name} from {checkpoint}.")
    model = data.recipes.new_model(data.recipe, run.name, device)
    try:
        history = train(
            model,
            data.recipe,
            run.name,
            data.batch_at,
            data.validation,
            run.folder,
            origin=computer,
            resume=not run.restart,
        )
    except Stopped as stopped:
        say(f"\n{stopped} The same command{f' for {run.name}, without --restart,' * run.restart} goes on from there.")
        raise
    provenance = make_provenance(run.plan, history, ["kvcourse", "train", run.name, *options])
    export(model, data.tokenizer, run.folder, provenance, history.points)
    checkpoint.unlink()  # what is left is what is shipped
    validation_loss, minutes = provenance["validation_loss"], provenance["minutes"]
    print(f"{run.name} is in {run.folder}: validation loss {validation_loss:.4f}, {minutes} minutes")


def pick(name: str, variants: list[str]) -> list[str]:
    """The variants that `name` asks for. Raises `ValueError` with near matches."""
    import difflib

    if name == "all":
        return variants
    if name in variants:
        return [name]
    near = difflib.get_close_matches(name.lower(), variants, cutoff=0.4)
    meant = f" Did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(f"The course has no model {name!r}.{meant} Give one of {', '.join(variants)}, or all.")


def recipe_changes(arguments) -> dict[str, int]:
    """What the options change in the recipe. Raises `ValueError` for a number out of range."""
    changes = {}
    if arguments.steps is not None:
        changes["steps"] = require_between("--steps", arguments.steps, 1, MOST_STEPS)
    if arguments.seed is not None:
        changes["seed"] = require_between("--seed", arguments.seed, 0, MOST_SEED)
    return changes


def pick_device(name: str | None):
    """A device that numbers are computed on. Raises `ValueError` for any other."""
    from kvcourse.device import resolve

    device, _ = resolve(name)
    if device.type == "meta":
        raise ValueError('--device meta has shapes without numbers, so nothing can be trained there: use "cpu".')
    if device.type == "cpu" and device.index:
        raise ValueError(f'--device {name}: all CPU cores are one device: use "cpu", and --threads for how many.')
    return device


def set_threads(threads: int | None) -> None:
    """Let PyTorch use so many threads. Raises `ValueError` for more than the machine can run at once."""
    import torch

    if threads is not None:
        cores = os.cpu_count() or 1
        torch.set_num_threads(
            require_between("--threads", threads, 1, cores, note=", the logical CPUs of this machine")
        )


def require_between(name: str, value: int, least: int, most: int, note: str = "") -> int:
    from kvcourse.require import require_whole

    if require_whole(name, value, least) > most:
        raise ValueError(f"{name}={value} must be at most {most}{note}.")
    return value


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
