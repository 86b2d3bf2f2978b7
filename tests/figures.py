"""What the tests of figures share."""

import io

from PIL import Image

from kvcourse.plots.base import png


def drawn(figure):
    """Draw it for real; a figure of one color would be an empty one."""
    image = Image.open(io.BytesIO(png(figure))).convert("RGB")
    assert len(image.getcolors(10_000_000)) > 10
    return figure


def texts(ax):
    return [text.get_text() for text in ax.texts]


def labelled(ax, label):
    (line,) = (line for line in ax.lines if line.get_label() == label)
    return line
