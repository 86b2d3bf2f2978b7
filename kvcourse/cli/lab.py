"""Check what the course needs, fetch the model if it is not here yet, and open JupyterLab on the first notebook."""

import shlex
import subprocess
import sys
from pathlib import Path

HELP = "check, fetch the model, and open the course in JupyterLab"


def add_arguments(parser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="print the command instead of starting JupyterLab")
    parser.epilog = "All other arguments go to JupyterLab, for example --no-browser or --port 8890."


def main(arguments) -> int:
    from kvcourse.cli.doctor import examine
    from kvcourse.cli.fetch import obey_sigterm
    from kvcourse.paths import course_folder

    folder = course_folder() / "notebooks"
    first = folder / "00_start_here.ipynb"
    if not first.is_file():
        raise FileNotFoundError(f"{first} is missing: run `kvcourse notebooks` to build the notebooks")
    for line in examine():
        if line.status != "ok" and line.topic != "model":
            print(line)
    command = [sys.executable, "-m", "jupyterlab", str(first), f"--ServerApp.root_dir={folder}", *arguments.rest]
    if arguments.dry_run:
        print(shlex.join(command))
        return 0
    obey_sigterm()
    _fetch_model(folder)
    return _run(command)


def _fetch_model(folder: Path) -> None:
    """Fetch the model if it is absent. Without it the other notebooks still work, so failing is only reported."""
    from kvcourse.cli.doctor import MODEL
    from kvcourse.weights.fetch import fetch, stand_in

    if stand_in(MODEL) != MODEL:
        print(
            f"KVCOURSE_OFFLINE is set: the notebooks run on {stand_in(MODEL)}, which comes with the course.", flush=True
        )
        return
    try:
        fetch(MODEL)
    except RuntimeError as error:
        needing = [path.stem for path in sorted(folder.glob("*.ipynb")) if MODEL.encode() in path.read_bytes()]
        print(f"kvcourse: {error}", file=sys.stderr)
        print("Opening the course all the same. These notebooks will not run:", ", ".join(needing) or "none")
        print("KVCOURSE_OFFLINE=1 kvcourse lab runs them on a small model that comes with the course.", flush=True)


def _run(command: list[str]) -> int:
    process = subprocess.Popen(command)
    try:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                pass  # JupyterLab got the Ctrl-C as well, and asks whether to stop
    finally:
        process.terminate()  # nothing is left to end unless this program is being ended itself
