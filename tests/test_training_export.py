"""The exported folder: `transformers` computes the same with it, it loads back, and it says where it comes from."""

import errno
import json
import os
import subprocess
from dataclasses import replace
from hashlib import sha256

import pytest
import torch
import training_standin as standin
import transformers

import kvcourse as kv
from kvcourse import model_folder
from kvcourse.model_folder import APART
from kvcourse.training import provenance
from kvcourse.training.export import FILES, export, read_provenance
from kvcourse.training.history import History
from kvcourse.training.provenance import commit, make_provenance, origin
from kvcourse.training.resume import make_plan

transformers.logging.set_verbosity_error()

SHIPPED = {
    "config.json",
    "curve.json",
    "generation_config.json",
    "model.safetensors",
    "provenance.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
VARIANTS = {"mha": {"n_kv_heads": 8}, "gqa": {"n_kv_heads": 2}, "mqa": {"n_kv_heads": 1}, "window": {"window": 64}}
TOKENS = torch.randint(0, 40, (2, 150), generator=torch.Generator().manual_seed(1))


def model_of(variant="gqa", **changes) -> kv.Transformer:
    """Random weights of standard deviation 0.1, with odd rotary base and epsilon, so that what is dropped shows."""
    sizes = dict(vocab_size=40, n_layers=3, n_heads=8, d_model=64, d_ff=96, max_seq_len=256, tie_embeddings=True)
    sizes |= dict(rope_theta=5e4, norm_eps=1e-2) | VARIANTS[variant] | changes
    model = kv.Transformer(kv.ModelConfig(**sizes), "cpu", torch.float32)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.data.normal_(float(weight.ndim == 1), 0.1, generator=generator)
    return model.requires_grad_(True).train()


def written(folder, model, **provenance):
    return export(model, standin.train_tokenizer_of(standin.Recipe()), folder, provenance, [{"step": 1}])


def in_half(model):
    """The same model with its weights rounded to float16, computing in float32."""
    rounded = kv.Transformer(model.config, "cpu", torch.float32)
    rounded.load_state_dict({name: weight.half().float() for name, weight in model.state_dict().items()})
    return rounded


def transformers_logits(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_computes_the_same(tmp_path, variant):
    model = model_of(variant)
    theirs = transformers_logits(written(tmp_path, model))
    ours = in_half(model)(TOKENS)
    assert ours.std() > 0.1  # not a model that says the same whatever it reads
    assert (ours - theirs).abs().max() < 1e-4


def test_an_untied_head_is_written_too(tmp_path):
    model = model_of(tie_embeddings=False)
    assert (in_half(model)(TOKENS) - transformers_logits(written(tmp_path, model))).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("window", {"sliding_window": 65}),
        ("window", {"sliding_window": None}),
        ("gqa", {"rope_theta": 1e4}),
        ("gqa", {"rms_norm_eps": 1e-5}),
    ],
)
def test_a_wrong_config_would_be_noticed(tmp_path, variant, changes):
    model = model_of(variant)
    folder = written(tmp_path, model)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    difference = (in_half(model)(TOKENS) - transformers_logits(folder)).abs()
    assert difference.max() > 1e-3
    if "sliding_window" in changes:  # the window is 64, so nothing differs before token 64, and token 64 does
        assert difference[:, :64].max() < 1e-4 < difference[:, 64].max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_folder_loads_back_with_equal_weights(tmp_path, variant):
    model = model_of(variant)
    lm = kv.load_model(written(tmp_path / variant, model), dtype="float32", device="cpu")
    assert lm.config == model.config and lm.name == variant
    state = lm.model.state_dict()
    assert all(torch.equal(state[name], weight.half().float()) for name, weight in model.state_dict().items())
    assert {path.name for path in (tmp_path / variant).iterdir()} == SHIPPED == set(FILES)


def test_the_tokenizers_agree(tmp_path):
    folder = written(tmp_path, model_of())
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    lm = kv.load_model(folder, device="cpu")
    assert theirs("abcB")["input_ids"] == lm.encode("abcB")
    assert theirs.eos_token_id == theirs.bos_token_id == 0 and lm.tokenizer.stop_ids == {0}
    assert theirs.model_max_length == 256
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float16 and model.generation_config.eos_token_id == 0


def test_weights_too_large_for_float16_are_refused(tmp_path):
    model = model_of()
    model.layers[1].mlp.up_proj.weight.data[3, 4] = -70_000.0
    with pytest.raises(ValueError, match=r"layers.1.mlp.up_proj.weight has numbers.*7e\+04.*65504"):
        written(tmp_path / "out", model)
    model.layers[1].mlp.up_proj.weight.data[3, 4] = 65_504.0
    written(tmp_path / "out", model)


@pytest.mark.parametrize(("changes", "said"), [({"qkv_bias": True}, "qkv_bias"), ({"qk_norm": True}, "qk_norm")])
def test_a_model_that_is_no_llama_is_refused(tmp_path, changes, said):
    with pytest.raises(ValueError, match=f"LlamaForCausalLM cannot have what this model has in: {said}"):
        written(tmp_path / "out", model_of(**changes))
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_the_model_that_was_there(tmp_path, monkeypatch):
    folder = written(tmp_path / "out", model_of(), command="first")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    really = model_folder.write_whole

    def full(path, data):
        if path.name == "tokenizer.json":
            raise RuntimeError(f"{path} could not be written ({errno.ENOSPC})")
        really(path, data)

    monkeypatch.setattr(model_folder, "write_whole", full)
    with pytest.raises(RuntimeError, match="could not be written"):
        written(folder, model_of("mqa"), command="second")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    monkeypatch.undo()
    written(folder, model_of("mqa"), command="second")
    assert read_provenance(folder)["command"] == "second"


def test_what_a_killed_export_left_is_swept(tmp_path):
    (tmp_path / APART).mkdir()
    (tmp_path / APART / "model.safetensors").write_bytes(b"half of it")
    assert {path.name for path in written(tmp_path, model_of()).iterdir()} == SHIPPED


@pytest.mark.parametrize("moved", range(1, len(FILES)))
def test_a_model_of_which_some_files_are_missing_is_known_by_its_provenance(tmp_path, monkeypatch, moved):
    """As when the power fails while files are moved to their places."""
    really, calls = os.replace, []

    def failing(source, target):
        if APART in str(target):  # this one is still being written
            return really(source, target)
        calls.append(target)
        if len(calls) > moved:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        really(source, target)

    monkeypatch.setattr(model_folder.os, "replace", failing)
    with pytest.raises(RuntimeError, match=f"{tmp_path} could not be written .Input/output error.: put that right"):
        written(tmp_path, model_of())
    with pytest.raises(ValueError, match=f"{FILES[moved]} is missing"):
        read_provenance(tmp_path)
    assert len(list(tmp_path.iterdir())) == moved
    monkeypatch.undo()
    read_provenance(written(tmp_path, model_of()))


# --- provenance ------------------------------------------------------------------------------------------------------


def test_checksums_are_those_of_the_files_and_are_compared(tmp_path):
    folder = written(tmp_path, model_of(), command="kvcourse train tiny-gqa")
    found = read_provenance(folder)
    assert found["command"] == "kvcourse train tiny-gqa"
    assert found["sha256"].keys() == SHIPPED - {"provenance.json"}
    assert found["sha256"]["config.json"] == sha256((folder / "config.json").read_bytes()).hexdigest()
    for name in found["sha256"]:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(ValueError, match=f"{name} is missing or damaged"):
            read_provenance(folder)
        (folder / name).unlink()
        with pytest.raises(ValueError, match=f"{name} is missing or damaged"):
            read_provenance(folder)
        (folder / name).write_bytes(content)
    read_provenance(folder)
    (folder / "provenance.json").write_text('{"sha256": {}}')  # a model of no files
    with pytest.raises(ValueError, match="provenance.json is missing or damaged"):
        read_provenance(folder)


def test_provenance_says_how_it_was_made():
    history = History(seconds=90.0)
    history.note(2.0, 96, [])
    history.close(8, 1e-3, 3.25)
    recipe = replace(standin.Recipe(), seed=3)
    plan = make_plan(recipe, "tiny-gqa", torch.tensor([[0, 1]]))
    begun = origin(torch.device("cpu")) | {"commit": "0" * 40, "clean": True}
    history.begin(0, begun)
    found = make_provenance(plan, history, ["kvcourse", "train", "a b"])
    assert json.loads(json.dumps(found)) == found
    expected = {"variant": "tiny-gqa", "seed": 3, "steps": 8, "tokens": 96, "loss": 2.0, "validation_loss": 3.25}
    expected |= {"minutes": 1.5, "command": "kvcourse train 'a b'", "commit": "0" * 40, "clean": True}
    assert {name: found[name] for name in expected} == expected
    assert found["recipe"]["lengths"] == [12, 24] and found["recipe"]["seed"] == 3
    assert found["machine"]["threads"] == torch.get_num_threads() and found["machine"]["torch"] == torch.__version__
    assert found["kvcourse"] == kv.__version__
    assert not {"step", "resumed"} & found.keys()
    history.begin(5, begun | {"commit": "1" * 40})
    resumed = make_provenance(plan, history, [])
    assert resumed["commit"] == "0" * 40 and resumed["resumed"] == [{"step": 5, **begun, "commit": "1" * 40}]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with a package in it, which provenance takes for its own."""
    (tmp_path / "kvcourse").mkdir()
    (tmp_path / "kvcourse" / "__init__.py").write_text("")
    monkeypatch.setattr(provenance.kvcourse, "__file__", str(tmp_path / "kvcourse" / "__init__.py"))
    return tmp_path


def git(folder, *arguments):
    name = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    done = subprocess.run(["git", *name, "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_commit_and_whether_the_package_was_changed(checkout):
    assert commit() == {"commit": None, "clean": None}
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "first")
    head = git(checkout, "rev-parse", "HEAD")
    (checkout / "data").mkdir()
    (checkout / "data" / "model").write_text("the models it writes are no change of the package")
    assert commit() == {"commit": head, "clean": True}
    (checkout / "kvcourse" / "new.py").write_text("")
    assert commit() == {"commit": head, "clean": False}


def test_a_package_in_another_projects_checkout_has_no_commit(checkout, monkeypatch):
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "first")
    inside = checkout / "venv" / "kvcourse"
    inside.mkdir(parents=True)
    monkeypatch.setattr(provenance.kvcourse, "__file__", str(inside / "__init__.py"))
    assert commit() == {"commit": None, "clean": None}


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert commit() == {"commit": None, "clean": None}
