"""The curve of a training run: losses, and how many questions were answered right at which distance."""

from dataclasses import asdict, dataclass, field

POINT = {"step", "tokens", "learning_rate", "loss", "validation_loss", "recall"}


@dataclass
class History:
    """What happened so far. Each of the `points`, a dictionary that JSON can hold, has

    - `step`, `tokens`: steps done and tokens read so far, and the `learning_rate` of the latest step;
    - `loss`: mean cross-entropy of the tokens read since the point before, in nats, each counted alike;
    - `validation_loss`: the same for held-out rows, now;
    - `recall`: {distance: [right, asked]} for the answers read since the point before, as the model would have
      written them just before it learned from them. Distances are gathered up to 16, 32, 64, ... tokens.

    Each of the `parts` says what computed from its `step` on. `tokens` and `seconds` are those of the whole run, the
    other fields sums since the latest point.
    """

    points: list[dict] = field(default_factory=list)
    parts: list[dict] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0  # over tokens
    loss_tokens: int = 0
    recall: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def read(cls, content: dict) -> "History":
        """What `asdict` made of a run's history. Raises `TypeError` or `KeyError` when it is something else."""
        sound = all(type(content[name]) is type(empty) for name, empty in asdict(cls()).items())
        sound = sound and all(isinstance(point, dict) and point.keys() == POINT for point in content["points"])
        sound = sound and all(isinstance(part, dict) and type(part.get("step")) is int for part in content["parts"])
        if not sound or not content["parts"]:
            raise TypeError("This is not the history of a run.")
        return cls(**content)

    def begin(self, step: int, origin: dict) -> None:
        """From `step` on, it is `origin` that computes: a part of its own, where that is not as before."""
        self.parts = [part for part in self.parts if part["step"] < step]
        if not self.parts or self.parts[-1] != {**origin, "step": self.parts[-1]["step"]}:
            self.parts.append({"step": step, **origin})

    def note(self, loss: float, tokens: int, answers: list[tuple[int, bool]]) -> None:
        """A step over `tokens` tokens: mean loss, and for each question (distance, whether it was answered right)."""
        self.tokens += tokens
        self.loss_sum += loss * tokens
        self.loss_tokens += tokens
        for distance, right in answers:
            count = self.recall.setdefault(str(bucket(distance)), [0, 0])
            count[0] += right
            count[1] += 1

    def close(self, step: int, learning_rate: float, validation_loss: float) -> None:
        """Make a point of what was noted since the one before."""
        point = {"step": step, "tokens": self.tokens, "learning_rate": learning_rate}
        point |= {"loss": self.loss_sum / self.loss_tokens, "validation_loss": validation_loss}
        recall = {key: self.recall[key] for key in sorted(self.recall, key=int)}
        self.points.append(point | {"recall": recall})
        self.loss_sum, self.loss_tokens, self.recall = 0.0, 0, {}

    def summary(self) -> dict[str, str]:
        """For a progress bar: the latest mean loss, and recall as "16: 98%, 32: 91%"."""
        loss = (
            self.loss_sum / self.loss_tokens if self.loss_tokens else self.points[-1]["loss"] if self.points else None
        )
        counts = self.recall or (self.points[-1]["recall"] if self.points else {})
        shares = ", ".join(f"{key}: {counts[key][0] / counts[key][1]:.0%}" for key in sorted(counts, key=int))
        return ({} if loss is None else {"loss": f"{loss:.3f}"}) | ({"recall": shares} if shares else {})


def bucket(distance: int) -> int:
    """The least of 16, 32, 64, 128, ... that is not below `distance`."""
    return max(16, 1 << (distance - 1).bit_length())
