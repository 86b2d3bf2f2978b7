"""Training: what one step does to the weights, what is written down, and going on after a stop."""

import math
import signal
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
import training_standin as standin
from hypothesis import given
from hypothesis import strategies as st
from training_standin import Recipe

from kvcourse.training import trainer
from kvcourse.training.checkpoint import CHECKPOINT, load_checkpoint, save_checkpoint
from kvcourse.training.history import History, bucket
from kvcourse.training.trainer import Stopped, answered, make_optimizer, take_step, train, validation_loss

RECIPE = Recipe()


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(folder, recipe=RECIPE, variant="tiny-gqa", batch_at=None, **options):
    """The trained model and its history."""
    model = standin.new_model(recipe, variant)
    batch_at = batch_at or (lambda step: standin.batch_at(recipe, None, step))
    validation = standin.held_out(recipe, None, "validation")
    history = train(model, recipe, variant, batch_at, validation, folder, progress=False, **options)
    return model, history


def weights(model):
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def differing(one, other):
    return [name for name in one if not torch.equal(one[name], other[name])]


def stopping(at, recipe=RECIPE):
    """Batches, with a Ctrl-C while that of step `at` is made."""

    def batch_at(step):
        if step == at:
            signal.raise_signal(signal.SIGINT)
        return standin.batch_at(recipe, None, step)

    return batch_at


def only_the_first(step):
    """The batch of step 0, which tells the data of a run; an error for whoever would train on."""
    return standin.batch_at(RECIPE, None, step) if step == 0 else 1 / 0


# --- one step --------------------------------------------------------------------------------------------------------


def one_step(recipe, rate, batch=None):
    model = standin.new_model(recipe, "tiny-gqa")
    before = weights(model)
    take_step(model, make_optimizer(model, recipe), batch or standin.batch_at(recipe, None, 0), rate, recipe.clip)
    return model, before


def test_the_first_step_moves_each_weight_by_the_learning_rate_after_decay_of_matrices():
    """AdamW's first step is rate x sign(gradient); decay takes rate x decay of a weight away, from matrices only."""
    rate, decay = 1e-3, 20.0
    model, before = one_step(Recipe(weight_decay=decay, clip=1e9), rate)
    for name, weight in model.named_parameters():
        kept = 1 - rate * decay if weight.ndim > 1 else 1.0
        moved = weight.detach() - kept * before[name]
        clear = weight.grad.abs() > 1e-5  # AdamW adds 1e-8 to the gradient's size
        assert clear.any(), name
        assert torch.allclose(moved[clear], -rate * weight.grad[clear].sign(), rtol=2e-3), name


@pytest.mark.parametrize(("clip", "clipped"), [(0.01, True), (1e6, False)])
def test_gradients_are_clipped_to_the_norm(clip, clipped):
    model, _ = one_step(Recipe(clip=clip), 1e-3)
    norm = torch.cat([weight.grad.flatten() for weight in model.parameters()]).norm().item()
    assert (norm == pytest.approx(clip, rel=1e-3)) if clipped else norm > 0.1


def test_only_what_has_weight_is_learned():
    recipe = Recipe()
    batch = standin.batch_at(recipe, None, 0)
    batch.weights.zero_()
    batch.weights[:, 8] = 1.0
    model = standin.new_model(recipe, "tiny-gqa")
    optimizer = make_optimizer(model, recipe)
    mean = [take_step(model, optimizer, batch, 3e-3, 1.0) for _ in range(40)]
    assert all(right for _, right in mean[-1][1]) and not all(right for _, right in mean[0][1])
    assert mean[-1][0] > 2.0  # the mean loss counts every token alike, and the others cannot be known


def test_the_loss_is_that_of_a_closed_form():
    """With an embedding of zeros every token has the same score, so the loss is the logarithm of their number."""
    model = standin.new_model(Recipe(), "tiny-gqa")
    batches = standin.held_out(Recipe(), None, "validation")
    assert validation_loss(model, batches) != pytest.approx(math.log(standin.VOCAB), abs=1e-3)
    model.embed_tokens.weight.data.zero_()
    assert validation_loss(model, batches) == pytest.approx(math.log(standin.VOCAB), rel=1e-6)


def test_an_answer_is_right_when_all_its_tokens_are():
    tokens = torch.tensor([[0, 1, 2, 3, 4]])
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 2, 9, 4]]), 10).float()  # the 3 is missed

    def question(start, end):
        return SimpleNamespace(start=start, end=end, distance=end)

    asked = [question(1, 3), question(2, 4), question(3, 5), question(4, 5)]
    batch = SimpleNamespace(tokens=tokens, asked=[asked])
    assert answered(logits, batch) == [(3, True), (4, False), (5, False), (5, True)]


# --- the curve -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 100_000))
def test_a_bucket_is_the_next_power_of_two(distance):
    assert bucket(distance) in {2**n for n in range(4, 18)}
    assert bucket(distance) >= distance and (bucket(distance) == 16 or bucket(distance) < 2 * distance)


def test_history_by_hand():
    history = History()
    assert history.summary() == {}
    history.note(2.0, 100, [(16, True), (17, False)])
    history.note(5.0, 200, [(3, False), (17, True), (300, True)])
    assert history.summary() == {"loss": "4.000", "recall": "16: 50%, 32: 50%, 512: 100%"}
    history.close(7, 0.5, 3.5)
    history.note(1.0, 10, [])
    history.close(8, 0.25, 3.0)
    first = {"step": 7, "tokens": 300, "learning_rate": 0.5, "loss": 4.0, "validation_loss": 3.5}
    assert history.points[0] == first | {"recall": {"16": [1, 2], "32": [1, 2], "512": [1, 1]}}
    second = {"step": 8, "tokens": 310, "learning_rate": 0.25, "loss": 1.0, "validation_loss": 3.0, "recall": {}}
    assert history.points[1] == second


def test_a_run_overfits_four_rows_and_writes_its_curve(tmp_path):
    recipe = Recipe(steps=120, weight_decay=0.0, lengths=(12,))
    fixed = standin.batch_at(recipe, None, 0)
    model, history = run(tmp_path, recipe, batch_at=lambda step: fixed)
    points = history.points
    assert len(points) == 40 and points[-1]["step"] == 120
    assert points[-1]["tokens"] == history.tokens == 120 * 4 * 12
    assert points[-1]["learning_rate"] == recipe.learning_rate(119)
    assert points[0]["loss"] > 2.5 and points[-1]["loss"] < 0.3
    assert points[-1]["recall"] == {"16": [12, 12]}
    assert points[-1]["validation_loss"] > points[-1]["loss"] + 1  # other rows are not known by heart
    assert validation_loss(model, [fixed]) < 0.3


def test_the_progress_bar_tells_loss_and_recall(tmp_path, capsys):
    recipe = Recipe()
    model = standin.new_model(recipe, "tiny-gqa")
    train(
        model,
        recipe,
        "tiny-gqa",
        lambda step: standin.batch_at(recipe, None, step),
        [standin.batch_at(recipe, None, 9)],
        tmp_path,
    )
    said = capsys.readouterr().err
    assert "tiny-gqa: 100%" in said and "loss=" in said and "recall=16: " in said


# --- stopping and going on -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 4, 6])
@pytest.mark.parametrize("points", [50, 3])
def test_a_stopped_run_ends_with_the_same_weights_and_curve(tmp_path, monkeypatch, at, points):
    monkeypatch.setattr(trainer, "POINTS", points)  # at each step, or at the third, the sixth and the last
    recipe = Recipe()
    whole, history = run(tmp_path / "whole", recipe)
    with pytest.raises(Stopped, match=f"after step {at + 1} of 8"):
        run(tmp_path / "stopped", recipe, batch_at=stopping(at, recipe))
    model, resumed = run(tmp_path / "stopped", recipe)
    assert differing(weights(model), weights(whole)) == []
    assert (resumed.points, resumed.tokens) == (history.points, history.tokens)
    assert [point["step"] for point in resumed.points] == ([3, 6, 8] if points == 3 else [1, 2, 3, 4, 5, 6, 7, 8])


def test_another_seed_ends_with_other_weights(tmp_path):
    """So that the equality above means something; and the same seed twice gives the same."""
    model, _ = run(tmp_path / "a")
    same, _ = run(tmp_path / "b")
    other, _ = run(tmp_path / "c", Recipe(seed=1))
    assert differing(weights(model), weights(same)) == []
    assert differing(weights(model), weights(other))


def test_forgetting_the_optimizer_would_be_noticed(tmp_path, monkeypatch):
    whole, _ = run(tmp_path / "whole")
    with pytest.raises(Stopped):
        run(tmp_path / "stopped", batch_at=stopping(3))
    monkeypatch.setattr(torch.optim.AdamW, "load_state_dict", lambda self, state: None)
    model, _ = run(tmp_path / "stopped")
    assert differing(weights(model), weights(whole))


def test_a_second_ctrl_c_stops_at_once_and_the_handler_is_put_back(tmp_path):
    before = signal.getsignal(signal.SIGINT)

    def impatient(step):
        if step == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return standin.batch_at(Recipe(), None, step)

    with pytest.raises(KeyboardInterrupt) as end:
        run(tmp_path, batch_at=impatient)
    assert not isinstance(end.value, Stopped)
    assert signal.getsignal(signal.SIGINT) is before
    whole, _ = run(tmp_path / "whole")
    assert differing(weights(run(tmp_path)[0]), weights(whole)) == []


def test_a_finished_run_is_not_trained_again(tmp_path):
    whole, history = run(tmp_path)
    model, again = run(tmp_path, batch_at=only_the_first)
    assert differing(weights(model), weights(whole)) == []
    assert (again.points, again.tokens) == (history.points, history.tokens)


def test_restart_begins_again(tmp_path):
    whole, _ = run(tmp_path)
    with pytest.raises(Stopped):
        run(tmp_path, resume=False, batch_at=stopping(2))
    assert differing(weights(run(tmp_path)[0]), weights(whole)) == []


@pytest.mark.parametrize(
    ("recipe", "variant", "said"),
    [
        (Recipe(peak_lr=1e-3), "tiny-gqa", "peak_lr=0.003, and peak_lr=0.001 is asked for"),
        (Recipe(seed=5), "tiny-gqa", "seed=0, and seed=5 is asked for"),
        (Recipe(lengths=(12, 16)), "tiny-gqa", r"lengths=\[12, 24\], and lengths=\[12, 16\]"),
        (Recipe(), "tiny-mha", "variant='tiny-gqa', and variant='tiny-mha' is asked for"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, recipe, variant, said):
    run(tmp_path)
    before = (tmp_path / CHECKPOINT).read_bytes()
    with pytest.raises(ValueError, match=f"{said}.*--restart"):
        run(tmp_path, recipe, variant)
    assert (tmp_path / CHECKPOINT).read_bytes() == before


def test_a_recipe_with_another_field_is_refused(tmp_path):
    @dataclass(frozen=True)
    class Longer(Recipe):
        warmup: int = 3

    run(tmp_path)
    with pytest.raises(ValueError, match="warmup=None, and warmup=3"):
        run(tmp_path, Longer())


def test_a_checkpoint_of_other_data_is_refused(tmp_path):
    run(tmp_path)
    with pytest.raises(ValueError, match="other data, though of the same recipe"):
        run(tmp_path, batch_at=lambda step: standin.batch_at(replace(Recipe(), seed=7), None, step))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_run_that_diverges_keeps_the_checkpoint_before(tmp_path, monkeypatch, value):
    recipe = Recipe()
    monkeypatch.setattr(trainer, "POINTS", 4)  # at every second step
    broken = standin.batch_at(recipe, None, 5)
    broken.weights[0, 0] = value
    with pytest.raises(RuntimeError, match="tiny-gqa has diverged at step 5"):
        run(tmp_path, recipe, batch_at=lambda step: broken if step == 5 else standin.batch_at(recipe, None, step))
    tensors, record = load_checkpoint(tmp_path / CHECKPOINT)
    assert record["step"] == 4
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_the_folder_is_asked_for_before_any_work(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "below"):
        with pytest.raises(ValueError, match=f"{file} is a file"):
            run(folder, batch_at=lambda step: 1 / 0)


def test_ctrl_c_during_the_last_step_stops_too(tmp_path):
    whole, history = run(tmp_path / "whole")
    with pytest.raises(Stopped, match="after step 8 of 8"):
        run(tmp_path / "stopped", batch_at=stopping(7))
    model, finished = run(tmp_path / "stopped", batch_at=only_the_first)
    assert differing(weights(model), weights(whole)) == [] and finished.points == history.points


# --- who computed ----------------------------------------------------------------------------------------------------


def test_each_part_of_a_run_keeps_its_origin(tmp_path):
    stops = [(2, {"commit": "a"}), (4, {"commit": "a"}), (6, {"commit": "b"})]
    for at, origin in stops:
        with pytest.raises(Stopped):
            run(tmp_path, batch_at=stopping(at), origin=origin)
    _, history = run(tmp_path, origin={"commit": "b", "threads": 2})
    parts = [{"step": 0, "commit": "a"}, {"step": 5, "commit": "b"}, {"step": 7, "commit": "b", "threads": 2}]
    assert history.parts == parts
    _, history = run(tmp_path, origin={"commit": "c"}, batch_at=only_the_first)
    assert history.parts == parts  # it had nothing to compute


def test_a_part_without_a_step_is_forgotten():
    history = History()
    history.begin(0, {"commit": "a"})
    history.begin(0, {"commit": "b"})
    history.begin(3, {"commit": "c"})
    history.begin(3, {"commit": "b"})
    assert history.parts == [{"step": 0, "commit": "b"}]


# --- checkpoints that this program did not write ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Tensors and record of a run that was stopped after four steps."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(Stopped):
        run(folder, batch_at=stopping(3))
    return load_checkpoint(folder / CHECKPOINT)


def refused(folder, tensors, record):
    save_checkpoint(folder / CHECKPOINT, tensors, record)
    with pytest.raises(ValueError, match="is damaged or no checkpoint of this version of kvcourse.*--restart"):
        run(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"recipe": None},
        {"recipe": []},
        {"recipe": {}},
        {"step": "4"},
        {"step": True},
        {"step": -1},
        {"step": 9},
        {"step": 8},  # a run that has ended has a point there
        {"history": None},
        {"history": []},
        {"history": {}},
    ],
)
def test_a_foreign_record_is_refused(tmp_path, stopped, changes):
    tensors, record = stopped
    refused(tmp_path, tensors, record | changes)
    for name in changes:
        refused(tmp_path, tensors, {key: value for key, value in record.items() if key != name})


@pytest.mark.parametrize(
    "changes",
    [
        {"points": {}},
        {"points": [5]},
        {"points": [{"step": 4}]},
        {"parts": []},
        {"parts": [{}]},
        {"parts": [{"step": "0"}]},
        {"tokens": 1.5},
        {"seconds": None},
        {"recall": []},
        {"more": 1},
    ],
)
def test_a_foreign_history_is_refused(tmp_path, stopped, changes):
    tensors, record = stopped
    refused(tmp_path, tensors, record | {"history": record["history"] | changes})


@pytest.mark.parametrize("record", [[], None, 5, "text", {}, {"step": 4}])
def test_a_record_that_is_none_is_refused(tmp_path, stopped, record):
    refused(tmp_path, stopped[0], record)


def test_other_tensors_are_refused(tmp_path, stopped):
    tensors, record = stopped
    weight, known = "model.embed_tokens.weight", "optimizer.0.exp_avg"
    for name in (weight, known, "optimizer.0.step"):
        refused(tmp_path, {key: tensor for key, tensor in tensors.items() if key != name}, record)
        refused(tmp_path, tensors | {name: torch.zeros(3, 2)}, record)
    for name in ("other", "model.other", "optimizer.other", "optimizer.x.y"):
        refused(tmp_path, tensors | {name: torch.zeros(2)}, record)
    refused(tmp_path, {key: tensor for key, tensor in tensors.items() if key.startswith("model.")}, record)
    save_checkpoint(tmp_path / CHECKPOINT, tensors, record)
    run(tmp_path)
