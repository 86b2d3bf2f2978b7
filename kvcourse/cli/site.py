"""Build the course's web pages: the worked notebooks as they are stored, glossary, instructor's kit, with search.

Nothing is executed. For authors and instructors; needs the extra "site": pip install -c constraints.txt -e ".[site]"
"""

from pathlib import Path

HELP = "build static web pages of the worked notebooks"
DEFAULT = "build/site"


def add_arguments(parser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="lessons, such as 02 or 02_kv_cache (default: all)")
    text = f"the folder to write, new, empty, or a former site, which is replaced (default: {DEFAULT} in the course)"
    parser.add_argument("--output", type=Path, metavar="DIR", help=text)


def main(arguments) -> int:
    from kvcourse.paths import course_folder
    from kvcourse.site.build import build

    course = course_folder()
    output = arguments.output.expanduser() if arguments.output else course / DEFAULT
    pages = build(course, output, arguments.names)
    print(f"{len(pages)} pages: open {output / 'index.html'}")
    return 0
