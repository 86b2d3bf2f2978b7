"""From what a race brought to numbers, and from the numbers to a table. The report is plain data, as it is stored."""

import platform
import textwrap
from dataclasses import asdict
from datetime import datetime
from statistics import median

import psutil
import torch

from kvcourse import __version__
from kvcourse.bench.contestants import CONTEXTS, SCORED
from kvcourse.bench.race import Difference, Race, Row, Sample
from kvcourse.device import device_name
from kvcourse.roof import Ceilings

SCHEMA = 2  # of the stored report; it changes when a field changes its meaning or goes
TTFT_CONTEXT = 512


def make_report(race: Race, ceilings: Ceilings, quick: bool) -> dict:
    """Everything that is known about a race, in a form that JSON can hold."""
    rows = [summarize(row, race.contexts, ceilings) for row in race.rows]
    plain = next((row.perplexity for row in race.rows if row.exact and row.perplexity), None)
    for row in rows:
        row["perplexity_over_exact"] = row["perplexity"] / plain if plain and row["perplexity"] else None
    return {
        "schema": SCHEMA,
        "kvcourse": __version__,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "model": race.model,
        "environment": environment(race.facts),
        "ceilings": asdict(ceilings),
        "rounds": race.rounds,
        "quick": quick,
        "contexts": race.contexts,
        "ttft_context": TTFT_CONTEXT if TTFT_CONTEXT in race.contexts else None,
        "scored_tokens": SCORED,
        "rounded": race.facts["rounded"],
        "rows": rows,
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
    peaks = [sample.peak_bytes for sample in row.samples if sample.peak_bytes is not None]
    last = row.samples[-1] if row.samples else None
    return {
        "title": row.title,
        "error": row.error,
        **{key: row.about.get(key) for key in ("program", "means", "weights", "reason", "peak_without_loading")},
        "exact": row.exact,
        "texts": row.texts,
        "ttft": spread([sample.arrivals[0] for sample in by_context.get(TTFT_CONTEXT, [])]),
        "decode": [decode_speed(context, samples, row.texts, ceilings) for context, samples in by_context.items()],
        "peak_bytes": max(peaks, default=None),
        "perplexity": row.perplexity,
        "compilations": last and last.compilations,
        "compile_seconds": last and last.compile_seconds,
        "samples": [asdict(sample) for sample in row.samples],
    }


def decode_speed(context: int, samples: list[Sample], texts: int, ceilings: Ceilings) -> dict:
    """Tokens per second of all texts at one context, how many there could be at most, and the share of that."""
    speed = spread([texts * steps_per_second(sample) for sample in samples])
    step_bytes = samples[0].step_bytes if samples else None
    bound = texts * ceilings.bytes_per_second / step_bytes if samples else None
    share = speed["median"] / bound if samples else None
    return {
        "context": context,
        "tokens_per_second": speed,
        "step_bytes": step_bytes,
        "bound": bound,
        "share": share,
    }


def steps_per_second(sample: Sample) -> float:
    """One over the median gap. The first token's wait is a prefill and no gap."""
    return 1 / median(after - before for before, after in zip(sample.arrivals, sample.arrivals[1:], strict=False))


def spread(values: list[float]) -> dict | None:
    return {"median": median(values), "low": min(values), "high": max(values)} if values else None


# --- as text ---------------------------------------------------------------------------------------------------------


def text(report: dict) -> str:
    """The table with what its numbers mean, at most 120 columns wide."""
    wrapped = [textwrap.fill(note, 118, initial_indent="- ", subsequent_indent="  ") for note in notes(report)]
    return "\n".join([textwrap.fill(heading(report), 118), "", *table(report), "", *wrapped])


def heading(report: dict) -> str:
    where = report["environment"]
    programs = dict.fromkeys(row["program"] for row in report["rows"] if row["program"] not in (None, "kvcourse"))
    versions = ", ".join([f"torch {where['torch']}", *programs])
    threads = f", {where['threads']} thread{'s' * (where['threads'] != 1)}" if where["device"] == "cpu" else ""
    return f"{report['model']} in {where['dtype']} on {where['device_name']}{threads} ({versions})"


COLUMNS = (15, 17, 11, 15)  # how wide TTFT, each speed, memory and perplexity are


def table(report: dict) -> list[str]:
    width = max(len(row["title"]) for row in report["rows"]) + 1
    ttft, speed, memory, perplexity = COLUMNS
    contexts = "".join(f"{context:>{speed},}" for context in report["contexts"])
    lines = [
        f"{'':<{width}}{'TTFT at':>{ttft}}  decode, tokens/s (share of the bound), at a context of",
        f"{'':<{width}}{TTFT_CONTEXT:>{ttft}}{contexts}{'memory':>{memory}}{'perplexity':>{perplexity}}",
    ]
    for row in report["rows"]:
        lines += row_lines(row, width, report["rounds"])
    return lines


def row_lines(row: dict, width: int, rounds: int) -> list[str]:
    """Medians; under them, where there were several rounds, the lowest and the highest."""
    if row["error"] is not None:
        said = f"{row['title']:<{width}} not measured: {row['error']}"
        return [textwrap.fill(said, 118, subsequent_indent=" " * (width + 1))]
    ttft, speed, memory, perplexity = COLUMNS
    medians = f"{row['title']:<{width}}{seconds(row['ttft']['median']) if row['ttft'] else '-':>{ttft}}"
    ranges = f"{'':<{width}}{between(row['ttft'], seconds) if row['ttft'] else '':>{ttft}}"
    for cell in row["decode"]:
        shared = f"{number(cell['tokens_per_second']['median'])} ({percent(cell['share'])})"
        medians += f"{shared:>{speed}}"
        ranges += f"{between(cell['tokens_per_second'], number):>{speed}}"
    peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.2f} GB"
    medians = (medians + f"{peak:>{memory}}{quality(row):>{perplexity}}").rstrip()
    return [medians, ranges.rstrip()] if rounds > 1 else [medians]


def quality(row: dict) -> str:
    """Perplexity, and how much it is above that of the exact rows."""
    if row["perplexity"] is None:
        return ""
    if row["exact"] or row["perplexity_over_exact"] is None:
        return f"{row['perplexity']:.2f}"
    return f"{row['perplexity']:.2f} ({row['perplexity_over_exact'] - 1:+.1%})"


def notes(report: dict) -> list[str]:
    """What the numbers mean, and all that whoever reads them must know."""
    rounds, where = report["rounds"], report["environment"]
    measured = f"{report['ceilings']['bytes_per_second'] / 1e9:,.1f} GB/s"
    done = [row for row in report["rows"] if row["error"] is None]
    lines = [
        meanings(done),
        f"TTFT: time to the first new token after a prompt of {TTFT_CONTEXT} tokens.",
        "decode: one over the median gap between new tokens, right after a prompt of so many tokens; 0 stands for a "
        "prompt of one token.",
        "bound: how often the bytes that one decode step of a row must read, its weights in the form it keeps them and "
        f"its cached keys and values, can be read in a second at {measured}, which a float32 matrix of 1.07 GB times a "
        "vector reaches here (the better of two measurements, before and after). More than 100% means that a part of "
        "the weights stayed in the processor's own cache, or that the machine was busier during both measurements.",
        memory_note(where["device"], all(row["peak_without_loading"] for row in done)),
    ]
    if any(row["perplexity"] for row in done):
        lines.append(
            f"perplexity: of the first {report['scored_tokens']:,} tokens of the course's evaluation text, with the "
            "row's own weights; in brackets how much higher it is than with the weights as they were loaded."
            + rounded_note(report["rounded"])
        )
    lines += [said for row in done if (said := compile_note(row))]
    left_out = [f"{context:,}" for context in CONTEXTS if context not in report["contexts"]]
    if left_out:
        lines.append(f"left out: {' and '.join(left_out)}, which the model's context has no room for.")
    if report["quick"]:
        lines.append("quick: few tokens were timed, so the numbers are rough.")
    if rounds > 1:
        lines.append(f"Medians of {rounds} rounds in which the rows took turns; under them the lowest and the highest.")
    return lines + token_notes(report, done)


def rounded_note(kind: str | None) -> str:
    """What must be known of a model whose file has few bits already."""
    if kind is None:
        return ""
    return f" The model's file keeps them in {kind}: rounding them once more comes on top of that."


def compile_note(row: dict) -> str | None:
    """What was compiled for a row, if anything, and how long that took."""
    if row["reason"]:
        return f"{row['title']}: nothing is compiled. {row['reason']}"
    if not row["compilations"]:
        return None
    return (
        f"{row['title']}: {row['compilations']} compilations took {seconds(row['compile_seconds'])} before the clock "
        "started; none came later."
    )


def token_notes(report: dict, done: list[dict]) -> list[str]:
    """Who wrote the same tokens, and where the others part."""
    differences = [Difference(**difference) for difference in report["differences"]]
    lines = [tell(difference) for difference in differences if difference.wrong]
    parting = {difference.title for difference in differences}
    same = [row["title"] for row in done if row["title"] not in parting]
    if len(same) == len(done) > 1:
        lines.append("All rows wrote the same tokens.")
    elif len(same) > 1:
        lines.append(f"The same tokens were written by {', '.join(same)}.")
    parted = {row["title"]: [d for d in differences if d.title == row["title"] and not d.wrong] for row in done}
    told = [tell_parting(found) for found in parted.values() if found]
    if told:
        lines.append(
            f"Rows that compute with other numbers may write other tokens: {'; '.join(told)}. lead: by how many logits "
            "the best token was ahead of the second best there."
        )
    return lines


def meanings(rows: list[dict]) -> str:
    """How each row writes; rows of one kind together."""
    titles: dict[str, list[str]] = {}
    for row in rows:
        titles.setdefault(row["means"], []).append(row["title"])
    return "; ".join(f"{' and '.join(names)}: {means}" for means, names in titles.items()) + "."


def memory_note(device: str, without_loading: bool) -> str:
    if device != "cpu":
        return "memory: the most that PyTorch's tensors held: weights, cache and what a step needs on the way."
    when = "while it wrote" if without_loading else "so far, loading included"
    return (
        f"memory: the most that the row's process had in memory {when}: weights, cache, what a step needs on the way, "
        "Python and its libraries."
    )


def tell(d: Difference) -> str:
    lead = "" if d.lead is None else f"; there the best token was ahead of the second best by {d.lead:.2g} logits"
    return (
        f"DIFFERENT TOKENS: {d.title} wrote {d.token} where {d.other} wrote {d.other_token}, at context {d.context:,}, "
        f"new token {d.place + 1}{lead}. A near tie can fall either way; anything else is a wrong answer."
    )


def tell_parting(differences: list[Difference]) -> str:
    """Of one row: other tokens are no error there."""
    places = []
    for d in differences:
        lead = "" if d.lead is None else f" (lead {d.lead:.2g})"
        places.append(f"at context {d.context:,} from new token {d.place + 1} on{lead}")
    return f"{differences[0].title} wrote others than {differences[0].other} {', '.join(places)}"


def number(x: float) -> str:
    """Three digits, or all those before the point."""
    return f"{x:,.0f}" if x >= 100 else f"{x:#.3g}"


def seconds(x: float) -> str:
    return f"{number(x * 1000)} ms" if x < 1 else f"{number(x)} s"


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{100 * share:.2g}%"


def between(spread: dict, write) -> str:
    return f"{write(spread['low'])} to {write(spread['high'])}"
