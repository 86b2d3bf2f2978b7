"""The report of `kvcourse bench --serving` as text, at most 120 columns wide."""

import textwrap

from kvcourse.bench.report import between, heading, meanings, number, percent, seconds

WIDTH = 30  # of what stands in front of the numbers


def text(report: dict) -> str:
    sections = [batches(report), step(report), trace(report["trace"]), scheduler(report["scheduler"])]
    weights = compiled(report) if report["compiled"] else []
    return "\n\n".join([heading(report), *weights, *("\n".join(lines) for lines in sections)])


def compiled(report: dict) -> list[str]:
    """What is compiled, and when."""
    late = report["compilations_in_trace"]
    counted = f"{late} of them while the trace was replayed" if late else "all of them before the clock started"
    said = f"The engine's model is compiled, its weights in {report['weights']}: {report['compilations']} compilations"
    return [f"{said}, {counted}."]


def notes(*lines: str) -> list[str]:
    return ["", *(textwrap.fill(line, 118, initial_indent="- ", subsequent_indent="  ") for line in lines)]


def batches(report: dict) -> list[str]:
    """Output tokens a second, median with the lowest and the highest, and the ratio of the engine to each row."""
    sizes = [cell["size"] for cell in report["rows"][0]["batches"]]
    lines = [
        f"Batches, {report['prompt_tokens']} tokens in and {report['new_tokens']} out each: output tokens/s",
        f"{'':<16}" + "".join(f"{f'batch {size}':>32}{'engine / this':>16}" for size in sizes),
    ]
    ranges = report["rounds"] > 1
    for row in report["rows"]:
        if row["error"] is not None:
            said = f"{row['title']:<16}not measured: {row['error']}"
            lines.append(textwrap.fill(said, 118, subsequent_indent=" " * 16))
            continue
        lines.append(f"{row['title']:<16}" + "".join(cell(batch, ranges) for batch in row["batches"]))
    done = [row for row in report["rows"] if row["error"] is None]
    return lines + notes(
        meanings(done),
        "tokens/s: all new tokens of the batch over the time from the first submission to the last token."
        + (f" Medians of {report['rounds']} rounds in turns (lowest to highest)." if ranges else ""),
        *(["quick: few tokens were timed, so the numbers are rough."] if report["quick"] else []),
        *(same_tokens(row, report["rows"][0], report["differences"], sizes) for row in done[1:]),
    )


def cell(batch: dict, ranges: bool) -> str:
    speed, ratio = batch["tokens_per_second"], batch["engine_over_this"]
    shown = number(speed["median"]) + (f" ({between(speed, number)})" if ranges else "")
    return f"{shown:>32}" + (f"{ratio['median']:>15.2f}x" if ratio else f"{'-':>16}")


def same_tokens(row: dict, engine: dict, differences: list[dict], sizes: list[int]) -> str:
    """Whether a row wrote what the engine wrote."""
    found = [difference for difference in differences if difference["title"] == row["title"]]
    if not found:
        return f"{row['title']} wrote the same tokens as the engine."
    where = " and ".join(f"{sum(d['size'] == size for d in found)} of {size} texts" for size in sizes)
    leads = [difference["lead"] for difference in found]
    return (
        f"DIFFERENT TOKENS: {row['title']} wrote others than the engine in {where}. Where they part, the best token "
        f"was ahead of the second best by {min(leads):.2g} to {max(leads):.2g} logits. A near tie can fall either way, "
        "and in bfloat16 or fewer bits a lead of some tenths is one; anything else is a wrong answer."
    )


def step(report: dict) -> list[str]:
    """The parts of a decode step; their shares add up to the whole."""
    found = report["step"]
    if found is None and report["compiled"]:
        return ["Where a step's time goes is measured for plain models only: compiled functions hide their parts."]
    if found is None:
        return ["Where a step's time goes is measured on the CPU only: on a GPU the CPU's clock does not see it."]
    title = f"A decode step of {found['size']} texts of about {found['context']} tokens"
    lines = [title, f"{'':<{WIDTH}}{'share':>8}{'time':>12}{'operations':>14}"]
    for part in found["parts"]:
        count = f"{part['operations']:,.0f}" if part["operations"] else ""
        lines.append(f"{part['part']:<{WIDTH}}{part['share']:>8.1%}{seconds(part['seconds']):>12}{count:>14}".rstrip())
    whole = sum(part["share"] for part in found["parts"])
    lines.append(f"{'all':<{WIDTH}}{whole:>8.1%}{seconds(found['profiled_seconds']):>12}")
    return lines + notes(
        f"Mean of {found['steps']} steps with PyTorch's profiler running; without it the median step took "
        f"{seconds(found['seconds'])}. The rest is Python between operations, choosing tokens, the books of the pages, "
        "and the profiler itself."
    )


def trace(found: dict) -> list[str]:
    """All at once, and at a share of the capacity that this shows."""
    runs = {"all at once": found["all_at_once"], f"at {percent(found['load'])} of capacity": found["at_load"]}
    longest = found["longest"]
    lines = [
        f"A trace of {found['requests']} mixed requests, prompts of up to {longest['prompt']} tokens and answers of up "
        f"to {longest['answer']}",
        f"{'':<{WIDTH}}" + "".join(f"{name:>26}" for name in runs),
        line("output tokens/s", [number(run["tokens_per_second"]) for run in runs.values()]),
    ]
    for name in ("ttft", "itl"):
        values = [" / ".join(milliseconds(value) for value in run[name].values()) for run in runs.values()]
        lines.append(line(f"{name.upper()} p50 / p95 / p99, ms", values))
    lines += [
        line("preemptions", [f"{run['preemptions']:,}" for run in runs.values()]),
        line("most blocks in use", [f"{run['peak_blocks']:,} of {found['num_blocks']:,}" for run in runs.values()]),
        line("steps", [f"{run['steps']:,}" for run in runs.values()]),
    ]
    return lines + notes(
        f"capacity: {number(found['capacity'])} requests/s, at which the requests are served when all are there from "
        f"the start. In the second run they come at {number(found['rate'])} a second, at random (Poisson). A run's "
        "clock moves by what each step took and jumps over the time in which there is nothing to do.",
    )


def line(name: str, values: list[str]) -> str:
    return f"{name:<{WIDTH}}" + "".join(f"{value:>26}" for value in values)


def milliseconds(value: float | None) -> str:
    return "-" if value is None else number(1000 * value)


def scheduler(found: dict) -> list[str]:
    """The books alone."""
    early, late = found["steps_per_second_early"], found["steps_per_second_late"]
    said = (
        f"The scheduler alone, {found['requests']:,} requests: {number(early)} steps/s while the second tenth of them "
        f"ended, {number(late)} steps/s while the ninth did ({found['steps']:,} steps)."
    )
    return textwrap.wrap(said, 118)
