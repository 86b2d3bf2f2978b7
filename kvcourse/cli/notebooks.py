"""For authors: build the learner's and the worked notebooks from notebooks/src, the only place where they are edited,
and the glossary and the bibliography from data/.
A learner needs neither this nor --check."""

import sys

HELP = "for authors: build the notebooks from their sources, or check that they are built"


def add_arguments(parser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="notebooks, such as 02 or 02_kv_cache (default: all)")
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a notebook is not up to date")
    parser.add_argument("--force", action="store_true", help="replace notebooks that somebody has worked in, too")
    parser.add_argument("--no-execute", action="store_true", help="leave the worked notebooks without outputs")


def main(arguments) -> int:
    from kvcourse.notebooks.build import build, drift
    from kvcourse.paths import course_folder

    course = course_folder()
    if arguments.check and arguments.no_execute:
        raise ValueError("--check builds nothing, so --no-execute has no meaning with it: give one of them")
    if not (course / "notebooks" / "src").is_dir():  # a learner's copy
        raise FileNotFoundError(f"no sources in {course}: notebooks are built and checked where the course is written")
    if not arguments.check:
        for path in build(course, arguments.names, run=not arguments.no_execute, force=arguments.force):
            print(path.relative_to(course))
        return 0
    differences = drift(course, arguments.names)
    for difference in differences:
        print(f"kvcourse: {difference}", file=sys.stderr)
    if differences:
        print(
            "kvcourse: a notebook that you took the course in differs: that is as it should be. "
            "After editing a source, `kvcourse notebooks` builds it again.",
            file=sys.stderr,
        )
    return int(bool(differences))
