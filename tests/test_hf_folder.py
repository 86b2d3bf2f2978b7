"""Checkpoints saved by `transformers`, read here: same logits. And everything that a folder can have wrong with it."""

import json
import shutil

import pytest
import torch
from checkpoints import (
    FAMILIES,
    HAS_BIAS_SWITCH,
    SCALINGS,
    edit_config,
    edit_json,
    load,
    read_folder,
    rope,
    save,
    window,
)
from reference import TEXT, largest_difference, random_tokens
from safetensors.torch import load_file, save_file

from kvcourse.weights import hf_folder

TOKENS = random_tokens(1, TEXT)
SAME, OTHER = 1e-4, 1e-2  # largest difference of logits: of the same model, and of one that computes something else


def logits(model) -> torch.Tensor:
    with torch.inference_mode():
        out = model(TOKENS)
    return out if isinstance(out, torch.Tensor) else out.logits


def difference(folder, original, **changes) -> float:
    return largest_difference(logits(load(folder, **changes)), logits(original))


def variant(family: str, name: str) -> dict:
    """Settings beyond the plain model: what a family has of ties, biases, windows, and a head size of its own."""
    settings = {}
    if "tied" in name:
        settings |= {"tie_word_embeddings": True}
    if "bias" in name and family in HAS_BIAS_SWITCH:
        settings |= {"attention_bias": True}
    if "bias" in name and family == "llama":
        settings |= {"mlp_bias": True}
    if "window" in name and family != "llama":
        settings |= window(family)
    if "head" in name:
        settings |= {"head_dim": 16}
    return settings


@pytest.mark.parametrize("name", ["plain", "tied", "bias window", "tied bias window head"])
@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path, family, kind, name):
    original = save(tmp_path, family, rope_parameters=rope(kind), **variant(family, name))
    model = load(tmp_path)
    assert largest_difference(logits(model), logits(original)) < SAME
    # Partners: each thing that was read makes a difference.
    c = model.config
    wrong = [{"rope_theta": 1e4}, {"norm_eps": 1e-6}]
    wrong += [{"rope_scaling": None}] if kind != "default" else []
    wrong += [{name: False} for name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm") if getattr(c, name)]
    wrong += [{"window": None}, {"window": 17}, {"window": 15}] if c.window else []
    for changes in wrong:
        assert difference(tmp_path, original, **changes) > OTHER, changes


def test_each_variant_is_what_it_says(tmp_path):
    """The tests above would pass on models that lack the features; here they are, by name."""
    for family in FAMILIES:
        save(tmp_path / family, family, **variant(family, "tied bias window head"))
        config, state = read_folder(tmp_path / family)
        assert (config.d_head, config.tie_embeddings, config.norm_eps) == (16, True, 1e-2)
        assert "lm_head.weight" not in state
        expected = {"llama": (None, None), "mistral": (16, 16)}.get(family, (None, 16))
        assert config.windows == expected
        biases = {name.split(".")[-2] for name in state if name.endswith("bias")}
        attention, mlp = {"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj", "down_proj"}
        assert (
            biases
            == {
                "llama": attention | {"o_proj"} | mlp,
                "mistral": set(),
                "qwen2": attention,
                "qwen3": attention | {"o_proj"},
            }[family]
        )
        assert config.qk_norm == (family == "qwen3") == any("q_norm" in name for name in state)


YARNS = {
    "attention factor": {"attention_factor": 0.7},
    "mscale": {"mscale": 1.0, "mscale_all_dim": 0.3},
    "mscale alone": {"mscale": 3.0},
    "betas": {"beta_fast": 8.0, "beta_slow": 0.5},
    "not truncated": {"truncate": False},
    "null factor": {"factor": None},
}


@pytest.mark.parametrize("name", YARNS)
def test_every_setting_of_yarn(tmp_path, name):
    """Heads of 32 and an original length of 512, so that edges and their rounding lie between pairs."""
    sizes = {"head_dim": 32, "max_position_embeddings": 2048}
    given = rope("yarn", original_max_position_embeddings=512)
    original = save(tmp_path, "llama", rope_parameters=given | YARNS[name], **sizes)
    plain = save(tmp_path / "plain", "llama", rope_parameters=given, **sizes)
    assert difference(tmp_path, original) < SAME
    if name in ("mscale alone", "null factor"):  # the first is ignored, the second comes to the same factor
        assert largest_difference(logits(original), logits(plain)) == 0
    else:
        assert largest_difference(logits(original), logits(plain)) > OTHER


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_scaling_as_older_files_spell_it(tmp_path, kind, key):
    original = save(tmp_path, "llama", rope_parameters=rope(kind))
    edit_config(tmp_path, rope_parameters=None, rope_theta=5e5, rope_scaling={key: kind} | SCALINGS[kind])
    assert difference(tmp_path, original) < SAME
    edit_config(tmp_path, rope_scaling=None)
    assert difference(tmp_path, original) > OTHER


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_are_the_same_as_one_file(tmp_path, family):
    original = save(tmp_path, family, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3 and not (tmp_path / "model.safetensors").exists()
    assert difference(tmp_path, original) < SAME


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_stored_numbers_come_back_bit_for_bit(tmp_path, stored):
    original = save(tmp_path, "qwen3", dtype=stored).state_dict()
    _, same = read_folder(tmp_path, stored)
    _, wide = read_folder(tmp_path, torch.float64)
    assert {f"model.{name}" for name in same if name != "lm_head.weight"} | {"lm_head.weight"} == original.keys()
    for name in same:
        weight = original[name if name == "lm_head.weight" else f"model.{name}"]
        assert same[name].dtype == stored and torch.equal(same[name], weight)
        assert wide[name].dtype == torch.float64 and torch.equal(wide[name], weight.double())


def test_state_is_in_memory_of_its_own(tmp_path):
    """Not a window into the file, which may be replaced while the model is used."""
    save(tmp_path, "llama")
    _, state = read_folder(tmp_path)
    before = {name: weight.clone() for name, weight in state.items()}
    file = tmp_path / "model.safetensors"
    with open(file, "r+b") as opened:
        opened.seek(-4096, 2)
        opened.write(b"\xff" * 4096)
    assert all(torch.equal(state[name], before[name]) for name in state)


def test_numbers_too_large_for_float16_are_not_made_infinite(tmp_path):
    save(tmp_path, "llama", dtype=torch.bfloat16)
    edit_tensors(tmp_path, lambda tensors: tensors["model.norm.weight"].fill_(1e5))
    assert read_folder(tmp_path, torch.bfloat16)[1]["norm.weight"].max() > 9e4
    refuses(tmp_path, "model.norm.weight has numbers too large for float16", dtype=torch.float16)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_numbers_that_are_none_are_found(tmp_path, bad, dtype):
    save(tmp_path, "llama")
    edit_tensors(tmp_path, lambda tensors: tensors["model.norm.weight"][7:8].fill_(bad))
    refuses(tmp_path, "model.safetensors: tensor model.norm.weight has numbers that are infinite or not", dtype=dtype)


# --- Tied and untied heads (four combinations), extra and missing tensors ---


def edit_tensors(folder, change, file="model.safetensors"):
    """Apply `change` to the dictionary of tensors of a safetensors file."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / file).items()}
    change(tensors)
    save_file(tensors, folder / file, {"format": "pt"})


def refuses(folder, *parts: str, error=ValueError, **options):
    with pytest.raises(error) as caught:
        read_folder(folder, **options)
    assert type(caught.value) is error
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


def test_tied_and_head_absent_shares_the_embedding(tmp_path):
    original = save(tmp_path, "llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert difference(tmp_path, original) < SAME


def test_tied_and_the_same_head_stored_again_is_tolerated(tmp_path):
    original = save(tmp_path, "llama", tie_word_embeddings=True)
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" not in read_folder(tmp_path)[1]
    assert difference(tmp_path, original) < SAME


def test_tied_and_another_head_stored_is_a_contradiction(tmp_path):
    save(tmp_path, "llama", tie_word_embeddings=True)
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1e-6}))
    refuses(tmp_path, "tie_word_embeddings = true", "lm_head.weight", "differs from model.embed_tokens.weight")


@pytest.mark.parametrize("flag", [False, None])
def test_untied_uses_the_head(tmp_path, flag):
    original = save(tmp_path, "llama")
    edit_config(tmp_path, tie_word_embeddings=flag)
    assert difference(tmp_path, original) < SAME
    edit_config(tmp_path, tie_word_embeddings=True)
    refuses(tmp_path, "lm_head.weight")


@pytest.mark.parametrize("flag", [False, None])
def test_untied_and_head_absent_is_an_error(tmp_path, flag):
    save(tmp_path, "llama", tie_word_embeddings=True)
    edit_config(tmp_path, tie_word_embeddings=flag)
    refuses(tmp_path, "lacks lm_head.weight", "tie_word_embeddings = true")


def test_rotary_frequencies_in_the_file_are_passed_over(tmp_path):
    original = save(tmp_path, "llama")
    edit_tensors(
        tmp_path, lambda t: t.update({f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in (0, 1)})
    )
    assert difference(tmp_path, original) < SAME


def test_names_without_their_prefix_are_understood(tmp_path):
    original = save(tmp_path, "llama", tie_word_embeddings=True)

    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    edit_tensors(tmp_path, strip)
    assert difference(tmp_path, original) < SAME


def test_a_tensor_under_both_names(tmp_path):
    save(tmp_path, "llama")
    edit_tensors(tmp_path, lambda t: t.update({"norm.weight": t["model.norm.weight"].clone()}))
    refuses(tmp_path, "the same tensor twice, as model.norm.weight and as norm.weight")


def test_missing_tensors_are_named(tmp_path):
    save(tmp_path, "llama")
    edit_tensors(tmp_path, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    refuses(tmp_path, "lacks 1 tensor(s): model.layers.1.mlp.up_proj.weight, which config.json asks for")
    edit_config(tmp_path, num_hidden_layers=4)
    refuses(tmp_path, "lacks 19 tensor(s): model.layers.1.mlp.up_proj.weight, ", " and 14 more")


def test_extra_tensors_are_named(tmp_path):
    save(tmp_path, "llama")
    edit_config(tmp_path, num_hidden_layers=1)
    refuses(tmp_path, "has 9 tensor(s): model.layers.1.", "which config.json does not ask for")


@pytest.mark.parametrize("settings", [{}, {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}])
def test_more_layers_than_could_ever_be_laid_out(tmp_path, settings):
    save(tmp_path, "qwen2", **settings)
    edit_config(tmp_path, num_hidden_layers=10**9, layer_types=None)
    refuses(tmp_path, "num_hidden_layers = 1000000000, but there are only 27 tensors in all")


@pytest.mark.parametrize("family", HAS_BIAS_SWITCH)
def test_biases_are_not_dropped(tmp_path, family):
    save(tmp_path, family, attention_bias=True)
    edit_config(tmp_path, attention_bias=False)
    refuses(tmp_path, "has 8 tensor(s): model.layers.0.self_attn.k_proj.bias")


def test_another_shape(tmp_path):
    save(tmp_path, "llama")
    edit_config(tmp_path, intermediate_size=95)
    refuses(tmp_path, f"{tmp_path}: tensor model.layers.0.mlp.", "has shape", "96", "asks for", "95")


@pytest.mark.parametrize("size", [10**18, 10**19])
def test_sizes_beyond_every_computer(tmp_path, size):
    save(tmp_path, "llama")
    edit_config(tmp_path, intermediate_size=size)
    refuses(tmp_path, "config.json asks for tensors larger than any computer can hold")


@pytest.mark.parametrize("dtype, name", [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.int64, "I64")])
def test_a_type_that_is_not_floating_point(tmp_path, dtype, name):
    save(tmp_path, "llama")
    key = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(tmp_path, lambda t: t.update({key: t[key].to(dtype)}))
    refuses(tmp_path, f"tensor {key} is of type {name}", "quantized")


# --- Files that are missing, damaged, or something else ---


def test_no_such_folder(tmp_path):
    refuses(tmp_path / "nowhere", "There is no folder", "nowhere", error=FileNotFoundError)
    (tmp_path / "file").touch()
    refuses(tmp_path / "file", "is a file")


def test_folder_without_config(tmp_path):
    refuses(tmp_path, "has no config.json")


@pytest.mark.parametrize("text", ["{", "", "\x00\x01", '{"model_type": "llama"'])
def test_config_that_is_not_json(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    refuses(tmp_path, "config.json is not JSON")


def test_config_that_is_not_text(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\x00\xff\x9f")
    refuses(tmp_path, "config.json is not text in UTF-8")


def test_config_that_an_editor_saved_in_its_own_way(tmp_path):
    original = save(tmp_path, "llama")
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text, encoding="utf-8-sig")  # with a mark at its beginning
    assert difference(tmp_path, original) < SAME
    (tmp_path / "config.json").write_text(text, encoding="utf-16")
    refuses(tmp_path, "config.json is in UTF-16: save it as UTF-8")


def test_config_that_is_nested_without_end(tmp_path):
    (tmp_path / "config.json").write_text('{"a": ' + "[" * 100_000)
    refuses(tmp_path, "config.json is nested too deeply")


@pytest.mark.parametrize("old", ['"vocab_size": 97', '"rope_type": "default"'])
def test_config_that_says_a_thing_twice(tmp_path, old):
    """Python takes the last one, other readers the first."""
    save(tmp_path, "llama")
    text = (tmp_path / "config.json").read_text()
    assert text.count(old) == 1
    (tmp_path / "config.json").write_text(text.replace(old, f"{old}, {old}"))
    refuses(tmp_path, f"config.json has the field '{old.split(chr(34))[1]}' twice")


def test_config_that_is_no_object(tmp_path):
    (tmp_path / "config.json").write_text("[1, 2]")
    refuses(tmp_path, "config.json must hold a JSON object, but holds a list")


def test_folder_without_weights(tmp_path):
    save(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    refuses(tmp_path, "has no weights")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
def test_pickles_are_refused(tmp_path, name):
    save(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    refuses(tmp_path, name, "pickle", "run any code", "save_pretrained")


def test_pickles_beside_safetensors_are_not_touched(tmp_path):
    original = save(tmp_path, "llama")
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert difference(tmp_path, original) < SAME


def test_gguf_in_a_folder(tmp_path):
    (tmp_path / "model-Q4_0.gguf").touch()
    refuses(tmp_path, "holds a GGUF file", "model-Q4_0.gguf")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="GGUF file: give the path of that file"):
        hf_folder.find_tensors(tmp_path)


def test_adapters_are_not_models(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").touch()
    refuses(tmp_path, "holds an adapter", "Merge")
    save(tmp_path, "llama")  # even beside a model: it may be meant to change it
    refuses(tmp_path, "holds an adapter", "Merge")


def test_shards_without_their_index(tmp_path):
    save(tmp_path, "llama", max_shard_size="20KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    refuses(tmp_path, "model-00001-of-000", "neither model.safetensors nor model.safetensors.index.json")


@pytest.fixture
def sharded(tmp_path):
    save(tmp_path, "llama", max_shard_size="20KB")
    return tmp_path


INDEX = "model.safetensors.index.json"


def shards(folder) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def test_index_that_names_a_missing_shard(sharded):
    (sharded / shards(sharded)["model.norm.weight"]).unlink()
    refuses(sharded, shards(sharded)["model.norm.weight"], "is missing", "fetch it again")


def test_index_that_names_a_tensor_its_shard_lacks(sharded):
    file = shards(sharded)["model.norm.weight"]
    edit_tensors(sharded, lambda t: t.pop("model.norm.weight"), file)
    refuses(sharded, f"{INDEX} has a tensor model.norm.weight, but {file} does not")


def test_index_with_a_name_that_no_file_can_have(sharded):
    edit_json(sharded / INDEX, weight_map=shards(sharded) | {"model.norm.weight": "x" * 300 + ".safetensors"})
    refuses(sharded, "xxx.safetensors is missing", "fetch it again")


def test_index_that_leaves_out_a_tensor(sharded):
    weight_map = shards(sharded)
    file = weight_map.pop("model.norm.weight")
    edit_json(sharded / INDEX, weight_map=weight_map)
    refuses(sharded, f"{file} has a tensor model.norm.weight, but {INDEX} does not")


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..\\x.safetensors"]
)
def test_index_that_leaves_the_folder(sharded, name):
    edit_json(sharded / INDEX, weight_map=shards(sharded) | {"model.norm.weight": name})
    refuses(sharded, "model.norm.weight", repr(name), "no safetensors file of this folder")


def test_index_that_names_a_pickle_or_nothing(sharded):
    edit_json(sharded / INDEX, weight_map=shards(sharded) | {"model.norm.weight": "pytorch_model.bin"})
    refuses(sharded, "'pytorch_model.bin'", "no safetensors file")
    edit_json(sharded / INDEX, weight_map=shards(sharded) | {"model.norm.weight": 3})
    refuses(sharded, "is in 3", "no safetensors file")
    (sharded / INDEX).write_text('{"metadata": {}}')
    refuses(sharded, INDEX, "has no weight_map")
    (sharded / INDEX).write_text('{"weight_map"')
    refuses(sharded, INDEX, "is not JSON")


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 5000, -1])
def test_truncated_safetensors(tmp_path, keep):
    save(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refuses(tmp_path, "model.safetensors is damaged or was cut short")


def test_truncated_shard(sharded):
    file = sharded / shards(sharded)["model.norm.weight"]
    file.write_bytes(file.read_bytes()[:-10])
    refuses(sharded, file.name, "is damaged or was cut short")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_pointers_of_git_lfs(tmp_path, name):
    save(tmp_path, "llama")
    (tmp_path / name).write_text(POINTER)
    refuses(tmp_path, f"{name} is only a pointer", "git lfs pull")


def test_links_to_files_elsewhere_are_followed(tmp_path):
    """As in the hub's cache, where a folder's files are links to blobs."""
    original = save(tmp_path / "blobs", "llama", max_shard_size="20KB")
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert difference(tmp_path / "snapshot", original) < SAME
    shutil.rmtree(tmp_path / "blobs")
    refuses(tmp_path / "snapshot", "has no config.json")
