"""One request as its user saw it: when it was sent, when each piece of the answer came, and what it was."""

from dataclasses import dataclass, field


@dataclass
class Record:
    """Times are seconds from the beginning of the run. `due` is when the request should have been sent, `start` when it
    was. A chunk is an event that brought tokens; `arrivals` has the time of each.

    `tokens`, `prompt_tokens` and `cached_tokens` (of the prompt, taken from the server's prefix cache) are the server's
    own counts, None where it gives none. `token_ids` is empty unless the chunks carried them. A request that has an
    `error` failed; one that has neither that nor an `end` was still running when the run was over.
    """

    due: float
    start: float
    new_tokens: int
    arrivals: list[float] = field(default_factory=list)
    end: float | None = None
    tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.end is not None and self.error is None

    @property
    def first(self) -> float | None:
        """When the first tokens came. None when none did."""
        return self.arrivals[0] if self.arrivals else None

    @property
    def ttft(self) -> float | None:
        """Time to first token, seconds, opening the connection included. None without tokens."""
        return self.first - self.start if self.arrivals else None

    @property
    def itl(self) -> list[float]:
        """The gaps between chunks, seconds: inter-token latencies where each chunk has one token."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first: (last - first) / (tokens - 1), seconds. None below two tokens, or two
        chunks, and where tokens were not counted."""
        if self.tokens is None or self.tokens < 2 or len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1)

    @property
    def in_one_piece(self) -> bool:
        """Whether several chunks came in one packet, and no other did: something on the way collected the answer."""
        return len(self.arrivals) > 1 and self.arrivals[0] == self.arrivals[-1]
