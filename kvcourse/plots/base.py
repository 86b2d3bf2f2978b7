"""How every figure of the course looks, and how it is shown.

A drawing function takes data and returns a `Figure`; it displays nothing. It is written

    @drawing
    def arrivals(times): ...
        fig, ax = new_figure()
        ...
        return fig

and shown in a notebook by `show(fig, alt="one sentence: what to see")`. Figures are made without pyplot, so none
stays open, and the course's style is never set globally.
"""

import base64
import functools
import html
import io
import re
import sys
import textwrap

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure

from kvcourse.results import NOT_MEASURED, Entry

# Okabe and Ito, "Color Universal Design" (2008): told apart with every common kind of color vision.
OKABE_ITO = {
    "blue": "#0072B2",
    "orange": "#E69F00",
    "green": "#009E73",
    "vermillion": "#D55E00",
    "purple": "#CC79A7",
    "sky": "#56B4E9",
    "yellow": "#F0E442",
    "black": "#000000",
}
# One meaning, one color, in all notebooks.
COLORS = OKABE_ITO | {
    "naive": OKABE_ITO["vermillion"],
    "cached": OKABE_ITO["blue"],
    "prefill": OKABE_ITO["orange"],
    "decode": OKABE_ITO["blue"],
    "guess": OKABE_ITO["sky"],
    "bound": "#777777",
    "measured": OKABE_ITO["blue"],
}
LOOKS = (  # color, marker, dash of each line of a plot
    (COLORS["blue"], "o", "-"),
    (COLORS["vermillion"], "s", "--"),
    (COLORS["green"], "^", "-."),
    (COLORS["purple"], "D", ":"),
)
STYLE = {
    "figure.figsize": (8, 4.5),
    "figure.dpi": 110,
    "savefig.dpi": 110,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "font.size": 13,
    "axes.titlesize": 15,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "lines.linewidth": 2.2,
    "lines.markersize": 7,
    "image.cmap": "cividis",
    # Lines differ in dash as well as in color: a meaning is never carried by color alone.
    "axes.prop_cycle": cycler(color=[OKABE_ITO[name] for name in ("blue", "vermillion", "green", "orange", "purple")])
    + cycler(linestyle=["-", "--", "-.", ":", (0, (5, 1))]),
}

DRAWINGS = {}  # name -> drawing function, filled by @drawing


def style():
    """A context in which matplotlib uses the course's style; outside of it nothing has changed."""
    return matplotlib.rc_context(STYLE)


def drawing(function):
    """Run a drawing function in the course's style, and make it known as `kv.plots.NAME`.

    Raises `ValueError` when a drawing of another module has the name.
    """

    @functools.wraps(function)
    def draw(*args, **kwargs) -> Figure:
        with style():
            return function(*args, **kwargs)

    known = DRAWINGS.get(function.__name__)
    if known and known.__module__ != function.__module__:
        raise ValueError(
            f"two drawings are called {function.__name__!r}: in {known.__module__} and {function.__module__}."
        )
    DRAWINGS[function.__name__] = draw
    return draw


def new_figure(rows: int = 1, columns: int = 1, size: tuple[float, float] = (8, 4.5), **options):
    """An empty figure of `size` inches with its axes: `fig, ax = new_figure()`.

    `options` go to `Figure.subplots` (`sharex`, `width_ratios`, ...). With several rows or columns the second
    value is an array of axes.
    """
    with style():
        figure = Figure(figsize=size, layout="constrained")
        return figure, figure.subplots(rows, columns, **options)


def png(figure: Figure) -> bytes:
    """The figure as a PNG file, 110 dots per inch; the figure is closed."""
    if not isinstance(figure, Figure):
        raise TypeError(f"A matplotlib Figure is needed; a {type(figure).__name__} was given (its .figure may do).")
    buffer = io.BytesIO()
    with style():
        figure.savefig(buffer, format="png")
    if "matplotlib.pyplot" in sys.modules:  # only a figure that came from pyplot is registered there
        sys.modules["matplotlib.pyplot"].close(figure)
    return buffer.getvalue()


def show(figure: Figure, *, alt: str) -> None:
    """Display the figure in the notebook, with `alt` as its text alternative and as the caption under it.

    `alt` is one sentence that says what to see. Outside of a notebook the sentence is printed.
    Raises `ValueError` when `alt` is empty.
    """
    require_alt(alt)
    image = png(figure)
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None:
        print(f"[figure] {alt}")
        return
    from IPython.display import Markdown, display

    data = {"image/png": base64.b64encode(image).decode(), "text/plain": "<figure>"}
    display(data, metadata={"image/png": {"alt": alt}}, raw=True)
    display(Markdown(f"<small><em>{_literal(alt)}</em></small>"))


def require_alt(alt: str) -> str:
    """Return `alt` if it says something, else raise `ValueError`."""
    if not isinstance(alt, str) or not alt.strip():
        raise ValueError(f"alt={alt!r} must be a sentence that says what the figure shows.")
    return alt


def _literal(text: str) -> str:
    """`text` so that Markdown shows it letter by letter (no emphasis from * or _, no HTML)."""
    return re.sub(r"[*_`\[\]\\]", lambda match: f"&#{ord(match[0])};", html.escape(text, quote=False))


@drawing
def predict_measure(entry: Entry) -> Figure:
    """Guess, bound and measurement of one entry as bars, with their numbers; a missing guess or measurement is said
    in words, a missing bound has no row, a number beyond 1e100 or nearer to 0 than 1e-100 no bar."""
    rows = [("your guess", entry.guess, "no guess"), ("measured", entry.measured, NOT_MEASURED)]
    if entry.bound is not None:
        rows.insert(1, ("bound", entry.bound, ""))
    fig, ax = new_figure(size=(8, 1.1 + 0.5 * len(rows)))
    numbers = []
    for row, (name, value, absent) in enumerate(rows):
        label = absent if value is None else entry.text(value)
        has_bar = isinstance(value, int | float) and (value == 0 or 1e-100 < abs(value) < 1e100)
        length = float(value) if has_bar else 0
        numbers += [length] if has_bar else []
        ax.barh(row, length, color=COLORS[name.removeprefix("your ")], height=0.62)
        ax.annotate(
            label,
            (length, row),
            (-6 if length < 0 else 6, 0),
            textcoords="offset points",
            va="center",
            ha="right" if length < 0 else "left",
            parse_math=False,
        )
    ax.set_yticks(range(len(rows)), [name for name, *_ in rows])
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    _scale_bars(ax, numbers)
    ax.set_xlabel(entry.unit + (" (log scale)" if ax.get_xscale() == "log" else ""), parse_math=False)
    ax.set_title("\n".join(textwrap.wrap(entry.question or entry.key, 60)), parse_math=False)
    return fig


def _scale_bars(ax, numbers: list[float]) -> None:
    """Room for the numbers beside the bars; a log axis where the smallest bar would vanish beside the largest."""
    if not numbers:
        ax.set_xlim(0, 1)
        ax.set_xticks([])
        return
    low, high = min(numbers), max(numbers)
    if low > 0 and high / low > 50:
        ax.set_xscale("log")
        ax.set_xlim(low / 3, high * (high / low) ** 0.35)
        for text in ax.texts:  # a missing value has no place on a log axis: its words stand at the left edge
            if text.xy[0] <= 0:
                text.xy = (low / 3, text.xy[1])
        return
    room = 0.3 * (max(high, 0) - min(low, 0)) or 1.0
    ax.set_xlim(min(low, 0) - (room if low < 0 else 0), max(high, 0) + room)


def plain_number(value: float, _=None) -> str:
    """A tick's label without powers, as a formatter of Matplotlib: 0.5, 10, 1,000."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"
