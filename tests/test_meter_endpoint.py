"""The meter against an endpoint that a test made: what is counted is what was sent, each failure is one sentence."""

import asyncio
import socket
import subprocess
import threading
from shutil import which

import pytest
from fake_endpoint import ADDED, DONE, PER_WORD, SSE, event, piece, plain, serving, usage

import kvcourse as kv
from kvcourse.endpoint.events import EndpointError
from kvcourse.endpoint.load import Run
from kvcourse.endpoint.plan import make_plan
from kvcourse.serving.workload import Arrival


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("KVCOURSE_API_KEY", raising=False)


def meter(server, prompts=None, **options):
    defaults = dict(new_tokens=4, timeout=5, progress=False) | ({} if prompts else dict(requests=6))
    return kv.meter(server if isinstance(server, str) else server.url, prompts, **(defaults | options))


def answers(script, n=1, **options):
    """The report of n requests that are answered by `script`."""
    with serving(script) as server:
        return meter(server, ["hello"] * n, **options)


# --- counting ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [False, True])
def test_every_token_is_counted(chat):
    with serving() as server:
        report = meter(server, chat=chat, new_tokens=5, requests=7, concurrency=2)
        assert len(server.bodies) == 7
        assert set(server.paths) == {"/v1/models", "/v1/chat/completions" if chat else "/v1/completions"}
    assert (report.output_tokens, report.chunks, len(report.finished), report.ok) == (35, 35, 7, True)
    assert [len(report.ttft), len(report.itl), len(report.tpot)] == [7, 7 * 4, 7]
    assert report.tokens_per_second == 35 / report.seconds
    assert report.requests_per_second == 7 / report.seconds
    record = report.records[0]
    assert (record.text, record.tokens, record.finish_reason, record.error) == (" a" * 5, 5, "length", None)
    assert record.due <= record.start < record.first <= record.arrivals[-1] <= record.end


def test_what_a_request_asks_for():
    with serving() as server:
        meter(server, ["hello there"], ignore_eos=True, extra={"top_k": 1, "temperature": None})
        [body] = server.bodies
        assert body == {
            "model": "fake",
            "prompt": "hello there",
            "max_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "top_k": 1,
        }
        meter(server, ["hello"], extra={"stream_options": None})  # for a server that refuses the field
        assert "stream_options" not in server.bodies.pop()
        meter(server, [[5, 6, 7]], model="other")
        assert server.bodies[1] | {"prompt": [5, 6, 7], "model": "other", "temperature": 0} == server.bodies[1]
        meter(server, ["hi"], chat=True)
        assert server.bodies[2]["messages"] == [{"role": "user", "content": "hi"}] and "prompt" not in server.bodies[2]


def test_a_chunk_with_several_tokens_is_not_one_token():
    def three_chunks(body):
        yield from (piece(" a b"), piece(" c d e"), piece(" f", "length"), usage(6), DONE)

    report = answers(three_chunks, n=2, new_tokens=6)
    assert (report.output_tokens, report.chunks, len(report.itl)) == (12, 6, 4)
    for record in report.records:
        assert record.tpot == pytest.approx((record.arrivals[2] - record.arrivals[0]) / 5)
    assert "2 answers had more tokens than chunks (12 in 6)" in str(report)
    assert "more tokens than chunks" not in str(answers(plain, n=2))


def test_without_usage_chunks_are_called_chunks():
    report = answers(lambda body: iter([piece(), piece(), piece("", "stop"), DONE]), n=3)
    assert (report.output_tokens, report.chunks, report.tokens_per_second) == (None, 6, None)
    assert "Tokens could not be counted: the server sent no usage with 3 of 3 answers" in str(report).replace("\n", " ")
    assert "6 chunks; tokens not counted" in str(report) and "tokens/s" not in str(report)


def test_without_usage_tokens_in_the_chunks_are_counted():
    def with_ids(body):
        yield from (piece(" a", token_ids=[4, 5]), piece("", token_ids=[6]), piece(" c", "stop", token_ids=[7]), DONE)

    def half_a_usage(body):
        yield from (piece(" a", token_ids=[4, 5]), piece("", token_ids=[6]), piece(" c", "stop", token_ids=[7]))
        yield from (event(choices=[], usage={"prompt_tokens": 9}), DONE)

    [record] = answers(with_ids).records
    assert (record.tokens, record.token_ids, len(record.arrivals)) == (4, [4, 5, 6, 7], 3)
    [record] = answers(half_a_usage).records
    assert (record.tokens, record.prompt_tokens) == (4, 9)


def test_the_usage_comes_before_what_chunks_say():
    [record] = answers(lambda body: iter([piece(" a", "stop", token_ids=[4, 5]), usage(3), DONE])).records
    assert record.tokens == 3


def test_the_name_of_a_role_is_no_first_token():
    def chat(body):
        yield event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        yield 0.15
        yield event(choices=[{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}])
        yield from (usage(1), DONE)

    [record] = answers(chat, chat=True).records
    assert record.ttft >= 0.15 and len(record.arrivals) == 1


def test_times_are_at_least_what_the_server_slept():
    def slow(body):
        yield from (0.1, piece(), 0.1, piece(), 0.1, piece("", "length"), usage(2), DONE)

    [record] = answers(slow).records
    assert record.ttft >= 0.1 and record.arrivals[1] - record.start >= 0.2 and record.end - record.start >= 0.3


def test_the_format_of_the_stream_may_vary():
    """CRLF, no space after the colon, signs of life, and a letter that comes in two packets."""
    whole = b"".join(
        [b": ping\n\n", piece(" k\u00e4").replace(b"data: ", b"data:"), piece("\U0001f9c0", "stop"), usage(2), DONE]
    )
    whole = whole.replace(rb"\u00e4", "ä".encode()).replace(rb"\ud83e\uddc0", "🧀".encode()).replace(b"\n", b"\r\n")
    for letter in "ä🧀":
        cut = whole.index(letter.encode()) + 1
        [record] = answers(lambda body, cut=cut: iter([whole[:cut], 0.02, whole[cut:]])).records
        assert (record.text, record.tokens, record.error) == (" kä🧀", 2, None)


def test_a_stream_may_end_without_done_but_not_without_a_reason():
    assert answers(lambda body: iter([piece(), piece("", "stop"), usage(1)])).ok
    report = answers(lambda body: iter([piece(), usage(1)]))
    assert "The stream was cut off: it ended without a finish_reason and without [DONE]." in report.records[0].error


def test_an_answer_in_one_piece_is_told():
    whole = piece() + piece() + piece("", "stop") + usage(2) + DONE
    report = answers(lambda body: iter([whole]))
    assert report.records[0].itl == [0.0] and "1 answer came in one piece" in str(report)


def test_empty_and_short_answers():
    report = answers(lambda body: iter([piece("", "stop"), usage(1), DONE]), n=2)
    assert (len(report.finished), report.ttft, report.output_tokens) == (2, [], 2)
    assert report.tokens_per_second is None and "tokens/s," not in str(report)
    assert "2 answers of 2 came without any text: no TTFT" in str(report)
    assert "2 answers ended before the number of new tokens" in str(report) and "in 0)" not in str(report)


def test_tokens_of_an_answer_without_chunks_are_not_in_tokens_per_second():
    def silent_or_plain(body):
        yield from plain(body) if body["prompt"] == "speak" else (piece("", "stop"), usage(900), DONE)

    with serving(silent_or_plain) as server:
        report = meter(server, ["speak", "hush", "speak"])
    assert (report.output_tokens, report.chunks) == (908, 8)
    assert report.tokens_per_second == 8 / report.seconds
    assert "1 answer of 3 came without any text" in str(report)
    assert "without any text" not in str(answers(plain))


def test_the_pieces_of_a_tool_call_are_chunks_and_no_text():
    def calling(body):
        yield event(choices=[{"index": 0, "delta": {"role": "assistant", "content": None}}])
        for arguments in ("", '{"city": ', '"Graz"}'):
            call = {"index": 0, "function": {"name": "weather", "arguments": arguments}}
            yield from (0.05, event(choices=[{"index": 0, "delta": {"tool_calls": [call]}}]))
        yield event(choices=[{"index": 0, "delta": {}, "finish_reason": "tool_calls"}])
        yield from (usage(3), DONE)

    report = answers(calling, chat=True)
    [record] = report.records
    assert (record.text, record.tokens, len(record.arrivals)) == ("", 3, 3) and record.ttft >= 0.05
    assert report.tokens_per_second == 3 / report.seconds
    assert "1 answer had tokens and no text, such as tool calls." in str(report)


# --- prompts -------------------------------------------------------------------------------------------------


def test_lengths_are_learned_from_the_server():
    with serving() as server:
        report = meter(server, prompt_tokens=(101, 141), shared_prefix=60, requests=12)
        prompts = [body["prompt"].split() for body in server.bodies]
    counted = [record.prompt_tokens for record in report.records]
    assert counted == [PER_WORD * len(words) + ADDED for words in prompts]
    assert 100 <= min(counted) and max(counted) <= 142 and len(set(counted)) > 3
    assert len({tuple(words[:30]) for words in prompts}) == 1 and len({tuple(words[:31]) for words in prompts}) > 6
    assert f"{min(counted)} to {max(counted)} tokens each, as the server counted" in str(report)


def test_a_server_that_does_not_count_gets_words():
    def uncounted(body):
        yield from (piece("a", "stop"), DONE)

    with serving(uncounted, first=uncounted) as server:
        report = meter(server, prompt_tokens=30)
        assert {len(body["prompt"].split()) for body in server.bodies} == {30}
    assert "The server did not count the tokens of prompts: their lengths are in words." in str(report)


def test_the_share_from_the_prefix_cache():
    def cached(body):
        yield from (piece("a", "stop"), usage(1, 200, prompt_tokens_details={"cached_tokens": 50}), DONE)

    report = answers(cached, n=2)
    assert report.cached_share == 0.25 and "25.0% of them from its prefix cache" in str(report)
    assert answers(plain).cached_share is None


# --- load ----------------------------------------------------------------------------------------------------


def meeting(n: int, patience: float = 5.0):
    """Answers begin once n requests are there; whoever waits for the others for longer than that is let down."""
    barrier = threading.Barrier(n)

    def script(body):
        try:
            barrier.wait(patience)
        except threading.BrokenBarrierError:
            yield event(error={"message": "nobody came"})
        yield from plain(body)

    return script


def test_a_closed_loop_has_as_many_requests_as_users():
    with serving(meeting(3)) as server:
        report = meter(server, concurrency=3, requests=12)
        assert server.most_in_flight == 3 and len(server.bodies) == 12
    assert report.ok


def test_a_closed_loop_never_has_more():
    with serving(meeting(3, patience=0.3)) as server:
        report = meter(server, concurrency=2, requests=4)
        assert server.most_in_flight == 2
    assert len(report.failed) == 4


def test_an_open_loop_does_not_wait():
    """No answer begins before all requests have come; a loop that waits for answers would never send the second."""
    with serving(meeting(8)) as server:
        report = meter(server, rate=200, requests=8)
        assert server.most_in_flight == 8
    assert report.ok
    assert [record.due for record in report.records] == sorted(record.due for record in report.records)
    assert all(record.start >= record.due for record in report.records)


def test_a_trace_is_sent_at_its_times():
    trace = [Arrival(0.0, [1, 2, 3], 2), Arrival(0.2, [4, 5], 3), Arrival(0.2, [6], 2)]
    with serving() as server:
        report = meter(server, trace)
        assert sorted(body["prompt"] for body in server.bodies) == [[1, 2, 3], [4, 5], [6]]
    assert [record.tokens for record in report.records] == [2, 3, 2]
    assert [record.due for record in report.records] == [0.0, 0.2, 0.2] and report.records[1].start >= 0.2
    assert "at the times of a trace" in str(report)


def test_the_time_bounds_the_run():
    with serving(lambda body: iter([0.1, *plain(body)])) as server:
        report = meter(server, seconds=0.35, requests=500)
        assert 1 <= len(server.bodies) <= 4
    assert report.not_sent == 500 - len(report.records) and report.ok
    assert f"Not sent: {report.not_sent} of 500 requests: the time was over." in str(report)


def test_what_runs_too_long_is_ended():
    """Signs of life are no stall; the bound is seconds + timeout."""

    def lengthy(body):
        yield piece()
        for _ in range(100):
            yield from (0.05, b": alive\n\n")
        yield from plain(body)

    with serving(lengthy) as server:
        report = meter(server, ["a", "b"], concurrency=2, seconds=0.1, timeout=0.7)
    assert (len(report.unfinished), report.finished, report.failed, report.ok) == (2, [], [], False)
    assert report.records[0].text == " a"
    assert "Still running when the run was over, and in no figure: 2 requests." in str(report)
    with serving(first=lengthy) as server, pytest.raises(EndpointError, match="did not answer a short request within"):
        meter(server, seconds=0.1, timeout=0.7)


def test_inside_a_running_event_loop():
    """As in a notebook, whose kernel has one."""

    async def cell():
        return answers(plain, n=2)

    assert asyncio.run(cell()).output_tokens == 8


def test_ctrl_c_reports_what_was_measured():
    def third_hangs(body):
        yield from plain(body) if len(server.bodies) < 3 else [10.0]

    with serving(third_hangs) as server:
        run = interrupted(server, lambda run: len(run.records) == 3)
    report = run.report()
    assert (len(report.finished), len(report.unfinished), report.output_tokens) == (2, 1, 8)
    assert "Stopped by Ctrl-C" in str(report) and "Not sent: 2 of 5 requests." in str(report)


def test_ctrl_c_before_anything_was_measured():
    with serving(first=lambda body: iter([10.0])) as server, pytest.raises(KeyboardInterrupt):
        interrupted(server, lambda run: True)


def interrupted(server, when) -> Run:
    from kvcourse.endpoint.client import Endpoint

    plan = make_plan(["a"] * 5, 4, None, 0, None, None, None, 60, 0, False)
    run = Run(Endpoint(f"{server.url}/v1", "fake", timeout=20.0), plan)

    def press():
        if when(run):
            raise KeyboardInterrupt

    run.watch(press)
    return run


# --- failures ------------------------------------------------------------------------------------------------

JSON = {"Content-Type": "application/json"}
FAILURES = {
    "malformed": ([b"data: {nonsense\n\n"], "malformed event: {nonsense."),
    "error inside": (
        [piece(), event(error={"message": "out of memory", "code": 500})],
        "in its stream: out of memory.",
    ),
    "cut off": ([piece(), piece()], "The stream was cut off"),
    "no event": ([b": hello\n\n"], "closed the stream without sending any event"),
    "cut off inside": (
        [(200, SSE | {"Content-Length": "5000"}), piece()],
        "The stream was cut off: the server closed the connection before its end.",
    ),
    "reset inside": (
        [piece(), 0.05, "reset"],
        "The stream was cut off: the server closed the connection before its end.",
    ),
    "stall": ([piece(), 1.2], "The server stalled: it sent nothing for 0.7 s."),
    "stall before anything": ([1.2], "The server stalled: it sent nothing for 0.7 s."),
    "no streaming": (
        [(200, JSON), b'{"choices": [{"text": "hi"}]}'],
        "answered without streaming (application/json in place of text/event-stream)",
    ),
    "error without a status": ([(200, JSON), b'{"error": {"message": "sorry"}}'], "answered with an error: sorry."),
    "a page": ([(200, {"Content-Type": "text/html; charset=utf-8"}), b"<html>"], "without streaming (text/html"),
    "busy": ([(503, JSON), b'{"error": {"message": "Loading model"}}'], "503 Service Unavailable: Loading model."),
    "too many": ([(429, {}), b""], "429 Too Many Requests: nothing."),
    "bad request": ([(400, JSON), b'{"message": "too long"}'], "400 Bad Request: too long."),
    "no access": ([(401, JSON), b'{"error": "who?"}'], "401 Unauthorized): give the API key, or set KVCOURSE_API_KEY"),
    "forbidden": ([(403, {}), b"no"], "403 Forbidden): give the API key"),
    "not there": (
        [(404, {}), b"nothing here"],
        "/v1/completions, or the model, is not there (404 Not Found): the URL should be the base",
    ),
    "moved": ([(307, {"Location": "/there"}), b""], "redirects to /there (307 Temporary Redirect)"),
}


@pytest.mark.parametrize(("sent", "message"), FAILURES.values(), ids=FAILURES)
def test_a_failed_request_is_counted_and_the_others_go_on(sent, message):
    with serving(lambda body: iter(sent) if body["prompt"] == "bad" else plain(body)) as server:
        report = meter(server, ["good", "bad", "good"], timeout=0.7 if "stalled" in message else 5)
    assert [record.finished for record in report.records] == [True, False, True]
    assert (len(report.failed), report.output_tokens, report.ok) == (1, 8, False)
    error = report.records[1].error
    assert message in error and "\n" not in error
    assert "FAILED, 1 of 3 requests: " in str(report)


@pytest.mark.parametrize(("sent", "message"), FAILURES.values(), ids=FAILURES)
def test_a_server_on_which_the_first_request_fails_is_not_measured(sent, message):
    with serving(first=lambda body: iter(sent)) as server, pytest.raises(EndpointError) as error:
        meter(server, timeout=0.7 if "stalled" in message else 5)
    assert message in str(error.value) and server.bodies == []


def test_nothing_listens():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(EndpointError, match=rf"Nothing listens at http://127.0.0.1:{port} \(connection refused\)"):
        meter(f"http://127.0.0.1:{port}")


def test_no_such_host(monkeypatch):
    def unknown(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(EndpointError, match="There is no host nowhere.invalid: check the name"):
        meter("http://nowhere.invalid")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """One that nobody has signed, for 127.0.0.1, with its key."""
    if which("openssl") is None:
        pytest.skip("openssl, which makes a certificate, is not installed")
    file = tmp_path_factory.mktemp("tls") / "both.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=127.0.0.1"
    options = [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-out", file, "-keyout", f"{file}.key"]
    subprocess.run(options, check=True, capture_output=True)
    file.write_bytes(file.read_bytes() + file.with_suffix(".pem.key").read_bytes())
    return file


def test_tls(certificate, monkeypatch):
    with serving(certificate=certificate) as server:
        https = server.url.replace("http:", "https:")
        with pytest.raises(
            EndpointError, match="The certificate of https://127.0.0.1:.* is not trusted .*SSL_CERT_FILE"
        ):
            meter(https)
        with pytest.raises(EndpointError, match="did not give a whole answer in HTTP.* https://"):
            meter(server.url)  # plain HTTP to a port with TLS
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert meter(https).output_tokens == 24


def test_tls_where_there_is_none():
    with (
        serving() as server,
        pytest.raises(EndpointError, match="does not answer in TLS: .* http:// in place of https"),
    ):
        meter(server.url.replace("http:", "https:"))


def test_a_server_that_does_not_even_answer():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(EndpointError, match="The server stalled: it sent nothing for 0.2 s"):
            meter(f"http://127.0.0.1:{port}", timeout=0.2)
        with pytest.raises(EndpointError, match="within 0.2 s; if it speaks plain HTTP, write http://"):
            meter(f"https://127.0.0.1:{port}", timeout=0.2)


def test_which_model():
    with serving(models=("one", "two")) as server:
        with pytest.raises(EndpointError, match=r"/v1/models has 2 models \(one, two\): give the one to measure"):
            meter(server)
        report = meter(server, model="two")
        assert server.bodies[0]["model"] == "two" and report.endpoint.model == "two"
    with serving(models=()) as server, pytest.raises(EndpointError, match="does not say which models there are"):
        meter(server)


def test_the_key_is_sent_and_never_shown(monkeypatch):
    with serving() as server:
        report = meter(server, api_key="sk-secret")
        assert {headers["Authorization"] for headers in server.headers} == {"Bearer sk-secret"}
        monkeypatch.setenv("KVCOURSE_API_KEY", "sk-other")
        meter(server)
        assert server.headers[-1]["Authorization"] == "Bearer sk-other"
        monkeypatch.delenv("KVCOURSE_API_KEY")
        meter(server)
        assert "Authorization" not in server.headers[-1]
    assert "secret" not in f"{report} {report!r} {report.endpoint!r} {report.as_dict()}"
    with serving(first=lambda body: iter([(401, {}), b""])) as server:
        with pytest.raises(EndpointError, match="refuses access .*: check the key") as error:
            meter(server, api_key="sk-secret")
    assert "secret" not in str(error.value)


def test_a_local_server_is_not_asked_through_a_proxy(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert answers(plain).ok
