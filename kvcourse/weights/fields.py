"""Read a dictionary of settings so that nothing in it goes unnoticed."""

import sys

NEEDED = object()  # as the default of a field: it must be there


class Fields:
    """Settings of a model, {name: value}: each is read, or refused by `finish`. null is the same as an absent field.

    Errors begin with `where`, the file, and call a field by its full name there, which begins with `prefix`.
    """

    def __init__(self, fields: dict, where: str, prefix: str = ""):
        self.fields, self.where, self.prefix = fields, where, prefix
        self.asked = set()

    def error(self, text: str) -> ValueError:
        return ValueError(f"{self.where} {text}")

    def refused(self, name: str, because: str) -> ValueError:
        """The error that says a field with its value, and `because`, the rest of the sentence."""
        return self.error(f"says {self.prefix}{name} = {short(self.fields.get(name))}, {because}")

    def get(self, name: str, default=None):
        self.asked.add(name)
        value = self.fields.get(name)
        if value is None and default is NEEDED:
            raise self.error(f"has no field {self.prefix}{name}, which is needed.")
        return default if value is None else value

    def whole(self, name: str, default=NEEDED, least: int = 1) -> int | None:
        value = self.get(name, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise self.refused(name, f"which must be a whole number of at least {least}.")
        return value

    def layers(self, name: str, n_tensors: float) -> int:
        """A number of layers. In a damaged file it may be one that would take for ever to lay out, so it is refused
        when there are fewer tensors than layers."""
        value = self.whole(name)
        if value > n_tensors:
            raise self.refused(name, f"but there are only {n_tensors} tensors in all.")
        return value

    def number(self, name: str, default=NEEDED) -> float | None:
        value = self.get(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
            raise self.refused(name, "which must be a finite number of at least 0.")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.refused(name, "which must be true or false.")
        return value

    def one_of(self, name: str, allowed, default=None):
        """The value if it is one of `allowed`; else it is refused. An absent field is `default`."""
        value = self.get(name, default)
        if value is not None and value not in list(allowed):
            raise self.refused(name, f"which is not supported: only {' or '.join(map(repr, allowed))} is.")
        return value

    def make(self, kind, **settings):
        """`kind(**settings)`; what it refuses is said of the file."""
        try:
            return kind(**settings)
        except ValueError as error:
            raise self.error(f"is not usable: {error}") from error

    def finish(self, harmless: set[str] | frozenset[str], neutral: dict[str, list]) -> None:
        """Refuse fields of `neutral` that have none of the values listed there, and all others that were not asked
        for, unless they are in `harmless` or say no: null, false, empty."""
        for name, values in neutral.items():
            self.one_of(name, values)
        for name, value in self.fields.items():
            says_no = value is None or value is False or value in ("", [], {})
            if name not in self.asked | harmless and not says_no:
                raise self.refused(
                    name,
                    "which is not understood and may change what the model computes. If you know that it does not, "
                    "take it out of a copy of the file.",
                )


def short(value) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
