"""Read a dictionary of settings so that nothing in it goes unnoticed."""

import math

from kvcourse.config import require_whole


class Fields:
    """The fields of one JSON object. A field that was not asked for when `finish` is called is refused.

    null is the same as an absent field. Every error begins with `where`.
    """

    def __init__(self, fields: dict, where: str):
        self.fields, self.where = fields, where
        self.asked = set()

    def error(self, text: str) -> ValueError:
        return ValueError(f"{self.where} {text}")

    def get(self, name: str, default=None):
        self.asked.add(name)
        value = self.fields.get(name)
        return default if value is None else value

    def needed(self, name: str):
        value = self.get(name)
        if value is None:
            raise self.error(f"has no field {name}, which is needed to run the model.")
        return value

    def whole(self, name: str) -> int:
        value = self.needed(name)
        try:
            return require_whole(name, value)
        except ValueError as error:
            raise self.error(f"is not usable: {error}") from None

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number of at least 0; without a default it is needed."""
        value = self.needed(name) if default is None else self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise self.error(f"says {name} = {short(value)}, which must be a number.")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(f"says {name} = {short(value)}, which must be true or false.")
        return value

    def refuse_unless_neutral(self, neutral_values: dict[str, list]) -> None:
        """Refuse fields that have another value than those listed; where there is no such field, all is well."""
        for name, neutral in neutral_values.items():
            value = self.get(name, neutral[0])
            if value not in neutral:
                allowed = " or ".join(map(repr, neutral))
                raise self.error(f"says {name} = {short(value)}, which is not supported: only {allowed} is.")

    def finish(self, harmless: frozenset[str]) -> None:
        """Refuse what was not asked for, unless it is in `harmless` or says no: null, false, empty."""
        for name, value in self.fields.items():
            says_no = value is None or value is False or value in ("", [], {})
            if name not in self.asked | harmless and not says_no:
                raise self.error(
                    f"has a field {name} = {short(value)}, which is not understood and may change what the model "
                    "computes. If you know that it does not, take it out of a copy of the file."
                )


def short(value) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def make(kind, where: str, **settings):
    """`kind(**settings)`; what it refuses is said of the file."""
    try:
        return kind(**settings)
    except ValueError as error:
        raise ValueError(f"{where} is not usable: {error}") from error
