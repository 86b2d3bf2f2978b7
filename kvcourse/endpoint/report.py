"""What a measurement of an endpoint found: figures, a table, and everything that whoever reads them must know."""

import textwrap
from collections import Counter
from dataclasses import asdict, dataclass, field

from kvcourse.bench.report import number, seconds
from kvcourse.endpoint.client import Endpoint
from kvcourse.endpoint.plan import Plan
from kvcourse.endpoint.prompts import Ruler
from kvcourse.endpoint.record import Record
from kvcourse.metrics import percentile

PERCENTILES = (50, 95, 99)
LATE = 0.05  # seconds after its time at which a request may be sent without a note


@dataclass
class MeterReport:
    """The figures of a run. Latencies are those of the requests that finished; `str(report)` is a table of all.

    `records` has every request that was sent, in that order: times, tokens, text, error.
    """

    endpoint: Endpoint = field(repr=False)
    plan: Plan = field(repr=False)
    ruler: Ruler = field(repr=False)
    records: list[Record] = field(repr=False)
    interrupted: bool = False

    @property
    def finished(self) -> list[Record]:
        return [record for record in self.records if record.finished]

    @property
    def failed(self) -> list[Record]:
        return [record for record in self.records if record.error is not None]

    @property
    def unfinished(self) -> list[Record]:
        """Requests that were still running when the run was over."""
        return [record for record in self.records if record.end is None]

    @property
    def not_sent(self) -> int:
        return self.plan.requests - len(self.records)

    @property
    def ok(self) -> bool:
        """Whether there is something to report, and nothing failed."""
        return bool(self.finished) and not self.failed

    @property
    def seconds(self) -> float:
        """From when the first request was sent to the end of the last that ended. 0 when none did."""
        ends = [record.end for record in self.records if record.end is not None]
        return max(ends) - min(record.start for record in self.records) if ends else 0.0

    @property
    def output_tokens(self) -> int | None:
        """Tokens in the answers that finished. None where the server did not count those of each."""
        counts = [record.tokens for record in self.finished]
        return None if None in counts else sum(counts)

    @property
    def chunks(self) -> int:
        return sum(len(record.arrivals) for record in self.finished)

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens of all users together for each second of the run. Those of an answer that brought no chunk are
        left out: the server counted them, and nobody saw them come."""
        if self.output_tokens is None:
            return None
        seen = sum(record.tokens for record in self.finished if record.arrivals)
        return seen / self.seconds if seen and self.seconds else None

    @property
    def requests_per_second(self) -> float | None:
        return len(self.finished) / self.seconds if self.seconds else None

    @property
    def ttft(self) -> list[float]:
        """Times to first token, seconds, of the answers that had one."""
        return [record.ttft for record in self.finished if record.ttft is not None]

    @property
    def itl(self) -> list[float]:
        """All gaps between chunks, seconds."""
        return [gap for record in self.finished for gap in record.itl]

    @property
    def tpot(self) -> list[float]:
        """Times per output token after the first, seconds, one of each answer."""
        return [record.tpot for record in self.finished if record.tpot is not None]

    @property
    def latency(self) -> list[float]:
        """From sending to the end of the answer, seconds."""
        return [record.end - record.start for record in self.finished]

    @property
    def cached_share(self) -> float | None:
        """The share of prompt tokens that the server says it took from its prefix cache. None where it does not say."""
        pairs = [
            (r.cached_tokens, r.prompt_tokens) for r in self.finished if None not in (r.cached_tokens, r.prompt_tokens)
        ]
        prompt = sum(prompt for _, prompt in pairs)
        return sum(cached for cached, _ in pairs) / prompt if prompt else None

    @property
    def percentiles(self) -> dict[str, dict[str, float | None]]:
        """Seconds: {"ttft": {"p50": ..., "p95": ..., "p99": ...}, "itl": ..., "tpot": ..., "latency": ...}."""
        kinds = {"ttft": self.ttft, "itl": self.itl, "tpot": self.tpot, "latency": self.latency}
        return {name: {f"p{p}": percentile(values, p) for p in PERCENTILES} for name, values in kinds.items()}

    def as_dict(self) -> dict:
        """All of it, for JSON. Prompts and the API key are left out."""
        plan = {name: value for name, value in vars(self.plan).items() if name != "prompts"}
        return {
            "url": self.endpoint.url,
            "model": self.endpoint.model,
            "timeout": self.endpoint.timeout,
            "extra": self.endpoint.extra,
            "plan": plan,
            "seconds": self.seconds,
            "finished": len(self.finished),
            "failed": len(self.failed),
            "unfinished": len(self.unfinished),
            "not_sent": self.not_sent,
            "interrupted": self.interrupted,
            "output_tokens": self.output_tokens,
            "chunks": self.chunks,
            "tokens_per_second": self.tokens_per_second,
            "requests_per_second": self.requests_per_second,
            "cached_share": self.cached_share,
            "percentiles": self.percentiles,
            "notes": notes(self),
            "records": [asdict(record) for record in self.records],
        }

    def __str__(self) -> str:
        return text(self)


def text(report: MeterReport) -> str:
    """The table, and below it what must be known."""
    lines = [f"{report.endpoint.url}, model {report.endpoint.model}", load_line(report), ""]
    lines += [*table(report), "", *totals(report), ""]
    return "\n".join(lines + [textwrap.fill(note, 118) for note in notes(report)]).rstrip()


def load_line(report: MeterReport) -> str:
    plan = report.plan
    if plan.rate is not None:
        who = f"open loop, {plan.rate:g} requests a second"
    elif plan.open_loop:
        who = "open loop, at the times of a trace"
    else:
        who = f"closed loop, {plan.concurrency} user{'s' * (plan.concurrency != 1)} at once"
    wanted = "" if plan.new_tokens is None else f", up to {plan.new_tokens} new tokens each"
    return f"{who}; {plan.requests} requests{wanted}; seed {plan.seed}"


def table(report: MeterReport) -> list[str]:
    titles = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "latency": "whole answer"}
    counts = {"ttft": report.ttft, "itl": report.itl, "tpot": report.tpot, "latency": report.latency}
    lines = [f"{'':<14}" + "".join(f"{f'p{p}':>12}" for p in PERCENTILES) + f"{'values':>10}"]
    for name, row in report.percentiles.items():
        cells = "".join(f"{'-' if value is None else seconds(value):>12}" for value in row.values())
        lines.append(f"{titles[name]:<14}{cells}{len(counts[name]):>10,}")
    return lines


def totals(report: MeterReport) -> list[str]:
    states = {"finished": report.finished, "failed": report.failed, "unfinished": report.unfinished}
    requests = ", ".join(f"{len(records)} {state}" for state, records in states.items())
    lines = [f"requests      {requests}, in {number(report.seconds)} s"]
    if report.requests_per_second:
        speed = f"{number(report.requests_per_second)} requests/s"
        if report.tokens_per_second:
            speed = f"{number(report.tokens_per_second)} output tokens/s, {speed}"
        lines.append(f"throughput    {speed}")
    if report.output_tokens is not None:
        lines.append(f"output        {report.output_tokens:,} tokens in {report.chunks:,} chunks")
    else:
        lines.append(f"output        {report.chunks:,} chunks; tokens not counted")
    if prompts := [record.prompt_tokens for record in report.finished if record.prompt_tokens is not None]:
        cached = "" if report.cached_share is None else f", {report.cached_share:.1%} of them from its prefix cache"
        low, high = min(prompts), max(prompts)
        lengths = f"{low:,} to {high:,}" if low < high else f"{low:,}"
        lines.append(f"prompts       {lengths} tokens each, as the server counted{cached}")
    return lines


def notes(report: MeterReport) -> list[str]:
    """What the figures mean, and what went otherwise than asked."""
    finished, failed = report.finished, report.failed
    lines = []
    if report.interrupted:
        lines.append("Stopped by Ctrl-C: the figures are about what was measured until then.")
    causes = Counter(record.error for record in failed)
    lines += [f"FAILED, {count} of {len(report.records)} requests: {cause}" for cause, count in causes.most_common(5)]
    if len(causes) > 5:
        lines.append(f"FAILED for other reasons: {sum(causes.values()) - sum(n for _, n in causes.most_common(5))}.")
    if report.unfinished:
        lines.append(f"Still running when the run was over, and in no figure: {many(report.unfinished, 'request')}.")
    if report.not_sent:
        why = "" if report.interrupted else ": the time was over"
        lines.append(f"Not sent: {report.not_sent} of {report.plan.requests} requests{why}.")
    lines += counting_notes(report)
    if short := [r for r in finished if r.tokens is not None and r.tokens < r.new_tokens]:
        lines.append(
            f"{many(short, 'answer')} ended before the number of new tokens that was asked for; ignore_eos prevents "
            "that where the server knows it."
        )
    if pieces := [record for record in finished if record.in_one_piece]:
        lines.append(
            f"{many(pieces, 'answer')} came in one piece: something on the way collects the stream, or the server was "
            "faster than the network; the gaps of 0 inside say nothing."
        )
    late = max((record.start - record.due for record in report.records), default=0.0)
    if late > LATE:
        lines.append(f"This computer sent requests up to {seconds(late)} late: it cannot keep up with such a load.")
    lines.append(
        "TTFT: from sending, opening the connection included, to the first chunk with tokens. ITL: gaps between such "
        "chunks. TPOT: (last - first) / (tokens - 1) of each answer. All are of the requests that finished."
    )
    return lines


def counting_notes(report: MeterReport) -> list[str]:
    """Whether tokens were counted, and by whom."""
    finished, lines = report.finished, []
    if uncounted := sum(record.tokens is None for record in finished):
        lines.append(
            f"Tokens could not be counted: the server sent no usage with {uncounted} of {len(finished)} answers. "
            "Chunks are counted as chunks, and a chunk may have several tokens."
        )
    seen = [(record.tokens or 0, len(record.arrivals)) for record in finished if record.arrivals]
    if more := [(tokens, chunks) for tokens, chunks in seen if tokens > chunks]:
        tokens, chunks = map(sum, zip(*more, strict=True))
        lines.append(
            f"{many(more, 'answer')} had more tokens than chunks ({tokens:,} in {chunks:,}): several came in one "
            "chunk, which gives one gap, or had no text of their own, such as the token for the end."
        )
    if report.plan.prompts is None and not report.ruler.measured:
        lines.append("The server did not count the tokens of prompts: their lengths are in words.")
    if empty := [record for record in finished if not record.arrivals]:
        lines.append(
            f"{many(empty, 'answer')} of {len(finished)} came without any text: no TTFT, and tokens that the server "
            "counted in them are not in tokens/s."
        )
    if calls := [record for record in finished if record.arrivals and not record.text]:
        lines.append(f"{many(calls, 'answer')} had tokens and no text, such as tool calls.")
    return lines


def many(items: list, name: str) -> str:
    return f"{len(items):,} {name}{'s' * (len(items) != 1)}"
