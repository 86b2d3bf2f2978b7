"""The folder of a training: which can be used, one program at a time, and what is said when writing fails."""

import errno
import os
import subprocess
import sys

import pytest

from kvcourse.model_folder import hold, usable, write_whole


def test_a_folder_is_made_and_a_home_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert usable("~/a/b") == tmp_path / "a" / "b" and (tmp_path / "a" / "b").is_dir()
    (tmp_path / "link").symlink_to("a")
    assert usable(tmp_path / "link" / "c") and (tmp_path / "a" / "c").is_dir()


def test_an_empty_name_is_not_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="folder is an empty name: give the name of a folder, or '.'"):
        usable("")
    assert usable(".").samefile(tmp_path)


@pytest.mark.parametrize("below", ["", "a", "a/b"])
def test_what_stands_in_the_way_is_named(tmp_path, below):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ValueError, match=f"{tmp_path}/file is a file, and a model is kept in a folder: give another"):
        usable(tmp_path / "file" / below)
    with pytest.raises(ValueError, match=f"{tmp_path}/link is a link that leads nowhere, and .*: give another"):
        usable(tmp_path / "link" / below)
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_that_cannot_be_made_or_written_to(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="cannot be made .File name too long.: give another"):
        usable(tmp_path / ("a" * 300))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # a superuser may write everywhere
    with pytest.raises(ValueError, match=f"Nothing can be written in {tmp_path}: give another"):
        usable(tmp_path)


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, "make room there"),
        (errno.EDQUOT, "make room there"),
        (errno.EACCES, "put that right"),
        (errno.EROFS, "put that right"),
        (errno.EIO, "put that right"),
    ],
)
def test_room_is_asked_for_where_room_is_missing(tmp_path, monkeypatch, code, advice):
    def fail(file):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RuntimeError) as error:
        write_whole(tmp_path / "file", b"data")
    assert (
        str(error.value) == f"{tmp_path / 'file'} could not be written ({os.strerror(code)}): {advice}, and try again."
    )


# --- one program at a time -------------------------------------------------------------------------------------------

HOLD = "import sys; from kvcourse.model_folder import hold; from pathlib import Path\n"
HOLD += "with hold(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


def test_a_folder_is_held_until_its_holder_ends_however_that_comes(tmp_path):
    folder = usable(tmp_path / "model")
    (tmp_path / "link").symlink_to(folder)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        try:
            assert holder.stdout.readline() == b"held\n"
            for path in (folder, tmp_path / "link"):
                with pytest.raises(RuntimeError, match=f"Another program is training in {folder}: wait until"):
                    hold(path)
            with hold(usable(tmp_path / "other")):
                pass
        finally:
            holder.kill()
    with hold(folder), pytest.raises(RuntimeError, match="Another program"):
        hold(folder)
    with hold(folder):
        assert list(folder.iterdir()) == []  # the lock stands beside it


def test_a_lock_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / ".model.lock").mkdir()
    with pytest.raises(RuntimeError, match=f"{tmp_path}/.model.lock could not be written .*: put that right"):
        hold(usable(tmp_path / "model"))
