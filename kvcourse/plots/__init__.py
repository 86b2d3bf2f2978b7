"""The pictures of the course: pure functions from data to a `Figure`, and `show`.

`kv.plots.NAME` is any function marked `@drawing` in a module of this folder.
"""

import difflib
import importlib
import pkgutil

from kvcourse.plots.base import COLORS, DRAWINGS, OKABE_ITO, drawing, new_figure, png, predict_measure, show, style

__all__ = ["COLORS", "OKABE_ITO", "drawing", "new_figure", "png", "predict_measure", "show", "style"]


def __getattr__(name: str):
    if not name.startswith("_"):
        if name not in DRAWINGS:
            _import_all()
        if name in DRAWINGS:
            return DRAWINGS[name]
    near = difflib.get_close_matches(name, [*DRAWINGS, *__all__])
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise AttributeError(f"kvcourse.plots has no {name!r}{hint}")


def __dir__():
    _import_all()
    return sorted({*globals(), *DRAWINGS})


def _import_all() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
