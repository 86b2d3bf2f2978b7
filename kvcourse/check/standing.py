"""How the learner stands: what is done of each notebook, and how many minutes the rest takes."""

from kvcourse import results
from kvcourse.check.catalog import Effort, exercises


def progress(notebook: str = "") -> None:
    """Print how each exercise stands, of the course or of one notebook: `kv.check.progress("01")`.

    It is read from a file (see `results`), so it survives a restart. Raises `ValueError` when there is no such
    notebook.
    """
    chosen, stands = exercises(notebook), results.progress()
    for name, part in chosen.items():
        print(f"{name}: {_summary(part, stands)}")
        for exercise, (difficulty, minutes) in part.items():
            circles = "●" * difficulty + "○" * (3 - difficulty)
            print(f"  {circles} {minutes:>2} min  {exercise:<20} {stands.get(exercise, 'not attempted')}")
    if len(chosen) > 1:
        print(f"In all: {_summary(_flat(chosen), stands)}")


def reset(notebook: str = "") -> None:
    """Forget how the exercises of a notebook stand, or all of them: `kv.check.reset("02")`. Guesses and measurements
    stay.

    Raises `ValueError` when there is no such notebook.
    """
    names = _flat(exercises(notebook))
    forgotten = results.forget_exercises(names)
    print(f"Forgotten: how {forgotten} of {len(names)} exercises stood. Guesses and measurements stay.")


def _summary(part: dict[str, Effort], stands: dict[str, str]) -> str:
    minutes = [effort.minutes for name, effort in part.items() if stands.get(name) not in results.DONE]
    done = f"{len(part) - len(minutes)} of {len(part)} right"
    return f"{done}, about {sum(minutes)} minutes left" if minutes else done


def _flat(chosen: dict[str, dict[str, Effort]]) -> dict[str, Effort]:
    return {name: effort for part in chosen.values() for name, effort in part.items()}
