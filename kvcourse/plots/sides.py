"""The two sides of every step: all rows drawn again without the cache, one row added with it."""

from matplotlib.patches import Patch

from kvcourse.config import ModelConfig
from kvcourse.cost import flops
from kvcourse.plots.base import COLORS, drawing, new_figure

KEPT = "#d9d9d9"


@drawing
def two_sides(pieces, prompt_length: int, step: int, config: ModelConfig):
    """One step of generation seen from both sides: the rows that run through the model without and with the cache,
    and the operations counted so far.

    `pieces` are the texts of the tokens, prompt first; step 1 makes the token after the prompt.
    """
    last = len(pieces) - prompt_length + 1
    fig, (left, right, bars) = new_figure(1, 3, size=(11, 5.6), width_ratios=[3, 3, 2.2])
    _rows(left, pieces, prompt_length, step, False, labels=True)
    _rows(right, pieces, prompt_length, step, True, labels=True)
    now, total = _counted(config, prompt_length, step), _counted_so_far(config, prompt_length, step)
    scale, word = _unit(config)
    for ax, name, operations in ((left, "Without cache", now[0]), (right, "With cache", now[1])):
        rows = len(_computed(prompt_length, step, name == "With cache"))
        ax.set_title(f"{name}\n{_many(rows, 'row')}, {operations / scale:,.1f} {word} operations", fontsize=13)
    bars.bar([0, 1], [value / scale for value in total], color=[COLORS["naive"], COLORS["cached"]], width=0.7)
    for x, value in enumerate(total):
        bars.annotate(f"{value / scale:,.1f}", (x, value / scale), (0, 4), textcoords="offset points", ha="center")
    bars.set_xticks([0, 1], ["without", "with"])
    bars.set_ylim(0, 1.1 * max(_counted_so_far(config, prompt_length, last)) / scale)
    bars.set_ylabel(f"{word} operations so far")
    bars.set_title(f"Step {step} of {last}\n{total[0] / total[1]:.1f} times the work", fontsize=13)
    bars.grid(axis="x", visible=False)
    return fig


@drawing
def two_sides_filmstrip(pieces, prompt_length: int, steps, config: ModelConfig):
    """The same two sides at several steps, one column a step: without cache above, with cache below."""
    fig, axes = new_figure(2, len(steps), size=(0.3 + 1.75 * len(steps), 5.8), squeeze=False)
    scale, word = _unit(config)
    for column, step in enumerate(steps):
        total = _counted_so_far(config, prompt_length, step)
        for row, (cached, name) in enumerate(((False, "without"), (True, "with"))):
            ax = axes[row, column]
            _rows(ax, pieces, prompt_length, step, cached, labels=False)
            rows = len(_computed(prompt_length, step, cached))
            ax.set_title(f"step {step}: {_many(rows, 'row')}\n{total[row] / scale:,.1f} so far", fontsize=12)
            if column == 0:
                ax.set_ylabel(f"{name} cache", fontsize=14)
    fig.supxlabel(f"so far: {word} operations counted from the first step on", fontsize=12)
    return fig


def _rows(ax, pieces, prompt_length: int, step: int, cached: bool, labels: bool) -> None:
    """The tokens of the text as bars, from top to bottom: computed now, or kept in the cache."""
    computed = _computed(prompt_length, step, cached)
    length = prompt_length + step - 1
    color = COLORS["cached" if cached else "naive"]
    for row in range(length):
        is_new = row in computed
        ax.barh(row, 1, height=0.82, color=color if is_new else KEPT, hatch=None if is_new else "..", edgecolor="white")
        if labels:
            text_color = "white" if is_new else "#333333"
            ax.text(0.03, row, _visible(pieces[row]), va="center", fontsize=10, color=text_color, clip_on=True)
    ax.set_ylim(len(pieces) - 0.4, -0.6)
    ax.set_xlim(0, 1)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.grid(visible=False)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    handles = [Patch(color=color, label="computed now")]
    if cached and length > len(computed):
        handles.append(Patch(facecolor=KEPT, edgecolor="white", hatch="..", label="kept in the cache"))
    if labels:
        ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=2, fontsize=11)


def _computed(prompt_length: int, step: int, cached: bool) -> range:
    """The rows that run through the model at this step."""
    length = prompt_length + step - 1
    return range(length - 1 if cached and step > 1 else 0, length)


def _unit(config: ModelConfig) -> tuple[float, str]:
    """In what to count operations, so that a single row of this model is not 0.0."""
    return (1e9, "billion") if flops(config, 1).total > 1e8 else (1e6, "million")


def _counted(config: ModelConfig, prompt_length: int, step: int) -> tuple[int, int]:
    """Operations of this step, without and with the cache."""
    length = prompt_length + step - 1
    naive = flops(config, length).total
    return naive, naive if step == 1 else flops(config, 1, length - 1).total


def _counted_so_far(config: ModelConfig, prompt_length: int, step: int) -> tuple[int, int]:
    counts = [_counted(config, prompt_length, earlier) for earlier in range(1, step + 1)]
    return sum(naive for naive, _ in counts), sum(cached for _, cached in counts)


def _visible(piece: str) -> str:
    """The text of a token so that blanks and line breaks can be seen, cut to fit its bar."""
    text = piece.replace("\n", "⏎").replace(" ", "·")
    return text if len(text) <= 22 else text[:21] + "…"


def _many(count: int, thing: str) -> str:
    return f"{count:,} {thing}" + ("" if count == 1 else "s")
