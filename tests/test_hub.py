"""The hub, played by a small HTTP server in this process: what is asked of it, and what happens when it says no."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from huggingface_hub import constants, file_download, utils
from safetensors.torch import save

from kvcourse.config import ModelConfig
from kvcourse.model import Transformer
from kvcourse.weights.hf_folder import Folder
from kvcourse.weights.hub import hub_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "owner/tiny"
CONFIG = ModelConfig(97, 2, 4, 32, 48, 2, tie_embeddings=True)


def checkpoint() -> dict[str, bytes]:
    """The files of a small Llama, with more beside them, as the hub has them."""
    torch.manual_seed(0)
    state = {f"model.{name}": w for name, w in Transformer(CONFIG, "cpu", torch.float32).state_dict().items()}
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 97,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    return {
        "config.json": json.dumps(config).encode(),
        "generation_config.json": b'{"eos_token_id": 2}',
        "tokenizer.json": b'{"version": "1.0"}',
        "model.safetensors": save(state, {"format": "pt"}),
        "consolidated.safetensors": b"the same weights under other names",
        "model.fp16.safetensors": b"the same weights once more",
        "pytorch_model.bin": b"a pickle",
        "original/params.json": b"{}",
        "README.md": b"# Tiny",
    }


def sharded() -> dict[str, bytes]:
    """The same in two shards, whose names are not the usual ones."""
    files = checkpoint()
    state = {name: torch.from_numpy(w) for name, w in load_numpy(files.pop("model.safetensors")).items()}
    names = sorted(state)
    parts = {"part-a.safetensors": names[:5], "part-b.safetensors": names[5:]}
    for file, members in parts.items():
        files[file] = save({name: state[name] for name in members}, {"format": "pt"})
    weight_map = {name: file for file, members in parts.items() for name in members}
    files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    return files


def load_numpy(content: bytes) -> dict:
    from safetensors.numpy import load

    return load(content)


@dataclass
class Hub:
    """What the server has, how it is to misbehave, and what it was asked for."""

    files: dict[str, bytes] = field(default_factory=checkpoint)
    answers: dict[str, tuple[int, str]] = field(default_factory=dict)  # path: status and the hub's error code instead
    cuts: Counter = field(default_factory=Counter)  # file: how many more times it breaks off half way
    asked: list[tuple[str, str]] = field(default_factory=list)  # method and path
    tokens: set[str | None] = field(default_factory=set)
    address: str = ""

    def sent(self) -> set[str]:
        """The files whose content was asked for."""
        return {path.split("/resolve/")[1].split("/", 1)[1] for method, path in self.asked if is_file(method, path)}


def is_file(method: str, path: str) -> bool:
    return method == "GET" and "/resolve/" in path


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path = self.path.split("?")[0]
        hub = self.hub
        hub.asked.append((self.command, path))
        hub.tokens.add(self.headers.get("Authorization"))
        for part, (status, code) in hub.answers.items():
            if part in path:
                return self.reply(b"{}", status, {"X-Error-Code": code} if code else {})
        info = f"/api/models/{REPO}"
        if path in (info, f"{info}/revision/main", f"{info}/revision/{COMMIT}"):
            siblings = [{"rfilename": name} for name in hub.files]
            return self.reply(json.dumps({"id": REPO, "sha": COMMIT, "siblings": siblings}).encode())
        if path.startswith(f"{info}/tree/"):
            entries = [
                {"type": "file", "oid": blob_id(content), "size": len(content), "path": name}
                for name, content in hub.files.items()
            ]
            return self.reply(json.dumps(entries).encode())
        if path.startswith(f"{info}/revision/"):
            return self.reply(b"{}", 404, {"X-Error-Code": "RevisionNotFound"})
        if path.startswith(f"/{REPO}/resolve/"):
            return self.send_file(path.split("/resolve/")[1].split("/", 1)[1])
        return self.reply(b"{}", 404, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def send_file(self, name: str):
        if name not in self.hub.files:
            return self.reply(b"", 404, {"X-Error-Code": "EntryNotFound"})
        content, status = self.hub.files[name], 200
        headers = {"ETag": f'"{blob_id(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        asked = self.headers.get("Range", "")
        if asked and self.command == "GET":
            start = int(asked.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            content, status = content[start:], 206
        if self.command == "GET" and self.hub.cuts[name] > 0:
            self.hub.cuts[name] -= 1
            return self.reply(content, status, headers, keep=len(content) // 2)
        return self.reply(content, status, headers)

    def reply(self, content: bytes, status=200, headers=None, keep=None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:keep])
            if keep is not None:
                self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one model, and a cache of this test's own."""
    hub = Hub()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    point_to(hub.address, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    getattr(utils, "reset_sessions", lambda: None)()
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "KVCOURSE_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    yield hub
    server.shutdown()
    server.server_close()


def point_to(address: str, monkeypatch) -> None:
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)  # its copy, before 1.0


def go_offline(monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    getattr(utils, "reset_sessions", lambda: None)()  # before 1.0 the HTTP client kept the setting it began with


@pytest.fixture
def unplug(monkeypatch):
    """From now on nothing listens where the hub should be."""
    return lambda: point_to("http://127.0.0.1:9", monkeypatch)


def fails(error, *parts: str, repo=REPO, **options):
    with pytest.raises(error) as caught:
        hub_folder(repo, **options)
    assert type(caught.value) is error
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


NEEDED = {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}


def test_only_what_is_needed_is_downloaded(hub):
    folder = hub_folder(REPO)
    assert {file.name for file in folder.iterdir()} == hub.sent() == NEEDED
    for name in NEEDED:
        assert (folder / name).read_bytes() == hub.files[name]
    opened = Folder(folder)
    assert opened.config == CONFIG and opened.read().keys() == Transformer(CONFIG, "meta").state_dict().keys()


def test_shards_are_those_that_the_index_names(hub):
    hub.files = sharded()
    hub.files["model-00001-of-00001.safetensors"] = b"not in the index"
    folder = hub_folder(REPO)
    weights = {"part-a.safetensors", "part-b.safetensors", "model.safetensors.index.json"}
    assert {file.name for file in folder.iterdir()} == hub.sent() == NEEDED - {"model.safetensors"} | weights
    assert Folder(folder).config == CONFIG


def test_what_is_in_the_cache_is_not_downloaded_again(hub):
    first = hub_folder(REPO)
    hub.asked.clear()
    assert hub_folder(REPO) == first
    assert hub.asked and not hub.sent()


def test_a_revision_is_that_revision(hub):
    assert hub_folder(REPO, revision=COMMIT) == hub_folder(REPO)
    fails(ValueError, "has no revision 'nope'", revision="nope")


def test_the_users_token_is_sent(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    hub_folder(REPO)
    assert hub.tokens == {"Bearer hf_test"}


# --- Without a network ---


def test_without_a_network_the_cache_is_used(hub, unplug, capsys):
    first = hub_folder(REPO)
    unplug()
    capsys.readouterr()
    assert hub_folder(REPO) == first
    assert "could not be reached: using the copy of owner/tiny" in capsys.readouterr().out


def test_a_copy_without_a_tokenizer_is_said(hub, unplug, monkeypatch, capsys):
    """Another program may have downloaded the weights alone; text would fail only when it is asked for."""
    folder = hub_folder(REPO)
    unplug()
    hub_folder(REPO)
    assert "on this computer.\n" in capsys.readouterr().out
    (folder / "tokenizer.json").unlink()
    assert hub_folder(REPO) == folder
    assert "on this computer; it has no tokenizer.json.\n" in capsys.readouterr().out
    monkeypatch.setenv("KVCOURSE_OFFLINE", "1")
    assert hub_folder(REPO) == folder
    assert "KVCOURSE_OFFLINE is set: using the copy of owner/tiny" in (said := capsys.readouterr().out)
    assert "it has no tokenizer.json" in said


@pytest.mark.parametrize("status", [500, 503, 429])
def test_when_the_hub_is_down_the_cache_is_used(hub, status):
    first = hub_folder(REPO)
    hub.answers["/api/"] = (status, "")
    assert hub_folder(REPO) == first


def test_offline_by_choice_nothing_is_asked(hub, monkeypatch, capsys):
    first = hub_folder(REPO)
    hub.asked.clear()
    monkeypatch.setenv("KVCOURSE_OFFLINE", "1")
    assert hub_folder(REPO) == first and hub.asked == []
    monkeypatch.setenv("KVCOURSE_OFFLINE", "0")
    assert hub_folder(REPO) == first and hub.asked
    hub.asked.clear()
    go_offline(monkeypatch)
    assert hub_folder(REPO) == first and hub.asked == []


def test_no_network_and_not_in_the_cache(hub, unplug):
    unplug()
    fails(RuntimeError, "owner/tiny is not on this computer", "Connect", "Connect to the internet and try again")


def test_offline_and_not_in_the_cache(hub, monkeypatch):
    go_offline(monkeypatch)
    fails(RuntimeError, "owner/tiny is not on this computer", "HF_HUB_OFFLINE is set")
    monkeypatch.setenv("KVCOURSE_OFFLINE", "1")
    fails(RuntimeError, "owner/tiny is not on this computer", "KVCOURSE_OFFLINE is set")
    assert hub.asked == []


@pytest.mark.parametrize("name", ["config.json", "part-b.safetensors", "model.safetensors.index.json"])
def test_half_of_a_model_in_the_cache_is_not_the_model(hub, unplug, name):
    hub.files = sharded()
    folder = hub_folder(REPO)
    (folder / name).unlink()
    unplug()
    fails(RuntimeError, "is not on this computer")


def test_a_hub_that_is_down_and_nothing_in_the_cache(hub):
    hub.answers["/api/"] = (503, "")
    fails(RuntimeError, "the hub answered with status 503; try again later")


def test_answers_that_are_no_answers(hub):
    """Such as the log-in page of a hotel's network."""
    hub.answers["/api/"] = (200, "")
    fails(RuntimeError, "could not be downloaded")


# --- Downloads that break off ---


def test_a_download_that_breaks_off_goes_on(hub):
    hub.cuts["model.safetensors"] = 1
    try:  # most versions of the library ask again by themselves, some give up
        hub_folder(REPO)
    except RuntimeError as error:
        assert "could not be downloaded" in str(error)
    assert (hub_folder(REPO) / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


def test_a_download_that_fails_leaves_no_half_file(hub, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: None)  # the library would try again for 23 s
    hub.answers["resolve/" + COMMIT + "/model.safetensors"] = (500, "")
    fails(RuntimeError, "could not be downloaded", "status 500")
    monkeypatch.setenv("KVCOURSE_OFFLINE", "1")
    fails(RuntimeError, "is not on this computer")
    monkeypatch.delenv("KVCOURSE_OFFLINE")
    hub.answers.clear()
    assert Folder(hub_folder(REPO)).config == CONFIG


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), PermissionError(13, "Permission denied")])
def test_a_cache_that_cannot_be_written_to(hub, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("huggingface_hub.file_download.http_get", fail)
    fails(RuntimeError, "cannot be written to", error.strerror, "HF_HOME")


# --- When the hub says no ---


@pytest.mark.parametrize("status", [404, 401])
def test_no_such_model(hub, status):
    hub.answers["/api/"] = (status, "RepoNotFound")
    fails(ValueError, "no model owner/tiny on the hub", "spelling", "private", "hf auth login")


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("part", ["/api/", "/resolve/"])
def test_gated_models(hub, status, part):
    hub.answers[part] = (status, "GatedRepo")
    fails(ValueError, "accepted its terms", "https://huggingface.co/owner/tiny", "hf auth login")


def test_a_token_that_is_not_enough(hub):
    hub.answers["/api/"] = (403, "")
    fails(ValueError, "does not let you read owner/tiny (status 403)", "hf auth login")


def test_what_the_hub_denies_is_not_taken_from_the_cache(hub):
    hub_folder(REPO)
    hub.answers["/api/"] = (404, "RepoNotFound")
    fails(ValueError, "no model owner/tiny on the hub")


@pytest.mark.parametrize("name", ["", "a/b/c", "a b/c", "../x", "x/..", "-a/b", "a--b/c", None, 3])
def test_ids_that_cannot_be(hub, name):
    fails(ValueError, repr(name), "is not the id of a model", repo=name)
    assert hub.asked == []


@pytest.mark.parametrize(
    "names, parts",
    [
        (["model-Q4_0.gguf", "README.md"], ["GGUF", "model-Q4_0.gguf"]),
        (["config.json", "pytorch_model.bin"], ["pytorch_model.bin", "pickle"]),
        (["adapter_config.json", "adapter_model.safetensors"], ["adapter"]),
        (["config.json", "consolidated.safetensors"], ["consolidated.safetensors", "not complete"]),
        (["model.safetensors"], ["has no config.json"]),
        (["README.md"], ["has no config.json"]),
        (["config.json"], ["has no weights"]),
    ],
)
def test_repositories_that_are_no_checkpoints(hub, names, parts):
    hub.files = dict.fromkeys(names, b"content")
    fails(ValueError, "The model owner/tiny on the hub", *parts)
    assert not hub.sent()


def test_index_that_leaves_the_folder(hub):
    hub.files = sharded()
    hub.files["model.safetensors.index.json"] = b'{"weight_map": {"model.norm.weight": "../../x.safetensors"}}'
    fails(ValueError, "'../../x.safetensors'", "no safetensors file of this folder")


# --- As a user has it: other processes, the environment ---


def run(code: str, **environment) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "KVCOURSE_OFFLINE"))}
    done = subprocess.run([sys.executable, "-c", code], env=env | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_library_is_not_imported_before_it_is_needed():
    code = "import sys, kvcourse, kvcourse.lm, kvcourse.weights.hub; print('huggingface_hub' in sys.modules)"
    assert run(code) == "False"


def test_another_process_with_the_environment_alone(hub, tmp_path):
    """The tests above set the library's constants; here they come from the environment, as for a user."""
    code = f"from kvcourse.weights.hub import hub_folder; print(hub_folder({REPO!r}))"
    home = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home")}
    folder = run(code, **home)
    assert folder.startswith(str(tmp_path / "home")) and Folder(folder).config == CONFIG
    assert run(code, **home | {"HF_ENDPOINT": "http://127.0.0.1:9"}).endswith(folder)
