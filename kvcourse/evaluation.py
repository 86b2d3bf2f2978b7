"""Two plain English texts that travel with the course: one to measure quality on, one to calibrate rounding with.

They are frozen copies of the course's own prose, from different notebooks, so that nothing is in both.
`data/README.md` says how they were made.
"""

from kvcourse.paths import data_folder

TEXTS = ("evaluation", "calibration")


def evaluation_text(name: str = "evaluation") -> str:
    """One of the texts, paragraphs separated by an empty line. Raises `ValueError` for an unknown name."""
    if name not in TEXTS:
        raise ValueError(f"There is no text {name!r}; choose one of {', '.join(TEXTS)}.")
    return (data_folder() / "texts" / f"{name}.txt").read_text(encoding="utf-8")
