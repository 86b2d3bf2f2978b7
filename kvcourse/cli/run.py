"""Run notebooks from top to bottom without opening them, and say how long each took. No notebook is changed."""

from pathlib import Path

HELP = "run notebooks without opening them, and print a table of times"


def add_arguments(parser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="notebooks, such as 02 or 02_kv_cache (default: all)")
    parser.add_argument("--solutions", action="store_true", help="run the worked notebooks")
    parser.add_argument("--timeout", type=int, metavar="S", help="seconds that one cell may take (default: no limit)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="save the executed notebooks in this folder")
    text = "for authors: add what was measured to data/expected, which tells learners which numbers are usual"
    parser.add_argument("--record", action="store_true", help=text)


def main(arguments) -> int:
    from kvcourse.model_folder import usable
    from kvcourse.notebooks.build import lesson_paths, pick, read, write
    from kvcourse.notebooks.execute import execute, scratch_results
    from kvcourse.paths import course_folder

    folder = course_folder() / "notebooks" / ("solutions" if arguments.solutions else "")
    paths = pick(lesson_paths(folder), arguments.names)
    if not paths:
        raise FileNotFoundError(f"no notebooks in {folder}: run `kvcourse notebooks` to build them")
    if arguments.timeout is not None and arguments.timeout <= 0:
        raise ValueError(f"--timeout must be above 0 seconds, not {arguments.timeout}")
    output = arguments.output and arguments.output.expanduser()
    if output and output.resolve() in [path.parent.resolve() for path in paths]:
        raise ValueError(f"--output {output} would replace the notebooks themselves: name another folder")
    if arguments.record:
        from kvcourse.expected.records import require_recordable

        require_recordable()

    notebooks = [read(path, as_version=4) for path in paths]
    if output:
        usable(output, "executed notebooks are saved")
    done = []
    with scratch_results() as env:
        for path, notebook in zip(paths, notebooks, strict=True):
            done.append(execute(notebook, folder, path.stem, env, arguments.timeout))
            if output:
                write(notebook, output / path.name)
        said = record(done, notebooks, env) if arguments.record else ""
    print(table(done))
    if said:
        print(said)
    return int(any(run.error for run in done))


def record(done, notebooks, env) -> str:
    """Add what the notebooks that ran to the end have measured to this machine's file, and say so."""
    from kvcourse.expected import records
    from kvcourse.notebooks.figures import measured_figures
    from kvcourse.weights.fetch import stand_in

    whole = {run.name: notebook for run, notebook in zip(done, notebooks, strict=True) if not run.error}
    figures = measured_figures(whole, env)
    left_out = "".join(f"; not those of {run.name}, which failed" for run in done if run.error)
    if not figures:
        return f"Nothing was measured, so nothing is recorded{left_out}."
    path = records.record(figures, stand_in("smollm2-135m"))
    return f"Figures recorded in {path}: {len(figures)}{left_out}."


def table(done) -> str:
    """One line a notebook: cells, seconds, the most memory its kernel took, and ok or the failing cell."""
    width = max(len("notebook"), *(len(run.name) for run in done))
    lines = [f"{'notebook':<{width}}  cells  seconds  peak memory"]
    for run in done:
        numbers = f"{run.cells:>5}  {run.seconds:>7.1f}  {run.peak_bytes / 1e9:>8.2f} GB"
        lines.append(f"{run.name:<{width}}  {numbers}  {run.error or 'ok'}")
    return "\n".join(lines)
