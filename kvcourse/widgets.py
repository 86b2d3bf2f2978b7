"""Sliders around a drawing function. Thin on purpose: what is worth testing is the drawing function."""

import base64
import html
import inspect
import textwrap


def explore(draw, **controls):
    """Controls above the figure that `draw(**values)` returns; moving one redraws it.

    A control is `(min, max, step, default)` for a slider (whole numbers when all four are), a list of options
    (the first is the default), True or False for a checkbox, or a ready ipywidgets control.
    `draw` returns a matplotlib `Figure`, or `(figure, alt)` with a sentence for those who do not see it.

    Returns the box to be shown as the last value of a cell. An error at the default values is raised here; one
    after a slider was moved is shown in place of the figure. Raises `TypeError` when the controls are not the
    parameters of `draw`, `ValueError` for a malformed control.
    """
    import ipywidgets

    controls = {name: _control(name, control) for name, control in controls.items()}
    try:
        inspect.signature(draw).bind(**dict.fromkeys(controls))
    except TypeError as error:
        name = getattr(draw, "__name__", "draw")
        raise TypeError(f"explore: {name} does not take the controls {', '.join(controls)}: {error}.") from None

    def values() -> dict:
        return {name: control.value for name, control in controls.items()}

    # The figure is an <img> in one HTML widget: it is replaced as a whole, so nothing stacks up in any front end.
    picture = ipywidgets.HTML(_picture(draw, values()))

    def redraw(_change):
        try:
            picture.value = _picture(draw, values())
        except Exception as error:  # a front end hides errors of callbacks; the learner must see it
            text = f"No picture for {_listed(values())}. {type(error).__name__}: {error}"
            picture.value = f'<pre style="color:#b00020;white-space:pre-wrap">{html.escape(text)}</pre>'

    for control in controls.values():
        control.observe(redraw, names="value")
    return _box_class()([*controls.values(), picture], list(controls))


def _box_class():
    import ipywidgets

    class Explorer(ipywidgets.VBox):
        """The box, with a text form that is the same on every machine (a notebook stores it)."""

        def __init__(self, children, names):
            super().__init__(children)
            self._names_shown = ", ".join(names)

        def __repr__(self):
            return f"Explorer({self._names_shown})"

    return Explorer


def _control(name: str, control):
    import ipywidgets

    if isinstance(control, bool):
        made = ipywidgets.Checkbox(value=control)
    elif isinstance(control, list) and control:
        numbers = all(isinstance(option, int | float) for option in control)
        made = (
            ipywidgets.SelectionSlider(options=control, continuous_update=False)
            if numbers
            else ipywidgets.Dropdown(options=control)
        )
    elif isinstance(control, tuple) and len(control) == 4:
        low, high, step, default = control
        if not (low < high and step > 0 and low <= default <= high):
            raise ValueError(f"{name}={control}: needs min < max, step > 0 and a default from min to max.")
        whole = all(isinstance(number, int) for number in control)
        kind = ipywidgets.IntSlider if whole else ipywidgets.FloatSlider
        made = kind(min=low, max=high, step=step, value=default, continuous_update=False)
    elif isinstance(control, ipywidgets.Widget) and hasattr(control, "value"):
        return control
    else:
        raise ValueError(
            f"{name}={control!r} is no control: give (min, max, step, default), a list of options, "
            "True or False, or an ipywidgets control."
        )
    made.description = name.replace("_", " ")
    made.style.description_width = "140px"
    made.layout = ipywidgets.Layout(width="480px")
    return made


def _picture(draw, values: dict) -> str:
    """The HTML of the figure that `draw` makes of `values`, with its text alternative."""
    from kvcourse.plots.base import png, require_alt

    drawn = draw(**values)
    drawn = drawn if isinstance(drawn, tuple) else (drawn, f"The picture for {_listed(values)}.")
    if len(drawn) != 2:
        raise TypeError(f"explore: draw must return a Figure, or (figure, alt); it returned {len(drawn)} values.")
    figure, alt = drawn
    data = base64.b64encode(png(figure)).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{html.escape(require_alt(alt))}" style="max-width:100%">'


def _listed(values: dict) -> str:
    return ", ".join(
        f"{name} = {textwrap.shorten(str(value), 40, placeholder='...')}" for name, value in values.items()
    )
