"""The table that compares the models, checked against numbers worked out by hand."""

import math
from types import SimpleNamespace

import pytest
import torch
import training_standin as standin

import kvcourse as kv
from kvcourse.quality import Recall
from kvcourse.training import report
from kvcourse.training.report import Measured, measure, text

CONFIG = kv.ModelConfig(
    vocab_size=2000, n_layers=4, n_heads=8, n_kv_heads=2, d_model=192, d_ff=512, tie_embeddings=True
)


def measured(name, losses, right=190, **changes):
    recalls = [Recall(right, 200, 16, 0.705), Recall(right // 2, 200, 64)]
    config = kv.ModelConfig(**(vars(CONFIG) | changes))
    return Measured(name, config, {"validation": [1.0, 1.0], "test": losses}, recalls)


def cells(table, title):
    """What stands behind the title of a row."""
    (line,) = (line for line in table.splitlines() if line.startswith(title))
    return line.removeprefix(title).split()


def test_the_table_by_hand():
    """log 4 and log 9 have the mean log 6; losses 0.1 higher in each row are a perplexity e^0.1 = 1.1052 as high."""
    first = measured("tiny-mha", [math.log(4), math.log(9)], n_kv_heads=8)
    second = measured("tiny-gqa", [math.log(4) + 0.1, math.log(9) + 0.1])
    third = measured("tiny-window", [math.log(4), math.log(9) + 0.2], right=100, n_kv_heads=8, window=64)
    table = text([first, second, third])
    assert cells(table, "perplexity, test") == ["6.000", "6.631", "6.631"]
    assert cells(table, "perplexity, validation") == ["2.718"] * 3
    # the third differs by 0 and 0.2: standard deviation 0.1414, standard error 0.1, times 1.96
    (_, line) = (line for line in table.splitlines() if line.startswith("  against tiny-mha"))
    assert line.split()[2:] == ["+10.52%", "±", "0.00%", "+10.52%", "±", "19.60%"]
    assert cells(table, "window") == ["none", "none", "64"]
    assert cells(table, "query / key-value heads") == ["8", "/", "8", "8", "/", "2", "8", "/", "8"]
    # 2 x 4 layers x heads x 24 numbers x 2 bytes a token
    assert cells(table, "KV cache in fp16") == ["3,072", "B", "a", "token", "768", "B", "a", "token"] + ["3,072"] + [
        "B",
        "a",
        "token",
    ]
    assert cells(table, "recall at") == ["guessed"]
    assert cells(table, "  16 tokens")[0] == "70.5%"
    assert cells(table, "  16 tokens")[1::4] == ["95.0%", "95.0%", "50.0%"]
    assert cells(table, "  64 tokens")[0] == "47.5%"  # what guessing gives is not known
    low, high = Recall(190, 200, 16).low, Recall(190, 200, 16).high
    assert f"95.0% ({100 * low:.1f} to {100 * high:.1f})" in table
    assert "best first (test): tiny-mha, tiny-gqa, tiny-window." in table
    assert "200 questions" in table and "2 rows (validation), 2 rows (test)" in table


def test_the_order_is_by_perplexity():
    table = text([measured("worse", [2.0, 2.0]), measured("better", [1.0, 1.0])])
    assert "best first (test): better, worse." in table


def test_four_models_fit_into_120_columns():
    names = ("tiny-mha", "tiny-gqa", "tiny-mqa", "tiny-window")
    table = text([measured(name, [1.0, 2.0], right=200, n_kv_heads=8) for name in names])
    assert max(map(len, table.splitlines())) <= 120
    assert cells(table, "  16 tokens") == ["70.5%"] + ["100.0%", "(98.1", "to", "100.0)"] * 4  # with a space between


def test_one_model_is_compared_with_none():
    table = text([measured("tiny-mha", [1.0])])
    assert "against" not in table and "best first" not in table
    assert cells(table, "perplexity, test") == ["2.718"]


def test_measure_asks_every_row_and_distance(monkeypatch):
    """A model with an embedding of zeros finds each of the 40 tokens as likely: its perplexity is 40."""
    recipe = standin.Recipe()
    model = standin.new_model(recipe, "tiny-gqa").requires_grad_(False)
    model.embed_tokens.weight.zero_()
    asked = []

    def recall(lm, distance, questions, split):
        asked.append((distance, questions, split))
        return Recall(questions // 2, questions, distance)

    monkeypatch.setattr(report, "recall", recall)
    lm = kv.LM(model, None, "tiny-gqa")
    rows = {
        split: torch.cat([b.tokens for b in standin.held_out(recipe, None, split)]) for split in ("validation", "test")
    }
    found = measure(lm, rows, 10, distances=(16, 32), progress=False)
    assert asked == [(16, 10, "test"), (32, 10, "test")]
    assert [len(losses) for losses in found.losses.values()] == [8, 8]
    assert found.perplexity("test") == pytest.approx(40, rel=1e-5)
    assert found.config is model.config and [answer.share for answer in found.recalls] == [0.5, 0.5]
    assert not text([found]).startswith("Error")


def test_measured_perplexity_is_that_of_the_training_loss():
    """What the trainer calls the loss of these rows and what is reported are one thing."""
    from kvcourse.training.trainer import validation_loss

    recipe = standin.Recipe()
    model = standin.new_model(recipe, "tiny-window").requires_grad_(False)
    batches = standin.held_out(recipe, None, "test")
    rows = {"test": torch.cat([batch.tokens for batch in batches])}
    found = measure(kv.LM(model, None, "x"), rows, distances=(), progress=False)
    assert math.log(found.perplexity("test")) == pytest.approx(validation_loss(model, batches), abs=1e-5)
    other = [SimpleNamespace(**vars(batch) | {"tokens": batch.tokens.flip(1)}) for batch in batches]
    assert math.log(found.perplexity("test")) != pytest.approx(validation_loss(model, other), abs=1e-5)


def test_sentences_that_were_written_right(monkeypatch):
    """Of a text that was cut, the last sentence does not count: here 2 of 3 are right.
    190 of 200 have the score interval 91.0 to 97.3 (Wilson, by hand)."""
    texts = [
        "At school Tom and Mia listened to the cook. At school Tom and Tom listened to the cook. Mia wore",
        "The lamp was in the barn.",
    ]
    made = [SimpleNamespace(ids=[5, 7]), SimpleNamespace(ids=[6, 0])]
    monkeypatch.setattr(report, "generate", lambda model, prompts, length, **options: made[: len(prompts)])
    lm = SimpleNamespace(model=None, config=CONFIG, decode=lambda ids: texts[ids[0] - 5])
    assert report.count_right(lm, 2) == (2, 3)
    assert report.count_right(lm, 1) == (1, 2)
    first, second = measured("tiny-mha", [1.0]), measured("tiny-gqa", [1.0])
    assert "sentences" not in text([first, second])
    some = [Measured(m.name, m.config, m.losses, m.recalls, (right, 200)) for m, right in ((first, 190), (second, 150))]
    assert cells(text(some), "sentences right")[:4] == ["95.0%", "(91.0", "to", "97.3)"]
