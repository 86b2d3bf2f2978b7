"""The pictures of notebook 10, over all that their sliders and data can be."""

import pytest
from figures import drawn, labelled, texts
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle

import kvcourse as kv
from kvcourse.plots import production as module
from kvcourse.plots.base import COLORS, png
from kvcourse.results import VERDICTS


def bars(ax):
    return [patch for patch in ax.patches if isinstance(patch, Rectangle)]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_time_apart_stacks_parts_in_milliseconds():
    rows = {"at least": {"weights": 0.02, "cache": 0.001}, "plain": {"linear layers": 0.03, "small operations": 0.015}}
    figure = drawn(kv.plots.time_apart(rows, "a title"))
    ax = figure.axes[0]
    shown = [bar for bar in bars(ax) if bar.get_width()]
    assert [bar.get_width() for bar in shown] == pytest.approx([20, 1, 30, 15])
    assert [bar.get_x() for bar in shown] == pytest.approx([0, 20, 0, 30])
    assert texts(ax) == ["21 ms", "45 ms"] and ax.get_title(loc="left") == "a title"
    assert legend(figure) == ["weights, linear layers", "cache", "small operations"]


def test_time_apart_is_never_longer_than_what_was_measured():
    rows = {"below its bound": {"weights": 0.030, "cache": 0.001, "overhead": -0.002}}
    ax = drawn(kv.plots.time_apart(rows, "a title")).axes[0]
    assert [bar.get_width() for bar in bars(ax) if bar.get_width()] == pytest.approx([29, 2])
    assert [bar.get_linestyle() for bar in bars(ax) if bar.get_width()] == ["solid", "--"]
    assert texts(ax) == ["29 ms, not 31:\nfaster than the ceiling"]


def test_time_apart_gives_what_reads_the_same_one_look_and_all_others_another():
    looks = list(module.PARTS.values())
    assert (
        module.PARTS["weights"] == module.PARTS["linear layers"] and module.PARTS["cache"] == module.PARTS["attention"]
    )
    assert len(set(looks)) == 4 == len({hatch for _, hatch in looks})
    png(kv.plots.time_apart({"alone": {part: 0.001 for part in module.PARTS}}, "all parts"))


def test_speed_ladder_has_bars_bounds_and_quality():
    rungs = [("plain", 18.0, 43.0, None), ("bfloat16", 66.0, 86.0, 0.0004), ("int8", 90.0, 170.0, 0.008)]
    ax = drawn(kv.plots.speed_ladder(rungs)).axes[0]
    assert [bar.get_width() for bar in bars(ax)] == [18, 66, 90]
    assert [line.get_xdata()[0] for line in ax.lines if len(line.get_xdata())] == [43, 86, 170]
    *rows, head = texts(ax)
    assert rows == ["18 (42%)", "66 (77%), perplexity +0.0%", "90 (53%), perplexity +0.8%"]
    assert head == "tokens/s (share of the bound)"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["plain", "bfloat16", "int8"]


def test_speed_ladder_above_its_bound():
    ax = drawn(kv.plots.speed_ladder([("a small model", 2000.0, 1500.0, -0.001)])).axes[0]
    assert ax.get_xlim()[1] > 2000 and texts(ax)[0] == "2000 (133%), perplexity -0.1%"


def test_users_at_once_and_who_serves_one_at_a_time():
    ax = drawn(kv.plots.users_at_once({"engine": (18.0, 52.0), "transformers": (27.0, None)}, 4)).axes[0]
    assert [bar.get_width() for bar in bars(ax)] == [18, 52, 27, 0]
    assert texts(ax) == ["18", "52", "27", "one at a time"]
    assert "4 at once, together" in legend(ax.figure)


def test_known_beginnings_in_milliseconds():
    ax = drawn(
        kv.plots.known_beginnings({"engine": {"new": 0.5, "known": 0.05}, "server": {"new": 1.2, "known": 0.004}})
    )
    ax = ax.axes[0]
    new, known = ax.containers
    assert [bar.get_height() for bar in new] == pytest.approx([500, 1200])
    assert [bar.get_height() for bar in known] == pytest.approx([50, 4])
    assert texts(ax) == ["500 ms", "1,200 ms", "50 ms", "4.0 ms"]
    png(kv.plots.known_beginnings({"engine": {"new": 0.5, "known": 0.6}}))


@pytest.mark.parametrize(
    "name", ["Llama 3 70B", "Llama 3.1 8B", "Llama 3.1 405B", "Gemma 3 27B", "Qwen3 32B", "SmolLM2 135M"]
)
@pytest.mark.parametrize("chosen", [4000, 1_000_000])
def test_very_long_text_for_every_model_of_the_widget(name, chosen):
    costs = {n: kv.long_context(kv.PUBLISHED[name], n) for n in sorted({1024, chosen, 2**20})}
    held, prefill, decode = kv.plots.very_long_text(costs, 141e9, chosen).axes
    assert list(labelled(held, "cache").get_ydata()) == [cost.cache_bytes / 1e9 for cost in costs.values()]
    assert list(labelled(prefill, "attention").get_ydata()) == [c.prefill.attention_seconds for c in costs.values()]
    assert list(labelled(decode, "cache, reading").get_ydata()) == [c.decode.cache_seconds for c in costs.values()]
    for ax in (held, prefill, decode):
        assert chosen in [line.get_xdata()[0] for line in ax.lines if line.get_linestyle() == ":"]
    assert texts(held) == ["one device, 141 GB"]


def test_very_long_text_is_drawn():
    drawn(kv.plots.very_long_text({n: kv.long_context(kv.PUBLISHED["Llama 3 70B"], n) for n in (1000, 10**6)}, 141e9))


def test_price_by_length_names_both_lines():
    prices = {"without a cache": [10.0, 40.0, 210.0], "with a cache": [3.0, 3.1, 3.3]}
    ax = drawn(kv.plots.price_by_length([64, 256, 1024], prices)).axes[0]
    assert list(labelled(ax, "without a cache").get_ydata()) == [10, 40, 210]
    assert labelled(ax, "without a cache").get_color() == COLORS["naive"]
    assert labelled(ax, "with a cache").get_color() == COLORS["cached"]
    assert texts(ax) == ["$10", "$40", "$210", "$3", "$3.1", "$3.3"]
    png(kv.plots.price_by_length([64, 511], {"without a cache": [0.2, 0.1], "with a cache": [0.3, 0.3]}))


def test_verdict_board_has_a_field_for_each_statement():
    verdicts = {1: "holds", 2: "holds with a condition", 3: "wrong as said"} | {n: None for n in range(4, 30)}
    ax = drawn(kv.plots.verdict_board(verdicts)).axes[0]
    assert texts(ax)[::2] == [str(number) for number in range(1, 30)]
    assert texts(ax)[1:8:2] == ["=", "if", "no", ""]
    assert [bar.get_facecolor() for bar in bars(ax)][:4] == [to_rgba(module.BOARD[v][0]) for v in (*VERDICTS, None)]
    assert len(legend(ax.figure)) == 4


def test_every_verdict_has_a_color_and_a_sign():
    assert set(module.BOARD) == {*VERDICTS, None}
    assert len({color for color, _ in module.BOARD.values()}) == len({sign for _, sign in module.BOARD.values()}) == 4
