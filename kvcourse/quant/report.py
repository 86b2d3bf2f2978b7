"""What became of each weight of a model that was rounded: its bytes, and how much of its output is wrong."""

from dataclasses import dataclass
from statistics import mean

from torch import Tensor


@dataclass(frozen=True)
class LayerReport:
    """One weight. `error`: how far the output is off over the calibration inputs, root mean square, as a share of the
    output's own; without calibration, and for embedding and head, how far the weight is. `rtn_error`: the same had it
    been rounded to nearest, onto the same grid."""

    name: str
    shape: tuple[int, int]
    nbytes: int
    bits_per_weight: float
    error: float
    rtn_error: float
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class Quantization:
    """How a model was rounded, and what came of it: `layers` has a `LayerReport` for each weight. As text, a table with
    a line for each kind of weight."""

    method: str
    bits: int
    group_size: int | str | None
    layers: list[LayerReport]
    calibration: str = ""  # which tokens were read, in words
    seconds: float = 0.0  # for all of it, running the model over the calibration text included

    @property
    def nbytes(self) -> int:
        """Bytes of all rounded weights. A tied head is the embedding, and counts once."""
        return sum(layer.nbytes for layer in self.layers)

    def __str__(self):
        kinds = {}
        for layer in self.layers:
            kinds.setdefault(layer.name.rpartition(".")[2], []).append(layer)
        what = "output" if self.calibration else "weight"
        lines = [f"{self.heading()}", f"{'':14}  number        MB  bits each  {what} error  rounded to nearest"]
        lines += [line(kind, layers) for kind, layers in kinds.items()]
        if len(kinds) > 1:
            lines.append(line("all", self.layers))
        notes = [f"{layer.name}: {layer.note}" for layer in self.layers if layer.note]
        if len(notes) > 5:
            notes[5:] = [f"and {len(notes) - 5} more notes, in `layers`"]
        return "\n".join(lines + notes)

    def heading(self) -> str:
        group = {None: "one group a row", "tensor": "one group a matrix"}.get(
            self.group_size, f"groups of {self.group_size}"
        )
        calibrated = f"; calibrated on {self.calibration}" if self.calibration else ""
        return f"{self.method}, {self.bits} bits, {group}{calibrated}"


def line(kind: str, layers: list[LayerReport]) -> str:
    """A line of the table: sums of numbers and bytes, means of errors."""
    nbytes = sum(layer.nbytes for layer in layers)
    numbers = sum(layer.shape[0] * layer.shape[1] for layer in layers)
    error, rtn_error = mean(layer.error for layer in layers), mean(layer.rtn_error for layer in layers)
    size = f"{nbytes / 1e6:8.2f}  {8 * nbytes / numbers:9.3f}"
    return f"{kind:14}  {len(layers):6}  {size}  {error:12.4f}  {rtn_error:18.4f}"


def relative_error(weight: Tensor, rounded: Tensor, hessian: Tensor | None = None) -> float:
    """Root of |(W - W') x|^2 / |W x|^2, both summed over the inputs x that the Hessian is of; without one, of
    |W - W'|^2 / |W|^2."""
    weight = weight.float()
    wrong, whole = power(rounded.float() - weight, hessian), power(weight, hessian)
    return (wrong / whole) ** 0.5 if whole > 0 else 0.0


def power(weight: Tensor, hessian: Tensor | None) -> float:
    """Sum over inputs of the squared output, up to a factor. In float32: it is done for every weight of a model."""
    product = weight if hessian is None else weight @ hessian
    return max(0.0, (product * weight).sum().item())
