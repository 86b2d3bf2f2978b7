"""The exercises of notebook 10: worked answers and other right ways pass, the usual mistakes are named; and its table
of statements names the notebooks that judge them."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from exercises import shared_tests, solution

import kvcourse as kv
from kvcourse.check.framework import normal
from kvcourse.parallel import sent_bytes
from kvcourse.quant import QuantLinear, rtn
from kvcourse.statements import STATEMENTS

NOTEBOOK = "10_from_course_to_production"
SOURCES = Path(__file__).resolve().parent.parent / "notebooks" / "src"

RIGHT = {
    "fastest_decode": [
        """
        def fastest_decode(weights, weight_bits, cache_bytes, bytes_per_second):
            read = weights * weight_bits / 8 + cache_bytes
            return bytes_per_second / read
        """,
        """
        def fastest_decode(weights, weight_bits, cache_bytes, bytes_per_second):
            seconds = weights / 8 * weight_bits / bytes_per_second + cache_bytes / bytes_per_second
            return 1 / seconds
        """,
        """
        def fastest_decode(weights, weight_bits, cache_bytes, bytes_per_second):
            bits = torch.tensor([weights * weight_bits, 8 * cache_bytes], dtype=torch.float64)
            return 8 * bytes_per_second / bits.sum()
        """,
    ],
    "joined_product": [
        """
        def joined_product(x, weights):
            together = x @ torch.cat(weights).T
            return list(together.split([len(weight) for weight in weights], dim=-1))
        """,
        """
        def joined_product(x, weights):
            together, start, parts = torch.nn.functional.linear(x, torch.vstack(weights)), 0, []
            for weight in weights:
                parts.append(together[:, start : start + weight.shape[0]])
                start += weight.shape[0]
            return tuple(parts)
        """,
        """
        def joined_product(x, weights):
            ends = np.cumsum([len(weight) for weight in weights])[:-1]
            return torch.tensor_split(torch.einsum("td,rd->tr", x, torch.cat(weights)), ends.tolist(), dim=1)
        """,
        """
        @torch.inference_mode()
        def joined_product(x, weights):
            together = torch.nn.functional.linear(x, torch.cat(weights))
            yield from together.split([len(weight) for weight in weights], dim=-1)
        """,
        """
        def joined_product(x, weights):
            together = (x[:, None] * torch.cat(weights)).sum(-1)
            return together.split([len(weight) for weight in weights], dim=-1)
        """,
        """
        def joined_product(x, weights):
            together = x.numpy() @ np.concatenate([weight.numpy() for weight in weights]).T
            return np.split(together, np.cumsum([len(weight) for weight in weights])[:-1], axis=-1)
        """,
    ],
    "int8_product": [
        """
        def int8_product(x, codes, scale):
            own = x.abs().amax(-1, keepdim=True) / 127
            whole = (x / own).round()
            return whole @ codes.to(x.dtype).T * own * scale
        """,
        """
        def int8_product(x, codes, scale):
            out = torch.zeros(len(x), len(codes))
            for t, token in enumerate(x):
                s = token.abs().max() / 127
                whole = (token / s).round().to(torch.int32)
                out[t] = (codes.to(torch.int32) * whole).sum(1) * s * scale
            return out
        """,
        """
        def int8_product(x, codes, scale):
            s = x.abs().max(dim=1).values[:, None] / 127
            return torch.round(x / s) @ (codes.float() * scale[:, None]).T * s
        """,
    ],
    "gap_percentile": [
        """
        def gap_percentile(answers, p):
            gaps = []
            for times in answers:
                gaps += [after - before for before, after in zip(times, times[1:])]
            return float(np.percentile(gaps, p))
        """,
        """
        def gap_percentile(answers, p):
            return np.quantile(np.concatenate([np.diff(times) for times in answers]), p / 100)
        """,
        """
        def gap_percentile(answers, p):
            gaps = torch.cat([torch.tensor(times, dtype=torch.float64).diff() for times in answers])
            return gaps.quantile(p / 100).item()
        """,
    ],
    "ring_bytes": [
        """
        def ring_bytes(n_layers, d_model, bits, world):
            rounds, piece = 2 * (world - 1), d_model * bits / 8 / world
            return 2 * n_layers * rounds * piece
        """,
        """
        def ring_bytes(n_layers, d_model, bits, world):
            return 4 * n_layers * d_model * bits / 8 * (1 - 1 / world)
        """,
        """
        def ring_bytes(n_layers, d_model, bits, world):
            sent = 0
            for _ in range(2 * n_layers):
                for _ in range(2 * (world - 1)):
                    sent += d_model / world * bits / 8
            return sent
        """,
    ],
}

# Only tokens that are quiet beside the loudest come out wrong.
QUIET_ROUGH = "whole = torch.where(own < own.max() / 50, (x / own).{}(), (x / own).round())"
SEPARATE = """
@{}()
def joined_product(x, weights):
    return [{} for w in weights]
"""

MISTAKES = {
    "fastest_decode": [
        (("weight_bits / 8", "weight_bits"), "bits are taken for bytes"),
        (("weights * weight_bits / 8", "weights"), "one byte each"),
        ((" + cache_bytes", ""), "the cache is missing"),
        (("weights * weight_bits / 8 + cache_bytes", "(weights * weight_bits + cache_bytes) / 8"), "too"),
        (("bytes_per_second / read", "read / bytes_per_second"), "time of a step"),
        ((" + cache_bytes", " - cache_bytes"), "reads both"),
        (
            (
                "bytes_per_second / read",
                "bytes_per_second / (weights * weight_bits / 8) + (cache_bytes and bytes_per_second / cache_bytes)",
            ),
            "their times add up",
        ),
    ],
    "joined_product": [
        ((".split([len(weight) for weight in weights], dim=-1)", ".chunk(len(weights), dim=-1)"), "equal parts"),
        (("weight in weights], dim=-1))", "weight in weights], dim=-1))[::-1]"), "wrong order"),
        (("torch.cat(weights)", "torch.cat(weights[::-1])"), "cut in another"),
        (("for weight in weights]", "for weight in weights[::-1]]"), "the sizes of the cuts"),
        (("return list(together.split([len(weight) for weight in weights], dim=-1))", "return together"), "not cut"),
        (
            (
                "list(together.split([len(weight) for weight in weights], dim=-1))",
                "[together[:, i :: len(weights)] for i in range(len(weights))]",
            ),
            "stand together",
        ),
        (
            (
                "return list(together.split([len(weight) for weight in weights], dim=-1))",
                "return [x @ w.T for w in weights]",
            ),
            "products",
        ),
        (("torch.cat(weights).T", "torch.cat(weights)"), "it raises RuntimeError"),
        *[
            (SEPARATE.format(mode, product), "it took 3 products")
            for mode in ("torch.no_grad", "torch.inference_mode")
            for product in (
                "torch.inner(x, w)",
                "torch.nn.functional.linear(x, w)",
                "torch.einsum('td,rd->tr', x, w)",
                "torch.tensordot(x, w, ([1], [1]))",
                "torch.linalg.matmul(x, w.T)",
                "torch.linalg.multi_dot([x, w.T])",
                "torch.addmm(torch.zeros(len(w)), x, w.T)",
                "torch.baddbmm(torch.zeros(1, len(x), len(w)), x[None], w.T[None])[0]",
                "(x[:, None] * w).sum(-1)",
                "torch.linalg.vecdot(x[:, None], w)",
            )
        ],
    ],
    "int8_product": [
        (("x.abs().amax(-1, keepdim=True)", "x.abs().amax()"), "one scale, that of the loudest"),
        (
            (
                "own = x.abs().amax(-1, keepdim=True) / 127\n    whole = (x / own).round()\n"
                "    return whole @ codes.to(x.dtype).T * own * scale",
                "own = x.abs().amax(0, keepdim=True) / 127\n    whole = (x / own).round()\n"
                "    return whole @ codes.to(x.dtype).T * scale",
            ),
            "wrong dimension",
        ),
        (
            (
                "own = x.abs().amax(-1, keepdim=True) / 127\n    whole = (x / own).round()\n"
                "    return whole @ codes.to(x.dtype).T * own * scale",
                "own = x.abs().amax(0, keepdim=True) / 127\n    whole = (x / own).round() * own\n"
                "    return whole @ codes.to(x.dtype).T * scale",
            ),
            "cannot be taken out",
        ),
        (("(x / own).round()", "x.round() / own"), "before they are divided"),
        ((".round()", ""), "nothing is rounded"),
        ((".round()", ".to(torch.int8).to(x.dtype)"), "cut off"),
        ((" * own", ""), "the scale of the tokens is missing"),
        ((" * own * scale", " * own"), "the scale of the weights is missing"),
        ((".abs()", ""), "largest magnitude"),
        (("/ 127", "/ 128"), "divide by 127"),
        (("/ 127", "/ 255"), "divide by 127"),
        *[(("whole = (x / own).round()", QUIET_ROUGH.format(rough)), "under 'row 0'") for rough in ("trunc", "ceil")],
    ],
    "gap_percentile": [
        (("for times in answers:", "for times in ([0.0, *t] for t in answers):"), "the first token"),
        (
            ("for times in answers:", "for times in [[t for times in answers for t in times]]:"),
            "of one answer to the first",
        ),
        (("for times in answers:", "for times in [sorted(t for times in answers for t in times)]:"), "are mixed"),
        (
            (
                "float(np.percentile(gaps, p))",
                "float(np.mean([np.percentile(np.diff(times), p) for times in answers if len(times) > 1]))",
            ),
            "one percentile of all",
        ),
        (
            (
                "float(np.percentile(gaps, p))",
                "float(np.percentile([np.diff(times).mean() for times in answers if len(times) > 1], p))",
            ),
            "TPOT",
        ),
        (("np.percentile(gaps, p)", "np.mean(gaps)"), "the mean of the gaps"),
        (("np.percentile(gaps, p)", "np.max(gaps)"), "the largest gap"),
        (("np.percentile(gaps, p)", "np.percentile(gaps, p / 100)"), "a percentage"),
        (("np.percentile(gaps, p)", "np.percentile(gaps, 100 - p)"), "the other end"),
        (
            ("np.percentile(gaps, p)", "np.percentile([t for times in answers for t in times], p)"),
            "of the arrival times",
        ),
        (("float(np.percentile(gaps, p))", "sorted(gaps)[int(len(gaps) * p / 100)]"), "interpolates"),
    ],
    "ring_bytes": [
        (("2 * (world - 1)", "world - 1"), "goes round twice"),
        (("return 2 * n_layers * rounds", "return n_layers * rounds / 2"), "a quarter"),
        (("bits / 8", "bits"), "bits are taken for bytes"),
        ((" / 8 / world", " / 8"), "d_model / world"),
        (("rounds * piece", "(world - 1) * d_model * bits / 8"), "every other one"),
        (("2 * (world - 1)", "2 * world"), "its own piece"),
        (("2 * n_layers", "2"), "one layer's"),
        (("rounds * piece", "d_model * bits / 8"), "to be added up"),
    ],
}

TestExercises = shared_tests(NOTEBOOK, RIGHT, MISTAKES)


def test_worked_answers_by_hand():
    # a million weights of 8 bits are 1 MB, at 2 MB a second: two tokens a second
    assert solution(NOTEBOOK, "fastest_decode")(1_000_000, 8, 0, 2_000_000) == 2
    assert solution(NOTEBOOK, "fastest_decode")(1_000_000, 8, 1_000_000, 2_000_000) == 1
    assert solution(NOTEBOOK, "gap_percentile")([[1.0, 1.1, 1.3]], 50) == pytest.approx(0.15)
    # 2 ranks, 8 numbers of 2 bytes: a piece of 8 bytes, in 2 rounds, in each of 2 all_reduces
    assert solution(NOTEBOOK, "ring_bytes")(1, 8, 16, 2) == 32
    x, codes = torch.tensor([[127.0, 1.4], [0.0, 0.02]]), torch.tensor([[1, 10]], dtype=torch.int8)
    made = solution(NOTEBOOK, "int8_product")(x, codes, torch.tensor([0.5]))
    assert made.flatten().tolist() == pytest.approx([0.5 * (127 + 10), 0.5 * 0.2])  # 1.4 is rounded to 1, 0.02 is kept


def test_gaps_are_those_of_the_course():
    times = [[0.4, 0.5, 0.7], [0.1, 0.15], [0.3]]
    made = [kv.Generation(1, arrivals=each) for each in times]
    gaps = [gap for each in made for gap in each.itl]
    assert solution(NOTEBOOK, "gap_percentile")(times, 95) == pytest.approx(np.percentile(gaps, 95))
    assert len(gaps) == 3


@pytest.mark.parametrize("world", [1, 2])
def test_ring_bytes_are_those_that_the_package_sends(world):
    config = kv.load_model("tiny-gqa").config
    made = solution(NOTEBOOK, "ring_bytes")(config.n_layers, config.d_model, 32, world)
    assert made == pytest.approx(sent_bytes(config, world, bits=32))


def test_the_joined_product_is_that_of_a_compiled_layer():
    lm = kv.load_model("tiny-gqa", dtype=torch.float32, device="cpu")
    attention, joined = lm.model.layers[0].self_attn, kv.compiled(lm).model.weights[0].qkv.weight
    weights = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    x = normal(2, lm.config.d_model)
    parts = solution(NOTEBOOK, "joined_product")(x, weights)
    torch.testing.assert_close(torch.cat(parts, dim=-1), x @ joined.T)


def test_the_int8_product_is_that_of_the_packages_layer():
    weight, x = normal(48, 64), normal(3, 64, seed=1) * torch.tensor([[0.01], [1.0], [100.0]])
    packed = rtn(weight, bits=8, symmetric=True)
    scale = packed.scale.float()[:, 0]
    codes = (packed.dequantize(torch.float32) / scale[:, None]).round().to(torch.int8)
    made = solution(NOTEBOOK, "int8_product")(x, codes, scale)
    layer = QuantLinear(packed, None, torch.float32, "int8 activations")
    torch.testing.assert_close(made, layer(x), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(made, x @ weight.T, rtol=1e-3, atol=1e-4)  # rounding does something


def judged(source: str) -> set[int]:
    """The numbers of the statements that a notebook gives a verdict on."""
    return {int(number) for number in re.findall(r"results\.verdict\(\s*(\d+),", source)}


def test_the_table_names_the_notebooks_that_judge():
    text = (SOURCES / f"{NOTEBOOK}.py").read_text(encoding="utf-8")
    table = ast.literal_eval(re.search(r"^NOTEBOOKS = (\{.*?^\})", text, re.DOTALL | re.MULTILINE)[1])
    assert sorted(number for numbers in table.values() for number in numbers) == list(STATEMENTS)
    for source in SOURCES.glob("*.py"):
        assert set(table.get(source.stem[:2], ())) <= judged(source.read_text(encoding="utf-8")), source.stem
