"""What a notebook knows about one figure: the learner's guess, the bound, the measurement; and how they are printed."""

import math
import re
import sys
from dataclasses import dataclass

NOT_MEASURED = "not measured here"
WIDTH = 62  # characters of a printed line; in a narrow window JupyterLab breaks longer ones in the middle of words
INDENT = "    "
# What `results.measure` prints, in the output of a cell: the key, and the number or word that was measured.
PRINTED = re.compile(r"^(\d\d\.\w+) .*(?:\n {4}.*)*?(?: \| |\n {4})measured (\S+)", re.MULTILINE)


class Spoken:
    """Prints itself when `say` is called; a notebook cell that ends with it does not print it a second time."""

    def say(self):
        print(self)
        self.__dict__["_said_in"] = _cell_number()
        return self

    def _ipython_display_(self):
        if self.__dict__.get("_said_in", -1) != _cell_number():
            print(self)


def _cell_number():
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell.execution_count if shell else None


@dataclass(frozen=True, repr=False)
class Entry(Spoken):
    """What is known under one key. `guess`, `bound` and `measured` are numbers or texts in `unit`, or None.

    `device`, `device_class` (see `device.device_class`) and `model` say on what it was measured.
    """

    key: str
    guess: float | str | None = None
    bound: float | str | None = None
    measured: float | str | None = None
    unit: str = ""
    question: str = ""
    note: str = ""
    device: str = ""
    date: str = ""
    device_class: str = ""
    model: str = ""

    @property
    def ratio(self) -> float | None:
        """measured / bound, or None where one of them is missing or not a number, or the ratio is not finite."""
        if isinstance(self.measured, str | None) or isinstance(self.bound, str | None) or self.bound == 0:
            return None
        ratio = self.measured / self.bound
        return ratio if math.isfinite(ratio) else None

    def __repr__(self):
        guess = "no guess" if self.guess is None else f"your guess {self.text(self.guess)}"
        measured = NOT_MEASURED if self.measured is None else f"measured {self.text(self.measured)}"
        if self.ratio is not None:
            times = "equal to" if self.ratio == 1 else f"{format_number(self.ratio)} times"
            measured += f" ({times} the bound)"
        lines = [f"{self.key}  {guess}"]
        for part in ("" if self.bound is None else f"bound {self.text(self.bound)}", measured, self.note):
            joined = f"{lines[-1]} | {part}"
            if part and len(joined) <= WIDTH:
                lines[-1] = joined
            elif part:
                lines.append(INDENT + part)
        return "\n".join(lines)

    def text(self, value) -> str:
        """`value` with this entry's unit, as it is printed everywhere."""
        return f"{format_number(value)} {self.unit}".strip()


def format_number(value) -> str:
    """Three significant digits; whole numbers below a million in full: 11,677; 0.0321; 1.87; 2.00; 1.35e11.

    Trailing zeros mean that the number was rounded (2.004 is "2.00", 2.0 is "2"). A text is returned as it is.
    """
    if isinstance(value, str):
        return value
    if value == 0 or (isinstance(value, int) and abs(value) < 1_000_000):
        return f"{value:,.0f}"
    rounded = f"{value:.2e}"
    exact = float(rounded) == float(value)
    mantissa, exponent = rounded.split("e")
    if not -4 <= int(exponent) < 6:
        mantissa = mantissa.rstrip("0").rstrip(".") if exact else mantissa
        return f"{mantissa}e{int(exponent)}"
    decimals = max(0, 2 - int(exponent))
    text = f"{float(rounded):,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if exact and decimals else text


def text_table(rows: list[tuple], width: int | None = None, gap: int = 3) -> str:
    """Rows of texts, each column as wide as its longest text, `gap` blanks between them. Where that is wider than
    `width`, the first text of each row stands on a line of its own, above the others."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [(gap * " ").join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    table = "\n".join(line.rstrip() for line in lines)
    if width is None or max(map(len, table.splitlines())) <= width:
        return table
    below = text_table([row[1:] for row in rows], gap=2).splitlines()
    lines = [line for (first, *_), rest in zip(rows, below, strict=True) for line in (first, INDENT + rest)]
    return "\n".join(line.rstrip() for line in lines if line)
