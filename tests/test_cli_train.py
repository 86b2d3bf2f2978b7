"""`kvcourse train` and `kvcourse measure`, with a recipe of a second: what they write, and every way they say no."""

import errno
import json
import os
import shlex
import shutil
import signal
import sys

import pytest
import torch
import training_standin as standin

import kvcourse as kv
import kvcourse.training
from kvcourse import model_folder
from kvcourse.cli.main import main as kvcourse_command
from kvcourse.model_folder import APART
from kvcourse.quality import Recall
from kvcourse.training import provenance, report, trainer
from kvcourse.training.checkpoint import CHECKPOINT
from kvcourse.training.export import read_provenance

SHIPPED = {"config.json", "curve.json", "generation_config.json", "model.safetensors", "provenance.json"}
SHIPPED |= {"tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(autouse=True)
def small_recipe(tmp_path, monkeypatch):
    """The stand-in in the recipe's place, and an empty folder to work in."""
    monkeypatch.setitem(sys.modules, "kvcourse.training.recipe", standin)
    monkeypatch.setattr(kvcourse.training, "recipe", standin, raising=False)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def command(capsys):
    """Run a command; (exit code, output, errors)."""

    def run(line):
        code = kvcourse_command(shlex.split(line))
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def weights(folder):
    return kv.load_model(folder, dtype="float32", device="cpu").model.state_dict()


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_a_model_is_trained_and_left_as_it_is_shipped(tmp_path, command):
    code, out, err = command("train tiny-gqa --threads 1")
    assert code == 0 and "tiny-gqa: 100%" in err
    folder = tmp_path / "trained" / "tiny-gqa"
    assert names(folder) == SHIPPED
    assert out.startswith("tiny-gqa is in trained/tiny-gqa: validation loss ") and out.count("\n") == 1
    found = read_provenance(folder)
    assert (found["command"], found["seed"], found["steps"]) == ("kvcourse train tiny-gqa", 0, 8)
    assert found["machine"]["threads"] == 1
    curve = json.loads((folder / "curve.json").read_text())
    assert [point["step"] for point in curve] == list(range(1, 9))
    assert curve[-1]["validation_loss"] == found["validation_loss"] and curve[-1]["loss"] == found["loss"]
    lm = kv.load_model(folder, device="cpu")
    assert lm.config == standin.config("tiny-gqa") and lm.encode("ab") == [1, 2]


def test_the_same_command_twice_trains_once_and_the_recorded_command_makes_it_again(tmp_path, command):
    command("train tiny-gqa --steps 5 --seed 3 --folder 'my models' --threads 1")
    folder = tmp_path / "my models" / "tiny-gqa"
    before = (folder / "provenance.json").read_bytes()
    code, out, err = command("train tiny-gqa --steps 5 --seed 3 --folder 'my models'")
    assert (code, out) == (0, "") and "already" in err and "--restart" in err
    assert (folder / "provenance.json").read_bytes() == before
    recorded = read_provenance(folder)["command"]
    assert recorded == "kvcourse train tiny-gqa --steps 5 --seed 3"
    assert command(recorded.removeprefix("kvcourse ") + " --folder again --threads 1")[0] == 0
    assert same(weights(folder), weights(tmp_path / "again" / "tiny-gqa"))
    command("train tiny-gqa --steps 5 --seed 4 --folder other --threads 1")
    assert not same(weights(folder), weights(tmp_path / "other" / "tiny-gqa"))


def test_all_trains_every_variant_on_the_same_tokens(tmp_path, command):
    assert command("train all")[0] == 0
    assert {name for name in names(tmp_path / "trained") if not name.startswith(".")} == set(standin.VARIANTS)
    found = [read_provenance(tmp_path / "trained" / name) for name in standin.VARIANTS]
    assert len({(each["tokens"], each["data"]) for each in found}) == 1
    assert [each["variant"] for each in found] == list(standin.VARIANTS)
    assert [each["command"] for each in found] == [f"kvcourse train {name}" for name in standin.VARIANTS]


def interrupt_at(monkeypatch, at, times=1):
    """A Ctrl-C while the data of a step is made."""
    really = standin.batch_at

    def batch_at(recipe, tokenizer, step):
        if step == at:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return really(recipe, tokenizer, step)

    monkeypatch.setattr(standin, "batch_at", batch_at)


def test_ctrl_c_in_the_last_step_stops_and_nothing_is_left_to_train(tmp_path, command, monkeypatch):
    command("train tiny-mha --folder whole --threads 1")
    with monkeypatch.context() as patch:
        interrupt_at(patch, 7)
        code, out, err = command("train all --threads 1")
    assert (code, out) == (130, "") and "tiny-mha is stopped after step 8 of 8" in err
    trained = tmp_path / "trained"
    assert [names(trained / name) for name in standin.VARIANTS] == [{CHECKPOINT}, set(), set()]
    monkeypatch.setattr(trainer, "take_step", None)
    assert command("train tiny-mha --threads 1")[0] == 0
    assert names(trained / "tiny-mha") == SHIPPED
    assert same(weights(trained / "tiny-mha"), weights(tmp_path / "whole" / "tiny-mha"))


@pytest.mark.parametrize("restart", ["", " --restart"])
def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path, command, monkeypatch, restart):
    command("train tiny-gqa --folder whole --threads 1")
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3)
        code, out, err = command("train tiny-gqa --threads 1" + restart)
    assert (code, out) == (130, "")
    same_command = "The same command for tiny-gqa, without --restart," if restart else "The same command"
    assert f"stopped after step 4 of 8. Its state is in trained/tiny-gqa/{CHECKPOINT}. {same_command} goes on" in err
    assert names(tmp_path / "trained" / "tiny-gqa") == {CHECKPOINT}
    code, out, err = command("train tiny-gqa --threads 1")
    assert code == 0 and "Going on with tiny-gqa" in err
    assert same(weights(tmp_path / "trained" / "tiny-gqa"), weights(tmp_path / "whole" / "tiny-gqa"))
    assert names(tmp_path / "trained" / "tiny-gqa") == SHIPPED


def test_the_model_that_was_there_stays_until_the_new_one_is_done(tmp_path, command, monkeypatch):
    command("train tiny-gqa")
    before = read_provenance(tmp_path / "trained" / "tiny-gqa")
    code, out, err = command("train tiny-gqa --steps 6")
    assert code == 1 and "steps=8, and steps=6 is asked for: give --restart" in err and err.count("\n") == 1
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        assert command("train tiny-gqa --steps 6 --restart")[0] == 130
    assert read_provenance(tmp_path / "trained" / "tiny-gqa") == before
    assert command("train tiny-gqa --steps 6")[0] == 0
    assert read_provenance(tmp_path / "trained" / "tiny-gqa")["steps"] == 6


def test_provenance_tells_who_began_and_who_went_on(tmp_path, command, monkeypatch):
    for source, at in [("a", 2), ("b", 4), ("b", None)]:
        with monkeypatch.context() as patch:
            patch.setattr(provenance, "commit", lambda source=source: {"commit": source, "clean": True})
            interrupt_at(patch, at)
            command("train tiny-gqa --threads 1")
    found = read_provenance(tmp_path / "trained" / "tiny-gqa")
    assert (found["commit"], found["clean"], found["machine"]["threads"]) == ("a", True, 1)
    (part,) = found["resumed"]
    assert (part["step"], part["commit"], part["machine"]) == (3, "b", found["machine"])


# --- what another program or another run left ------------------------------------------------------------------------


@pytest.mark.parametrize("restart", ["", " --restart"])
@pytest.mark.parametrize(
    ("name", "content"),
    [("model.safetensors", "weights"), ("config.json", "{}"), ("provenance.json", "{}"), ("provenance.json", "cut")],
)
def test_a_foreign_model_is_left_alone(tmp_path, command, restart, name, content):
    folder = tmp_path / "trained" / "tiny-gqa"
    folder.mkdir(parents=True)
    (folder / name).write_text(content)
    code, out, err = command("train all" + restart)
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert f"tiny-gqa has a {name}, but no provenance.json of a model made by `kvcourse train`" in err
    assert names(folder) == {name} and (folder / name).read_text() == content
    (folder / name).rename(folder / "notes")  # what no model replaces is no obstacle
    assert command("train tiny-gqa" + restart)[0] == 0 and names(folder) == SHIPPED | {"notes"}


@pytest.mark.parametrize("restart", ["", " --restart"])
@pytest.mark.parametrize("name", [CHECKPOINT, "model.safetensors"])
def test_a_folder_in_the_place_of_a_file_is_one_sentence(tmp_path, command, restart, name):
    path = tmp_path / "trained" / "tiny-gqa" / name
    path.mkdir(parents=True)
    code, out, err = command("train tiny-gqa" + restart)
    assert (code, out) == (1, "") and err.count("\n") == 1 and f"{name} is a folder, where a file belongs" in err
    assert path.is_dir()


def test_all_looks_at_every_folder_before_it_makes_anything(tmp_path, command, monkeypatch):
    command("train tiny-window --steps 6")
    path = tmp_path / "trained" / "tiny-window" / CHECKPOINT
    monkeypatch.setattr(standin, "train_tokenizer_of", None)
    code, out, err = command("train all")
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert "tiny-window/provenance.json is of a run with steps=6, and steps=8 is asked for" in err
    path.write_text("garbage")
    code, out, err = command("train all")
    assert (code, out) == (1, "") and f"{CHECKPOINT} is damaged" in err and err.count("\n") == 1
    assert names(tmp_path / "trained" / "tiny-mha") == set()


def test_all_compares_the_data_before_the_first_training(tmp_path, command, monkeypatch):
    command("train tiny-window")
    really = standin.batch_at
    monkeypatch.setattr(standin, "batch_at", lambda recipe, tokenizer, step: really(recipe, tokenizer, step + 1))
    code, out, err = command("train all")
    assert (code, out) == (1, "") and "tiny-window/provenance.json is of a run with other data" in err
    assert names(tmp_path / "trained" / "tiny-mha") == set()


@pytest.mark.parametrize("line", ["train tiny-gqa", "train all", "train tiny-gqa --restart"])
def test_two_programs_do_not_train_in_one_folder(tmp_path, command, monkeypatch, line):
    monkeypatch.setattr(standin, "train_tokenizer_of", None)
    with model_folder.hold(model_folder.usable(tmp_path / "trained" / "tiny-gqa")):
        code, out, err = command(line)
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert f"Another program is training in {tmp_path}/trained/tiny-gqa: wait until it has ended" in err


def test_an_export_that_was_killed_is_made_again(tmp_path, command, monkeypatch):
    """Killed while files are moved: some are there, some not, and nobody cleans up."""
    really = os.replace

    def killed(source, target):
        if str(target).endswith("tiny-gqa/config.json"):
            raise SystemExit
        really(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        patch.setattr(shutil, "rmtree", lambda *arguments, **options: None)
        with pytest.raises(SystemExit):
            command("train tiny-gqa")
    folder = tmp_path / "trained" / "tiny-gqa"
    assert names(folder) == {CHECKPOINT, APART, "provenance.json", "model.safetensors"}
    monkeypatch.setattr(trainer, "take_step", None)
    assert command("train tiny-gqa")[0] == 0 and names(folder) == SHIPPED
    read_provenance(folder)


def test_a_damaged_model_is_not_taken_for_done(tmp_path, command):
    command("train tiny-gqa")
    path = tmp_path / "trained" / "tiny-gqa" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    code, _, err = command("train tiny-gqa")
    assert code == 1 and "model.safetensors is missing or damaged" in err and "--restart" in err
    assert command("train tiny-gqa --restart")[0] == 0


@pytest.mark.parametrize("content", [b"", b"garbage", None])
def test_a_damaged_checkpoint_is_one_sentence(tmp_path, command, monkeypatch, content):
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3)
        command("train tiny-gqa")
    path = tmp_path / "trained" / "tiny-gqa" / CHECKPOINT
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    code, out, err = command("train tiny-gqa")
    (said,) = [line for line in err.splitlines() if line.startswith("kvcourse: ")]
    assert (code, out) == (1, "") and "is damaged" in said and "--restart" in said and "Traceback" not in err
    assert command("train tiny-gqa --restart")[0] == 0


def test_a_full_disk_is_said_and_the_same_command_goes_on(tmp_path, command, monkeypatch):
    really, writes = os.fsync, []

    def full(file):
        writes.append(file)
        if len(writes) == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        really(file)

    with monkeypatch.context() as patch:
        patch.setattr(model_folder.os, "fsync", full)
        code, _, err = command("train tiny-gqa")
    assert code == 1 and "could not be written (No space left on device): make room there" in err
    assert names(tmp_path / "trained" / "tiny-gqa") == {CHECKPOINT}
    code, _, err = command("train tiny-gqa")
    assert code == 0 and "Going on" in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train tiny-gpa", "The course has no model 'tiny-gpa'. Did you mean tiny-gqa"),
        ("train TINY-MHA", "Did you mean tiny-mha"),
        ("train xyz", "The course has no model 'xyz'. Give one of tiny-mha, tiny-gqa, tiny-window, or all."),
        ("train tiny-gqa --steps 0", "--steps=0 must be a whole number of at least 1"),
        ("train tiny-gqa --seed -1", "--seed=-1 must be a whole number of at least 0"),
        ("train tiny-gqa --threads 0", "--threads=0 must be a whole number of at least 1"),
        ("train tiny-gqa --device tpu", "device='tpu' is none the course runs on"),
        ("train tiny-gqa --device meta", "--device meta has shapes without numbers"),
        ("train tiny-gqa --folder taken", "taken is a file, and a model is kept in a folder: give another"),
        ("train tiny-gqa --folder taken/below", "taken is a file"),
        ("train tiny-gqa --folder ''", '--folder "" names no folder'),
        ("train tiny-gqa --steps 1000000000", "--steps=1000000000 must be at most 1000000."),
        ("train tiny-gqa --seed 4294967296", "--seed=4294967296 must be at most 4294967295."),
        ("train tiny-gqa --threads 4097", "the logical CPUs of this machine"),
        ("train tiny-gqa --device cpu:3", "--device cpu:3: all CPU cores are one device"),
        ("measure tiny-gpa", "Did you mean tiny-gqa"),
        ("measure --questions 0", "--questions=0 must be a whole number"),
        ("measure --models nowhere", "nowhere/tiny-mha"),
    ],
)
def test_bad_input_is_one_sentence_before_any_work(tmp_path, command, monkeypatch, line, said):
    monkeypatch.setattr(standin, "train_tokenizer_of", None)
    (tmp_path / "taken").write_text("a file")
    code, out, err = command(line)
    assert (code, out) == (1, "")
    assert err.startswith("kvcourse: ") and said in err and err.count("\n") == 1
    assert set(os.listdir(tmp_path)) == {"taken"}


def test_train_needs_a_name(capsys):
    with pytest.raises(SystemExit):
        kvcourse_command(["train"])
    assert "NAME" in capsys.readouterr().err


def test_measure_prints_the_table(command, monkeypatch):
    monkeypatch.setattr(report, "recall", lambda lm, distance, questions, split: Recall(questions, questions, distance))
    command("train all")
    code, out, _ = command("measure --models trained --questions 5")
    assert code == 0
    assert out.split("\n")[0].split() == list(standin.VARIANTS)
    assert "perplexity, validation" in out and "perplexity, test" in out and "  against tiny-mha" in out
    assert "224 tokens" in out and "100.0%" in out and "8 rows (test)" in out
    code, out, _ = command("measure tiny-gqa tiny-gqa --models trained")
    assert code == 0 and out.split("\n")[0].split() == ["tiny-gqa"]
