"""For whoever teaches the course: prepare the computers of a room, hand out what learners need, and see afterwards what
the room did. Nothing is sent anywhere."""

import json
from pathlib import Path

HELP = "for instructors: check seats, make a stick for rooms without wifi, collect results, make slides"


def add_arguments(parser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name, main, text):
        command = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.set_defaults(main=main)
        return command.add_argument

    add = action("check", check, "see in under a minute whether this computer is ready for a class")
    add("--json", action="store_true", help="print it for `collect`: send it into a file with the seat's name")

    add = action("bundle", bundle, "write a stick from which computers without a network install the course")
    add("folder", metavar="DIR", type=Path, help="the stick; one that was begun is gone on with")
    text = "the kind of seat: linux, macos, windows, or with the machine, as linux-aarch64 (default: this computer's)"
    add("--platform", metavar="SYSTEM", help=text)
    add("--python-version", metavar="X.Y", help="the Python of the seats (default: this one's)")
    add("--extra", metavar="NAME", action="append", default=[], help="also what an extra of kvcourse needs, as peers")
    text = (
        "where PyTorch for Linux comes from (default: PyTorch's own index of builds for CPUs); '' for pip's usual one"
    )
    add("--torch-index", metavar="URL", help=text)
    add("--slides", action="store_true", help="also the slides of all notebooks")

    add = action("copy", copy, "write the course without its solutions into a new folder, to be handed out")
    add("folder", metavar="DIR", type=Path, help="a folder that is empty or not there yet")

    add = action("hand-in", hand_in, "for learners: write guesses, measurements and progress into one file")
    add("file", metavar="FILE", type=Path, help="a new file, such as anna.json")

    add = action("collect", collect, "show progress, and guesses beside measurements, of a whole room")
    add("folder", metavar="DIR", type=Path, help="holds what learners handed in, or `check --json` of their seats")
    add("--notebook", metavar="NN", default="", help="only this notebook, such as 02")
    add("--output", metavar="DIR", type=Path, help="save tables (CSV) and a picture for each notebook in this folder")

    add = action("slides", slides, "make slides of the worked notebooks, which open without a network")
    add("names", metavar="NAME", nargs="*", help="notebooks, such as 02 or 02_kv_cache (default: all)")
    add("--output", metavar="DIR", type=Path, default=Path("slides"), help="where to (default: slides)")

    add = action("minutes", minutes, "print the minutes that each section takes a class")
    add("names", metavar="NAME", nargs="*", help="notebooks, such as 02 or 02_kv_cache (default: all)")
    add("--record", action="store_true", help="run the worked notebooks, and store how long their sections run here")

    add = action("footprint", footprint, "measure what one learner takes on a shared server: memory and processor")
    add("names", metavar="NAME", nargs="*", help="notebooks, such as 02 or 02_kv_cache (default: all)")


def main(arguments) -> int:
    from kvcourse.paths import course_folder

    needs_course = arguments.main not in (hand_in, collect)
    return arguments.main(arguments, course_folder() if needs_course else None)


def check(arguments, course: Path) -> int:
    from kvcourse.workshop.check import as_json, check, last_line, ready

    lines = check(course)
    if arguments.json:
        print(json.dumps(as_json(lines), indent=1))
    else:
        print(*lines, last_line(lines), sep="\n")
    return int(not ready(lines))


def bundle(arguments, course: Path) -> int:
    from kvcourse.cli.fetch import obey_sigterm
    from kvcourse.workshop.bundle import bundle
    from kvcourse.workshop.target import target
    from kvcourse.workshop.wheels import CPU_TORCH

    obey_sigterm()
    seat = target(arguments.platform, arguments.python_version)
    index = CPU_TORCH if arguments.torch_index is None else arguments.torch_index
    sizes = bundle(course, arguments.folder, seat, arguments.extra, index, arguments.slides)
    for name, size in [*sizes.items(), ("in all", sum(sizes.values()))]:
        print(f"{size / 1e6:>9,.1f} MB  {name}")
    print(
        f"The stick is complete. Copy {arguments.folder} as a whole; its README.txt says the two lines that install it."
    )
    return 0


def copy(arguments, course: Path) -> int:
    from kvcourse.workshop.learner_copy import copy

    print(f"The learner's copy is in {copy(course, arguments.folder)}.")
    return 0


def hand_in(arguments, course: None) -> int:
    from kvcourse.workshop.collect import hand_in

    print(f"Your guesses, measurements and progress are in {hand_in(arguments.file)}: hand this file in.")
    return 0


def collect(arguments, course: None) -> int:
    from kvcourse.model_folder import usable
    from kvcourse.workshop import collect as room

    found = room.collect(arguments.folder)
    output = arguments.output and usable(arguments.output, "tables and pictures are saved")
    if found.seats:
        print(room.seats_table(found.seats), end="\n\n")
    if found.learners:
        print(room.progress_table(found.learners, arguments.notebook), end="\n\n")
        print(room.guesses_table(found.learners, arguments.notebook))
    if output:
        print()
        for path in room.save(found, output, arguments.notebook):
            print(path)
    for sentence in room.doubles(found.learners):
        print(f"look: {sentence}")
    for reason in found.refused:
        print(f"not read: {reason}")
    return int(bool(found.refused))


def slides(arguments, course: Path) -> int:
    from kvcourse.workshop.slides import slides

    for path in slides(course, arguments.output, arguments.names):
        print(path)
    return 0


def minutes(arguments, course: Path) -> int:
    from kvcourse.workshop.minutes import record, table

    if arguments.record:
        print(record(course, arguments.names))
    print(table(course, arguments.names))
    return 0


def footprint(arguments, course: Path) -> int:
    from kvcourse.notebooks.build import pick
    from kvcourse.workshop.footprint import HEAD, footprint
    from kvcourse.workshop.learner_copy import learner_notebooks

    print(HEAD, flush=True)
    found = []
    for path in pick(learner_notebooks(course), arguments.names):
        found.append(footprint(path))
        print(found[-1], flush=True)
    return int(any(each.error for each in found))
