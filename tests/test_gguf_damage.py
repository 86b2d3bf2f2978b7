"""GGUF files that cannot be read, and models in several files: one clear error each, or the whole model."""

import gguf
import numpy as np
import pytest
import torch
from gguf_files import gguf_tensors, llama_fields, random_state, read_gguf, tiny_config, write, write_model

from kvcourse.weights.gguf_file import open_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    """A small file with a vocabulary in its metadata, as real ones have."""
    config = tiny_config(vocab_size=5, tie_embeddings=True)
    fields = {
        "general.name": "a name",
        "tokenizer.ggml.tokens": ["<s>", "a", "bc", "é", "def"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1],
        "tokenizer.ggml.scores": [0.0, -1.0, -2.0, -3.0, -4.0],
    }
    path = write_model(tmp_path_factory.mktemp("whole") / "m.gguf", config, random_state(config), **fields)
    read_gguf(path)
    return path.read_bytes()


def header_size(path) -> int:
    return gguf.GGUFReader(path).data_offset


def read_bytes(tmp_path, content: bytes):
    path = tmp_path / "cut.gguf"
    path.write_bytes(content)
    return read_gguf(path)


def test_a_file_cut_short_anywhere_is_refused(tmp_path, whole):
    (tmp_path / "whole.gguf").write_bytes(whole)
    header = header_size(tmp_path / "whole.gguf")
    assert 1000 < header < len(whole) // 2
    lengths = [*range(0, 130), *range(130, header + 40, 13), *range(header, len(whole), 7919), len(whole) - 1]
    for length in lengths:
        with pytest.raises(ValueError, match="cut.gguf (was cut short|is damaged or was cut short|is not a GGUF file)"):
            read_bytes(tmp_path, whole[:length])


def test_a_damaged_header_never_gives_another_error(tmp_path, whole):
    """One byte of the header changed: either it did not matter, or it is one `ValueError` that names the file."""
    (tmp_path / "whole.gguf").write_bytes(whole)
    header, rng, refused = header_size(tmp_path / "whole.gguf"), np.random.default_rng(0), 0
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[rng.integers(header)] ^= 1 << rng.integers(8)
        try:
            read_bytes(tmp_path, bytes(damaged))
        except ValueError as error:
            assert "cut.gguf" in str(error)
            refused += 1
    assert refused > 75


def test_a_count_that_cannot_be_true_is_found_at_once(tmp_path, whole):
    """A vocabulary of 2^60 words: the reader stops where the file does, it does not go on finding empty words."""
    key = b"tokenizer.ggml.token_type"
    at = whole.index(key) + len(key) + 8  # behind the key come the types of the array and of its members
    assert int.from_bytes(whole[at : at + 8], "little") == 5
    with pytest.raises(ValueError, match="cut.gguf is damaged"):
        read_bytes(tmp_path, whole[:at] + (1 << 60).to_bytes(8, "little") + whole[at + 8 :])


def test_a_file_of_another_kind_and_no_file(tmp_path):
    (tmp_path / "page.gguf").write_text("<html>404</html>")
    with pytest.raises(ValueError, match="page.gguf is not a GGUF file"):
        read_gguf(tmp_path / "page.gguf")
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(FileNotFoundError, match="There is no file"):
            read_gguf(path)


@pytest.mark.parametrize("magic", [b"ggml", b"ggjt", b"lmgg", b"GGUG"])
def test_other_magic_letters(tmp_path, whole, magic):
    with pytest.raises(ValueError, match="cut.gguf is not a GGUF file"):
        read_bytes(tmp_path, magic + whole[4:])


@pytest.mark.parametrize("version", [0, 1, 4, 65535])
def test_versions_that_cannot_be_read_are_named(tmp_path, whole, version):
    with pytest.raises(ValueError, match=f"cut.gguf is of GGUF version {version}; versions 2 to 3"):
        read_bytes(tmp_path, whole[:4] + version.to_bytes(4, "little") + whole[8:])


def test_version_2_is_read(tmp_path, whole):
    config, state, _ = read_bytes(tmp_path, whole[:4] + (2).to_bytes(4, "little") + whole[8:])
    assert state["embed_tokens.weight"].shape == (config.vocab_size, config.d_model)


def test_a_big_endian_file_is_named(tmp_path):
    config = tiny_config()
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    for key, value in llama_fields(config).items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for name, weight in gguf_tensors(config, random_state(config)).items():
        writer.add_tensor(name, weight.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="m.gguf is a big-endian GGUF file"):
        read_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", ["adapter", "imatrix", "mmproj"])
def test_files_that_are_no_models(tmp_path, kind):
    path = write(tmp_path / "m.gguf", {"general.type": kind}, {"a": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match=f"m.gguf says general.type = '{kind}', which is not supported"):
        read_gguf(path)


def write_parts(folder, per_file=9):
    """A model split by the `gguf` package; its parts, in order."""
    config = tiny_config()
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=per_file)
    for key, value in llama_fields(config).items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for name, weight in gguf_tensors(config, random_state(config)).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("m-*.gguf"))


def test_a_model_in_several_files_is_read_from_the_first(tmp_path):
    parts = write_parts(tmp_path)
    assert [part.name for part in parts] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    config, state, metadata = read_gguf(parts[0])
    one_file = write_model(tmp_path / "one.gguf", tiny_config(), random_state(tiny_config()))
    expected_config, expected, _ = read_gguf(one_file)
    assert config == expected_config and state.keys() == expected.keys()
    assert metadata["llama.context_length"] == 128
    for name, weight in expected.items():
        assert torch.equal(state[name], weight), name


def test_a_part_that_is_not_the_first(tmp_path):
    parts = write_parts(tmp_path)
    with pytest.raises(ValueError, match="m-00002-of-00003.gguf is part 2 of 3.*give part 1, ...-00001-of-00003.gguf"):
        read_gguf(parts[1])


def test_a_missing_part_is_named(tmp_path):
    parts = write_parts(tmp_path)
    parts[2].unlink()
    with pytest.raises(FileNotFoundError, match="m-00003-of-00003.gguf"):
        read_gguf(parts[0])


def test_a_part_that_was_renamed(tmp_path):
    parts = write_parts(tmp_path)
    renamed = parts[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ValueError, match="model.gguf is part 1 of 3.*-00001-of-00003.gguf"):
        read_gguf(renamed)


def test_parts_that_do_not_belong_together(tmp_path):
    parts = write_parts(tmp_path)
    second = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ValueError, match="m-00002-of-00003.gguf is not part 2 of the 3 parts"):
        open_gguf(parts[0])
    write_model(parts[1], tiny_config(), random_state(tiny_config()))  # a model of its own
    with pytest.raises(ValueError, match="m-00002-of-00003.gguf is not part 2"):
        open_gguf(parts[0])
    parts[1].write_bytes(second[: len(second) // 2])
    with pytest.raises(ValueError, match="m-00002-of-00003.gguf is damaged or was cut short"):
        open_gguf(parts[0])
    parts[1].write_bytes(second)
    open_gguf(parts[0])


def test_parts_that_repeat_a_tensor(tmp_path):
    (tmp_path / "other").mkdir()
    parts, others = write_parts(tmp_path, per_file=9), write_parts(tmp_path / "other", per_file=8)
    if len(parts) != len(others):
        pytest.fail("choose sizes that give as many parts")
    parts[1].write_bytes(others[1].read_bytes())
    with pytest.raises(ValueError, match="has tensors that an earlier part has too"):
        open_gguf(parts[0])
