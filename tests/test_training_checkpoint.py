"""Checkpoints: what is read is what was written, or one sentence says that the file is damaged."""

import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kvcourse import model_folder
from kvcourse.model_folder import write_whole
from kvcourse.training.checkpoint import CHECKPOINT, digest, load_checkpoint, save_checkpoint

TENSORS = {
    "model.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "optimizer.0.step": torch.tensor(3.0),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
}
RECORD = {"variant": "tiny-gqa", "step": 3, "history": {"points": [{"loss": 0.1 + 0.2}]}, "recipe": {"a": [1, 2]}}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / CHECKPOINT
    save_checkpoint(path, TENSORS, RECORD)
    return path


def test_what_is_read_is_what_was_written(written):
    tensors, record = load_checkpoint(written)
    assert record == RECORD
    assert tensors.keys() == TENSORS.keys()
    assert all(
        torch.equal(tensors[name], TENSORS[name]) and tensors[name].dtype == TENSORS[name].dtype for name in TENSORS
    )
    assert load_file(written).keys() == TENSORS.keys()  # any program that knows the format can look into it


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_cut_short_anywhere_is_refused(written, tmp_path, data):
    whole = written.read_bytes()
    refused(tmp_path, whole[: data.draw(st.integers(0, len(whole) - 1))])


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_byte_anywhere_is_refused_or_harmless(written, tmp_path, data):
    """A space of the header's padding may become another space; nothing else may pass."""
    content = bytearray(written.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    (tmp_path / CHECKPOINT).write_bytes(content)
    try:
        tensors, record = load_checkpoint(tmp_path / CHECKPOINT)
    except ValueError as error:
        assert "is damaged" in str(error)
    else:
        assert record == RECORD and all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)


@given(st.binary(max_size=200))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_garbage_is_refused(tmp_path, content):
    refused(tmp_path, content)


def test_more_behind_the_end_is_refused(written, tmp_path):
    refused(tmp_path, written.read_bytes() + b"\0")


def test_a_sound_file_of_another_program_is_refused(tmp_path):
    for metadata in (None, {"format": "pt"}, {"record": "{}"}, {"record": "{}", "sha256": "0"}):
        save_file(TENSORS, tmp_path / "other", metadata)
        refused(tmp_path, (tmp_path / "other").read_bytes())


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000])
def test_a_record_that_is_no_json_is_refused(tmp_path, text):
    save_file(TENSORS, tmp_path / "other", {"record": text, "sha256": digest(text, TENSORS)})
    refused(tmp_path, (tmp_path / "other").read_bytes())
    save_file(TENSORS, tmp_path / "other", {"record": "{}", "sha256": digest("{}", TENSORS)})
    assert load_checkpoint(tmp_path / "other")[1] == {}


def test_a_folder_in_its_place_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=f"The checkpoint {tmp_path} cannot be read .it is a folder.: .* move it away"):
        load_checkpoint(tmp_path)


def refused(folder: Path, content: bytes) -> None:
    path = folder / CHECKPOINT
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        load_checkpoint(path)
    said = str(error.value)
    assert str(path) in said and "is damaged" in said and "delete the file, or give --restart" in said
    assert "\n" not in said


def test_a_record_with_a_number_that_json_lacks_is_not_written(tmp_path):
    with pytest.raises(ValueError):
        save_checkpoint(tmp_path / CHECKPOINT, TENSORS, {"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []


# --- writing ---------------------------------------------------------------------------------------------------------


class FullDisk:
    """A file on a disk that is full after `room` bytes."""

    def __init__(self, file, room: int):
        self.file, self.room = file, room

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def write(self, data: bytes):
        self.file.write(data[: self.room])
        if len(data) > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 100, 300])
def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path, monkeypatch, room):
    path = tmp_path / CHECKPOINT
    save_checkpoint(path, TENSORS, RECORD)
    with monkeypatch.context() as patch:
        patch.setattr(model_folder, "open", lambda *a: FullDisk(open(*a), room), raising=False)
        with pytest.raises(RuntimeError, match=f"{path} could not be written .No space left on device.: make room"):
            save_checkpoint(path, TENSORS, RECORD | {"step": 4})
    assert load_checkpoint(path)[1] == RECORD
    assert list(tmp_path.iterdir()) == [path]
    save_checkpoint(path, TENSORS, RECORD | {"step": 4})
    assert load_checkpoint(path)[1]["step"] == 4


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a Linux device that is always full")
def test_a_device_that_is_really_full(tmp_path, monkeypatch):
    path = tmp_path / CHECKPOINT
    save_checkpoint(path, TENSORS, RECORD)
    monkeypatch.setattr(model_folder, "open", lambda name, mode: open("/dev/full", mode), raising=False)
    with pytest.raises(RuntimeError, match="No space left"):
        save_checkpoint(path, TENSORS, RECORD | {"step": 4})
    assert load_checkpoint(path)[1] == RECORD


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_whatever_stops_the_writing_leaves_the_earlier_file_alone(tmp_path, monkeypatch, call, error):
    path = tmp_path / "file"
    path.write_bytes(b"earlier")

    def fail(*args):
        raise error

    monkeypatch.setattr(model_folder.os, call, fail)
    with pytest.raises(RuntimeError if isinstance(error, OSError) else KeyboardInterrupt):
        write_whole(path, b"later")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("file", b"earlier")]


def test_what_an_end_of_the_program_left_is_overwritten(tmp_path):
    (tmp_path / ".file.tmp").write_bytes(b"half of it")
    write_whole(tmp_path / "file", b"all of it")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("file", b"all of it")]
