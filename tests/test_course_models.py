"""The models that the course knows by name: those that travel with it, and what takes the chat model's place."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reference import largest_difference, random_tokens

import kvcourse as kv
from kvcourse import paths
from kvcourse.cli import doctor
from kvcourse.offline import offline
from kvcourse.training.recipe import Recipe, train_tokenizer_of
from kvcourse.weights import fetch as weights
from kvcourse.weights import shipped
from kvcourse.weights.shipped import SHIPPED, altered, shipped_folder

DATA = Path(__file__).parent.parent / "data"
CHAT = "smollm2-135m"


@pytest.fixture(scope="module")
def models() -> dict[str, kv.LM]:
    return {name: kv.load_model(name, torch.float32, "cpu") for name in SHIPPED}


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the course's data, which may be damaged."""
    shutil.copytree(DATA, tmp_path / "data")
    monkeypatch.setattr(shipped, "data_folder", lambda: tmp_path / "data")
    return tmp_path / "data" / "models"


@pytest.fixture
def nothing_fetched(tmp_path, monkeypatch):
    """No model was ever fetched, and fetching one fails the test."""
    monkeypatch.setenv("KVCOURSE_MODELS", str(tmp_path / "models"))
    monkeypatch.setattr(weights, "download", lambda *args: pytest.fail("the network was used"))
    monkeypatch.delenv("KVCOURSE_OFFLINE", raising=False)
    return tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


# --- the models that travel with the course ------------------------------------------------------------------


def test_the_course_s_names():
    assert kv.COURSE_MODELS == ("tiny-mha", "tiny-gqa", "tiny-mqa", "tiny-window", CHAT)
    assert sorted(folder.name for folder in (DATA / "models").iterdir()) == sorted(SHIPPED)


def test_they_differ_in_attention_alone(models):
    for name, lm in models.items():
        assert lm.name == name and (lm.model.dtype, lm.model.device.type) == (torch.float32, "cpu")
    configs = {name: dict(vars(lm.config)) for name, lm in models.items()}
    attention = {name: (c["n_heads"], c.pop("n_kv_heads"), c.pop("window")) for name, c in configs.items()}
    assert attention == {
        "tiny-mha": (8, 8, None),
        "tiny-gqa": (8, 2, None),
        "tiny-mqa": (8, 1, None),
        "tiny-window": (8, 8, 64),
    }
    assert all(config == configs["tiny-mha"] for config in configs.values())
    assert len({(DATA / "models" / name / "tokenizer.json").read_bytes() for name in SHIPPED}) == 1


def test_the_tokenizer_is_the_recipe_s():
    made = train_tokenizer_of(Recipe())
    shipped_text = (DATA / "models" / "tiny-mha" / "tokenizer.json").read_text(encoding="utf-8")
    assert made.to_str(pretty=True) + "\n" == shipped_text
    assert train_tokenizer_of(Recipe(vocab_size=1999)).to_str(pretty=True) + "\n" != shipped_text


def test_they_are_small_and_quick_to_load(capsys):
    size = sum(file.stat().st_size for file in (DATA / "models").rglob("*"))
    assert size <= 32e6
    code = """
import time, torch
start = time.perf_counter()
import kvcourse as kv
kv.load_model
imported = time.perf_counter()
kv.load_model("tiny-gqa")
print(f"import kvcourse and what load_model needs: {imported - start:.2f} s over import torch; "
      f"tiny-gqa: {time.perf_counter() - imported:.3f} s")
"""
    with capsys.disabled():
        print(f"\n{run(code).strip()}; all models together: {size / 1e6:.1f} MB")


@pytest.mark.parametrize("name", SHIPPED)
def test_transformers_computes_the_same_from_the_same_files(name, models):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lm = models[name]
    peer = AutoModelForCausalLM.from_pretrained(shipped_folder(name), dtype=torch.float32)
    tokens = random_tokens(2, lm.config.max_seq_len, vocab_size=lm.config.vocab_size)  # far longer than the window
    with torch.no_grad():
        expected = peer(tokens).logits
    assert largest_difference(lm.model(tokens), expected) < 1e-4
    assert largest_difference(lm.model(tokens.flip(1)), expected) > 0.1  # partner: what another text gives
    text = 'Tom said, "Where is the cat?"\n\tŻółw 🐢'
    assert AutoTokenizer.from_pretrained(shipped_folder(name)).encode(text) == lm.encode(text)
    assert lm.decode(lm.encode(text)) == text


def test_no_network_is_used():
    code = """
import socket
def refuse(*args, **kwargs):
    raise AssertionError("the network was used")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
import kvcourse as kv
for name in kv.COURSE_MODELS[:4]:
    print(kv.load_model(name, device="cpu").name)
"""
    assert run(code, KVCOURSE_MODELS="/nowhere").split() == list(SHIPPED)


def test_a_course_name_comes_before_a_folder_of_that_name(tmp_path, monkeypatch):
    (tmp_path / "tiny-gqa").mkdir()
    monkeypatch.chdir(tmp_path)
    assert kv.load_model("tiny-gqa").config.n_kv_heads == 2
    with pytest.raises(ValueError, match="no config.json"):
        kv.load_model("./tiny-gqa")


def test_fetching_them_is_finding_them(nothing_fetched):
    for name in SHIPPED:
        assert kv.fetch(name) == DATA / "models" / name


def test_near_misses_are_told_the_names():
    for name in ("tiny-gca", "tiny_gqa", "Tiny-GQA"):
        with pytest.raises(
            ValueError, match="Did you mean 'tiny-gqa'.*one of tiny-mha, tiny-gqa, tiny-mqa, tiny-window"
        ):
            kv.load_model(name)
        with pytest.raises(ValueError, match=f"There is no model '{name}' to fetch. Did you mean 'tiny-gqa'"):
            kv.fetch(name)


# --- damage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_every_file_is_as_provenance_says(name, models):
    assert altered(name) == []
    sums = json.loads((shipped_folder(name) / "provenance.json").read_text(encoding="utf-8"))["sha256"]
    assert {*sums, "provenance.json"} == {file.name for file in shipped_folder(name).iterdir()}


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "curve.json"])
def test_one_changed_byte_is_found(file, copy):
    path = copy / "tiny-mqa" / file
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    assert altered("tiny-mqa") == [path] and altered("tiny-gqa") == []
    assert doctor.data() == ("fix", "data", f"{path} is missing or not as it was shipped: install the course again")


def test_missing_files_are_found(copy):
    (copy / "tiny-mha" / "config.json").unlink()
    (copy / "tiny-mha" / "tokenizer.json").unlink()
    assert {path.name for path in altered("tiny-mha")} == {"config.json", "tokenizer.json"}
    assert doctor.data().status == "fix" and "(and 1 more)" in doctor.data().text
    for damage in (b"", b"[]", b"{}", b'{"sha256": 5}', b'{"sha256": {"config.json"'):
        (copy / "tiny-mha" / "provenance.json").write_bytes(damage)
        assert altered("tiny-mha") == [copy / "tiny-mha" / "provenance.json"]
    (copy / "tiny-mha" / "provenance.json").unlink()
    assert altered("tiny-mha") == [copy / "tiny-mha" / "provenance.json"]


def test_a_model_that_is_not_there(copy):
    shutil.rmtree(copy / "tiny-window")
    with pytest.raises(FileNotFoundError, match="tiny-window should be in .*: install the course again"):
        kv.load_model("tiny-window")
    assert doctor.data().status == "fix" and "tiny-window should be in" in doctor.data().text


def test_weights_that_are_cut_short_are_refused(copy):
    os.truncate(copy / "tiny-gqa" / "model.safetensors", 100_000)
    with pytest.raises(ValueError, match="model.safetensors is damaged or was cut short"):
        kv.load_model("tiny-gqa")


def test_data_lies_inside_the_package_or_beside_it(tmp_path, monkeypatch):
    assert paths.data_folder() == DATA
    package = tmp_path / "site" / "kvcourse"
    monkeypatch.setattr(paths, "__file__", str(package / "paths.py"))
    with pytest.raises(FileNotFoundError, match="The course's data is in neither .*: install the course again"):
        paths.data_folder()
    (tmp_path / "site" / "data" / "models").mkdir(parents=True)
    assert paths.data_folder() == tmp_path / "site" / "data"
    (package / "data" / "models").mkdir(parents=True)
    assert paths.data_folder() == package / "data"


# --- without a network ---------------------------------------------------------------------------------------


def test_offline_the_small_model_takes_the_chat_model_s_place_and_says_so(nothing_fetched, monkeypatch, capsys):
    monkeypatch.setenv("KVCOURSE_OFFLINE", "1")
    lm = kv.load_model(CHAT)
    said = f"KVCOURSE_OFFLINE is set; {CHAT} is not on this computer:\nusing the course's own tiny-gqa instead.\n"
    assert lm.name == "tiny-gqa" and capsys.readouterr() == (said, "")
    assert kv.load_model("tiny-mqa").name == "tiny-mqa" and capsys.readouterr() == ("", "")
    with pytest.raises(ValueError, match="no model 'smollm'"):  # only the course's own name is replaced
        kv.load_model("smollm")


@pytest.mark.parametrize("value", [None, "", "0"])
def test_without_the_switch_nothing_takes_its_place(value, nothing_fetched, monkeypatch):
    if value is not None:
        monkeypatch.setenv("KVCOURSE_OFFLINE", value)

    def refuse(*args):
        raise weights.cannot(CHAT, "there is no network")

    monkeypatch.setattr(weights, "download", refuse)
    with pytest.raises(RuntimeError) as caught:
        kv.load_model(CHAT)
    assert str(caught.value) == (
        f"The model {CHAT} is not on this computer and could not be downloaded: there is no network. "
        "With KVCOURSE_OFFLINE=1 the course runs on its own small model, tiny-gqa."
    )


def test_offline_a_damaged_chat_model_is_an_error_and_nothing_takes_its_place(nothing_fetched, monkeypatch):
    monkeypatch.setenv("KVCOURSE_OFFLINE", "1")
    nothing_fetched.parent.mkdir()
    nothing_fetched.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="is damaged or not complete"):
        kv.load_model(CHAT)
    nothing_fetched.unlink()
    nothing_fetched.mkdir()
    with pytest.raises(RuntimeError, match="is a folder.*give it another name.$"):
        kv.load_model(CHAT)


@pytest.mark.smollm2
def test_offline_the_chat_model_is_used_where_it_is(monkeypatch, capsys):
    monkeypatch.setenv("KVCOURSE_OFFLINE", "1")
    assert weights.stand_in(CHAT) == CHAT
    assert weights.model_file(CHAT) == weights.fetched(CHAT) and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("value", ["yes", "true", "2", "off"])
def test_the_switch_is_1_or_0(value, nothing_fetched, monkeypatch):
    monkeypatch.setenv("KVCOURSE_OFFLINE", value)
    for use in (offline, lambda: kv.load_model(CHAT), lambda: kv.load_model("owner/name"), doctor.model):
        with pytest.raises(ValueError, match=f"KVCOURSE_OFFLINE='{value}' must be 1 .*, or 0 or unset"):
            use()


def test_doctor_says_what_will_run(nothing_fetched, monkeypatch):
    assert doctor.model().status == "fix"
    monkeypatch.setenv("KVCOURSE_OFFLINE", "1")
    assert doctor.model().status == "look" and "the course runs on tiny-gqa" in doctor.model().text
    assert doctor.disk().status == "ok" and "nothing more is needed" in doctor.disk().text


def run(code: str, **env) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env})
    assert result.returncode == 0, result.stderr
    return result.stdout
