"""The meter against llama.cpp's own server, started for it; and that server's beginning and end."""

import asyncio
import importlib.util
import subprocess
import sys
import time

import httpx
import psutil
import pytest
import torch

import kvcourse as kv
from kvcourse.endpoint.server import llama_cpp_server
from kvcourse.lm import load_model

needed = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed: pip install xllamacpp"
)


@pytest.fixture(scope="module")
def lm():
    return load_model("tiny-gqa", dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def file(lm, tmp_path_factory):
    return kv.write_gguf(lm, tmp_path_factory.mktemp("gguf") / "course.gguf")


@pytest.fixture(scope="module")
def url(file):
    with llama_cpp_server(file, slots=2, context=512, threads=1, float32_cache=True) as url:
        yield url


def meter(url, *args, **options):
    return kv.meter(url, *args, **(dict(progress=False, ignore_eos=True) | options))


@needed
@pytest.mark.parametrize("options", [dict(concurrency=2), dict(rate=100)], ids=["closed", "open"])
@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_every_token_of_a_real_server_is_counted(options, chat, url):
    report = meter(url, chat=chat, new_tokens=9, requests=6, prompt_tokens=(120, 160), seed=0, **options)
    assert report.ok, str(report)
    assert (report.output_tokens, report.endpoint.model) == (6 * 9, "course")
    assert all(record.finish_reason == "length" and record.text for record in report.records)
    assert all(abs(record.prompt_tokens - 140) <= 40 for record in report.records)
    assert all(0 < record.ttft <= record.end - record.start for record in report.records)
    assert "output tokens/s" in str(report)


@needed
def test_the_tokens_are_those_of_the_course(lm, url):
    ids = lm.encode("Once upon a time there was a girl who")
    [record] = meter(url, [ids], new_tokens=24, extra={"logprobs": 1}).records
    assert record.token_ids == kv.generate(lm.model, ids, 24).ids
    assert (record.prompt_tokens, record.tokens, len(record.arrivals)) == (len(ids), 24, 24)
    [other] = meter(url, [lm.encode("The red house")], new_tokens=24, extra={"logprobs": 1}).records
    assert other.token_ids != record.token_ids


@needed
def test_a_shared_prefix_is_seen_in_the_servers_own_count(file):
    with llama_cpp_server(file, context=512, threads=1) as url:
        shared = meter(url, new_tokens=1, requests=4, prompt_tokens=200, shared_prefix=150, seed=0)
        apart = meter(url, new_tokens=1, requests=4, prompt_tokens=200, seed=1)
    assert apart.cached_share < 0.1 and shared.cached_share > 0.4  # the first has nothing to share: 3 of 4 times 3/4
    with llama_cpp_server(file, context=512, threads=1, prefix_caching=False) as url:
        assert meter(url, new_tokens=1, requests=4, prompt_tokens=200, shared_prefix=150).cached_share == 0


@needed
def test_what_the_server_refuses_is_a_failed_request(url):
    report = meter(url, [[5] * 600, [5] * 6], new_tokens=3)
    assert [record.finished for record in report.records] == [False, True]
    assert "400 Bad Request: request (600 tokens) exceeds the available context size (512" in report.records[0].error


@needed
def test_the_server_ends_with_the_block_and_is_for_this_computer_only(file):
    before = {child.pid for child in psutil.Process().children()}
    with llama_cpp_server(file, context=256, threads=1) as url:
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        [process] = [child for child in psutil.Process().children() if child.pid not in before]
        listening = [c.laddr for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
        assert [f"http://{address.ip}:{address.port}" for address in listening] == [url]
        assert url.startswith("http://127.0.0.1:")
    assert not process.is_running()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


@needed
def test_the_server_ends_when_its_block_raises_or_its_parent_is_killed(file):
    with pytest.raises(ZeroDivisionError):
        with llama_cpp_server(file, context=256, threads=1) as url:
            1 / 0  # noqa: B018
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    code = (
        "import sys, os\nfrom kvcourse.endpoint.server import llama_cpp_server\n"
        f"with llama_cpp_server({str(file)!r}, context=256, threads=1) as url:\n"
        "    print(url, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    url = parent.stdout.readline().strip()
    assert httpx.get(f"{url}/health").is_success
    parent.kill()
    parent.communicate()
    for _ in range(200):
        try:
            httpx.get(f"{url}/health")
        except httpx.HTTPError:
            return
        time.sleep(0.05)
    pytest.fail("the server outlived the process that started it")


@needed
def test_a_server_that_dies_takes_nobody_along(file):
    with llama_cpp_server(file, context=256, threads=1) as url:
        process = max(psutil.Process().children(), key=lambda child: child.create_time())
        process.kill()
        process.wait()
        with pytest.raises(RuntimeError, match="connection refused"):
            meter(url)


@needed
def test_inside_a_running_event_loop(url):
    async def cell():
        return meter(url, ["hello"], new_tokens=3)

    assert asyncio.run(cell()).output_tokens == 3


@needed
def test_what_cannot_be_served(tmp_path, file):
    def start(path, **options):
        with llama_cpp_server(path, **options):
            pytest.fail("it was served")

    with pytest.raises(FileNotFoundError, match="There is no file"):
        start(tmp_path / "none.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF, or not")
    with pytest.raises(RuntimeError, match=r"llama.cpp cannot serve .*bad.gguf: Failed to init server"):
        start(tmp_path / "bad.gguf")
    with pytest.raises(RuntimeError, match="did not load .*course.gguf within 0.001 s"):
        start(file, timeout=0.001)
    for wrong in (dict(slots=0), dict(context="x"), dict(threads=-1), dict(float32_cache=1), dict(timeout=0)):
        with pytest.raises(ValueError, match=f"{[*wrong][0]}=.* must be"):
            start(file, **wrong)


def test_without_xllamacpp_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="is not installed: pip install xllamacpp"):
        with llama_cpp_server(tmp_path / "m.gguf"):
            pass
