"""The command `kvcourse`: reads the command line, runs one command, turns errors into one line each."""

import argparse
import os
import sys
from pathlib import Path

from kvcourse import __version__
from kvcourse.cli import bench, doctor, fetch, lab, measure, meter, notebooks, run, site, train, workshop

# Each module has `HELP`, `add_arguments(parser)` and `main(arguments) -> exit code`.
COMMANDS = {"doctor": doctor, "fetch": fetch, "lab": lab, "run": run, "bench": bench, "meter": meter}
COMMANDS |= {"train": train, "measure": measure, "notebooks": notebooks, "site": site, "workshop": workshop}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvcourse", description="Why LLM inference is fast: the course's own tools.")
    parser.add_argument("--version", action="version", version=f"kvcourse {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_arguments(command)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 wrong usage, 130 stopped by Ctrl-C."""
    parser = make_parser()
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command is None and not rest:
        parser.print_help()
        return 0
    if rest and arguments.command != "lab":
        parser.error(f"unknown argument: {' '.join(rest)}")
    arguments.rest = rest
    try:
        code = COMMANDS[arguments.command].main(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who read the output, such as `head`, has gone; nothing more is to be written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, RuntimeError, OSError) as error:
        if not isinstance(error, OSError) and not _raised_by_kvcourse(error):
            raise
        print(f"kvcourse: {error}", file=sys.stderr)
        return 1


def _raised_by_kvcourse(error: Exception) -> bool:
    """Whether the package raised this itself, as a message to the reader, and not a library deep below."""
    trace = error.__traceback__
    while trace.tb_next:
        trace = trace.tb_next
    return Path(trace.tb_frame.f_code.co_filename).is_relative_to(Path(__file__).parent.parent)


if __name__ == "__main__":
    sys.exit(main())
