"""`kvcourse meter`: the command, what it prints and saves, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from fake_endpoint import plain, serving

from kvcourse.cli.main import main as kvcourse


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("KVCOURSE_API_KEY", raising=False)


def test_the_table(capsys):
    with serving() as server:
        code = kvcourse(["meter", server.url, "--requests", "5", "--new-tokens", "3", "--concurrency", "2"])
    out = capsys.readouterr().out
    assert code == 0
    assert f"{server.url}/v1/completions, model fake" in out
    assert "closed loop, 2 users at once; 5 requests, up to 3 new tokens each" in out
    assert all(f"\n{title}  " in out for title in ("TTFT", "ITL", "TPOT", "whole answer")) and "p95" in out
    assert "requests      5 finished, 0 failed, 0 unfinished" in out
    assert "output        15 tokens in 15 chunks" in out and "output tokens/s" in out


def test_every_option_reaches_the_server(tmp_path, capsys):
    options = "--rate 500 --requests 6 --seconds 20 --prompt-tokens 65-85 --shared-prefix 40 --new-tokens 2 --seed 7"
    options += " --model fake --chat --ignore-eos --timeout 9 --api-key sk-secret"
    with serving() as server:
        command = ["meter", server.url, *options.split(), "--extra", '{"top_k": 1}', "--output", str(tmp_path / "new")]
        assert kvcourse(command) == 0
        assert kvcourse(command) == 0
        bodies = [json.dumps(body) for body in server.bodies]
        assert sorted(bodies[:6]) == sorted(bodies[6:])  # --seed
        assert "/v1/models" not in server.paths
        assert server.bodies[0]["top_k"] == 1 and server.bodies[0]["ignore_eos"] is True
        prompts = [body["messages"][0]["content"].split() for body in server.bodies]
        assert len({tuple(words[:20]) for words in prompts}) == 1
        assert {headers["Authorization"] for headers in server.headers} == {"Bearer sk-secret"}
    printed = capsys.readouterr()
    file = tmp_path / "new" / "meter.json"
    assert f"Written: {file}" in printed.out and f"Replaced: {file}" in printed.out
    assert "open loop, 500 requests a second" in printed.out and "seed 7" in printed.out
    saved = json.loads(file.read_text())
    assert (saved["output_tokens"], saved["finished"], saved["plan"]["prompt_tokens"]) == (12, 6, [65, 85])
    assert [record["tokens"] for record in saved["records"]] == [2] * 6
    assert set(saved["percentiles"]) == {"ttft", "itl", "tpot", "latency"}
    assert "secret" not in file.read_text() + printed.out + printed.err


def test_a_failed_request_is_code_1(capsys):
    def busy(body):
        yield (503, {})
        yield b"busy"

    with serving(busy) as server:
        assert kvcourse(["meter", server.url, "--requests", "3"]) == 1
    out = capsys.readouterr().out
    assert f"FAILED, 3 of 3 requests: {server.url}/v1/completions answered 503 Service Unavailable: busy." in out
    assert "TTFT                     -           -           -         0" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["127.0.0.1:80"], "'127.0.0.1:80' is no URL of a server"),
        (["http://127.0.0.1:9", "--rate", "1", "--concurrency", "1"], "not both"),
        (["http://127.0.0.1:9", "--requests", "0"], "requests=0 must be"),
        (["http://127.0.0.1:9", "--extra", "[1]"], "--extra [1] must be a JSON object"),
        (["http://127.0.0.1:9", "--extra", "{"], "--extra { must be a JSON object"),
        (["http://127.0.0.1:9", "--output", __file__], "is a file, and results are saved in a folder"),
    ],
)
def test_what_cannot_be_is_one_line(arguments, message, capsys):
    assert kvcourse(["meter", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and captured.err.count("\n") == 1


def test_nothing_listens_is_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "kvcourse.cli.main", "meter", "http://127.0.0.1:9"], capture_output=True, text=True
    )
    *_, last = done.stderr.strip().splitlines()
    assert done.returncode == 1 and done.stdout == "" and "Traceback" not in done.stderr
    assert last.endswith(
        "Nothing listens at http://127.0.0.1:9 (connection refused): start the server, or check the port."
    )


@pytest.mark.parametrize("text", ["a", "1-2-3", "5-", "-"])
def test_wrong_lengths_are_wrong_usage(text, capsys):
    with pytest.raises(SystemExit) as end:
        kvcourse(["meter", "http://127.0.0.1:9", f"--prompt-tokens={text}"])
    assert end.value.code == 2 and "argument --prompt-tokens" in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for another process")
def test_ctrl_c_prints_what_was_measured(tmp_path):
    def third_hangs(body):
        yield from plain(body) if len(server.bodies) < 3 else [60.0]

    with serving(third_hangs) as server:
        code = (
            "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "from kvcourse.cli.main import main\n"
            f"sys.exit(main(['meter', {server.url!r}, '--new-tokens', '4', '--output', {str(tmp_path)!r}]))"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        while len(server.bodies) < 3 and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Stopped by Ctrl-C" in out and "requests      2 finished, 0 failed, 1 unfinished" in out
    assert "output        8 tokens in 8 chunks" in out
    assert json.loads((tmp_path / "meter.json").read_text())["interrupted"] is True
