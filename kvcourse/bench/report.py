"""From what a race brought to numbers, and from the numbers to a table. The report is plain data, as it is stored."""

import platform
import textwrap
from dataclasses import asdict
from datetime import datetime
from statistics import median

import psutil
import torch

from kvcourse import __version__
from kvcourse.bench.race import CONTEXTS, Difference, Race, Row, Sample
from kvcourse.device import device_name
from kvcourse.roof import Ceilings

SCHEMA = 1  # of the stored report; it changes when a field changes its meaning or goes
TTFT_CONTEXT = 512


def make_report(race: Race, ceilings: Ceilings, quick: bool) -> dict:
    """Everything that is known about a race, in a form that JSON can hold."""
    return {
        "schema": SCHEMA,
        "kvcourse": __version__,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "model": race.model,
        "environment": environment(next(row.about for row in race.rows if row.about)),
        "ceilings": asdict(ceilings),
        "rounds": race.rounds,
        "quick": quick,
        "contexts": race.contexts,
        "ttft_context": TTFT_CONTEXT if TTFT_CONTEXT in race.contexts else None,
        "rows": [summarize(row, race.contexts, ceilings) for row in race.rows],
        "differences": [asdict(difference) for difference in race.differences],
    }


def environment(about: dict) -> dict:
    """Where a model ran: `about` has its "device" and "dtype", by their names."""
    device = torch.device(about["device"])
    return {
        "device": about["device"],
        "device_name": device_name(device),
        "dtype": about["dtype"],
        "threads": torch.get_num_threads(),
        "cores": psutil.cpu_count(logical=False),
        "memory": psutil.virtual_memory().total,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def summarize(row: Row, contexts: list[int], ceilings: Ceilings) -> dict:
    """Medians over the rounds with the lowest and the highest; what was not measured is None."""
    by_context = {context: [sample for sample in row.samples if sample.context == context] for context in contexts}
    return {
        "title": row.title,
        "error": row.error,
        **{key: row.about.get(key) for key in ("program", "means", "peak_without_loading")},
        "ttft": spread([sample.arrivals[0] for sample in by_context.get(TTFT_CONTEXT, [])]),
        "decode": [decode_speed(context, samples, ceilings) for context, samples in by_context.items()],
        "peak_bytes": max((sample.peak_bytes for sample in row.samples), default=None),
        "samples": [asdict(sample) for sample in row.samples],
    }


def decode_speed(context: int, samples: list[Sample], ceilings: Ceilings) -> dict:
    """Tokens per second at one context, how many there could be at most, and the share of that."""
    speed = spread([tokens_per_second(sample) for sample in samples])
    bound = ceilings.bytes_per_second / samples[0].step_bytes if samples else None
    share = speed["median"] / bound if samples else None
    return {"context": context, "tokens_per_second": speed, "bound": bound, "share": share}


def tokens_per_second(sample: Sample) -> float:
    """One over the median gap. The first token's wait is a prefill and no gap."""
    return 1 / median(after - before for before, after in zip(sample.arrivals, sample.arrivals[1:], strict=False))


def spread(values: list[float]) -> dict | None:
    return {"median": median(values), "low": min(values), "high": max(values)} if values else None


# --- as text ---------------------------------------------------------------------------------------------------------


def text(report: dict) -> str:
    """The table with what its numbers mean, at most 120 columns wide."""
    wrapped = [textwrap.fill(note, 118, initial_indent="- ", subsequent_indent="  ") for note in notes(report)]
    return "\n".join([heading(report), "", *table(report), "", *wrapped])


def heading(report: dict) -> str:
    where = report["environment"]
    programs = dict.fromkeys(row["program"] for row in report["rows"] if row["program"] not in (None, "kvcourse"))
    versions = ", ".join([f"torch {where['torch']}", *programs])
    threads = f", {where['threads']} thread{'s' * (where['threads'] != 1)}" if where["device"] == "cpu" else ""
    return f"{report['model']} in {where['dtype']} on {where['device_name']}{threads} ({versions})"


def table(report: dict) -> list[str]:
    width = max(len(row["title"]) for row in report["rows"]) + 2
    contexts = "".join(f"{context:>18,}" for context in report["contexts"])
    lines = [
        f"{'':<{width}}{'TTFT at':>16}  decode, tokens/s (share of the bound), at a context of",
        f"{'':<{width}}{TTFT_CONTEXT:>16}{contexts}{'peak memory':>14}",
    ]
    for row in report["rows"]:
        lines += row_lines(row, width, report["rounds"])
    bounds = [tuple(cell["bound"] for cell in row["decode"]) for row in report["rows"] if row["samples"]]
    if len(set(bounds)) == 1 and None not in bounds[0]:  # else each row has its own
        lines.append(f"{'bound':<{width}}{'':>16}" + "".join(f"{number(bound):>18}" for bound in bounds[0]))
    return lines


def row_lines(row: dict, width: int, rounds: int) -> list[str]:
    """Medians; under them, where there were several rounds, the lowest and the highest."""
    if row["error"] is not None:
        return [
            textwrap.fill(f"{row['title']:<{width}}not measured: {row['error']}", 118, subsequent_indent=" " * width)
        ]
    medians = f"{row['title']:<{width}}{seconds(row['ttft']['median']) if row['ttft'] else '-':>16}"
    ranges = f"{'':<{width}}{between(row['ttft'], seconds) if row['ttft'] else '':>16}"
    for cell in row["decode"]:
        speed = cell["tokens_per_second"]
        shared = f"{number(speed['median'])} ({percent(cell['share'])})"
        medians += f"{shared:>18}"
        ranges += f"{between(speed, number):>18}"
    medians += f"{row['peak_bytes'] / 1e9:>11.2f} GB"
    return [medians, ranges.rstrip()] if rounds > 1 else [medians]


def notes(report: dict) -> list[str]:
    """What the numbers mean, and all that whoever reads them must know."""
    rounds, where = report["rounds"], report["environment"]
    measured = f"{report['ceilings']['bytes_per_second'] / 1e9:,.1f} GB/s"
    done = [row for row in report["rows"] if row["error"] is None]
    lines = [
        "; ".join(f"{row['title']}: {row['means']}" for row in done) + ".",
        f"TTFT: time to the first new token after a prompt of {TTFT_CONTEXT} tokens.",
        "decode: one over the median gap between new tokens, right after a prompt of so many tokens; 0 stands for a "
        "prompt of one token.",
        "bound: how often the bytes that one decode step must read, weights and cached keys and values in "
        f"{where['dtype']}, can be read in a second at {measured}, the better of two measurements, before and after. "
        "More than 100% means that a part of the weights stayed in the processor's own cache, or that the machine was "
        "busier during both measurements.",
        memory_note(where["device"], all(row["peak_without_loading"] for row in done)),
    ]
    left_out = [f"{context:,}" for context in CONTEXTS if context not in report["contexts"]]
    if left_out:
        lines.append(f"left out: {' and '.join(left_out)}, which the model's context has no room for.")
    if report["quick"]:
        lines.append("quick: few tokens were timed, so the numbers are rough.")
    if rounds > 1:
        lines.append(f"Medians of {rounds} rounds in which the rows took turns; under them the lowest and the highest.")
    lines += [tell(Difference(**difference)) for difference in report["differences"]]
    if len(done) > 1 and not report["differences"]:
        lines.append("All rows wrote the same tokens.")
    return lines


def memory_note(device: str, without_loading: bool) -> str:
    if device != "cpu":
        return "peak memory: the most that PyTorch's tensors held: weights, cache and what a step needs on the way."
    when = "while it wrote" if without_loading else "so far, loading included"
    return (
        f"peak memory: the most that the row's process had in memory {when}: weights, cache, what a step needs on the "
        "way, Python and its libraries."
    )


def tell(d: Difference) -> str:
    lead = "" if d.lead is None else f"; there the best token was ahead of the second best by {d.lead:.2g} logits"
    return (
        f"DIFFERENT TOKENS: {d.title} wrote {d.token} where {d.other} wrote {d.other_token}, at context {d.context:,}, "
        f"new token {d.place + 1}{lead}. A near tie can fall either way; anything else is a wrong answer."
    )


def number(x: float) -> str:
    """Three digits, or all those before the point."""
    return f"{x:,.0f}" if x >= 100 else f"{x:#.3g}"


def seconds(x: float) -> str:
    return f"{number(x * 1000)} ms" if x < 1 else f"{number(x)} s"


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{100 * share:.2g}%"


def between(spread: dict, write) -> str:
    return f"{write(spread['low'])} to {write(spread['high'])}"
