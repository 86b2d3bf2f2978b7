"""The picture of a training run: how the loss falls."""

from kvcourse.plots.base import COLORS, OKABE_ITO, drawing, new_figure

LOOKS = [("blue", "-"), ("vermillion", "--"), ("green", "-."), ("orange", ":"), ("purple", (0, (5, 1))), ("black", "-")]


@drawing
def loss_curves(curves: dict[str, list[dict]]):
    """Loss against tokens read, for `{name: points}` as in `History.points` or `curve.json`: a line for the loss of
    held-out stories, dots for that of the stories read meanwhile.

    Raises `ValueError` when there is nothing to draw.
    """
    empty = [name for name, points in curves.items() if not points]
    if empty or not curves:
        raise ValueError(f"There is no point of a curve{f' of {empty[0]}' if empty else ''}: train a model first.")
    fig, ax = new_figure()
    for i, (name, points) in enumerate(curves.items()):
        color, dash = LOOKS[i % len(LOOKS)]
        millions = [point["tokens"] / 1e6 for point in points]
        look = {"color": OKABE_ITO[color], "linestyle": dash, "marker": "o" if len(points) == 1 else ""}
        ax.plot(millions, [point["validation_loss"] for point in points], label=name, **look)
        ax.plot(millions, [point["loss"] for point in points], ".", color=OKABE_ITO[color], alpha=0.5, markersize=5)
    ax.plot([], [], ".", color=COLORS["bound"], label="stories being read")
    ax.set_xlabel("tokens read (millions)")
    ax.set_ylabel("loss (nats per token)")
    ax.set_ylim(bottom=0)
    ax.set_title("Loss of held-out stories")
    ax.legend()
    return fig
