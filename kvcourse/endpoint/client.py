"""An OpenAI-compatible endpoint: which models it has, and one streamed request, timed."""

from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter

import httpx

from kvcourse.endpoint.events import DONE, Chunk, EndpointError, EventReader, parse_chunk
from kvcourse.endpoint.failures import BASE, CONNECT_AT_MOST, explain, require_ok, require_stream
from kvcourse.endpoint.record import Record


@dataclass(frozen=True)
class Endpoint:
    """Where requests go, and what each says beside its prompt. `base` ends with /v1; `timeout` is how many seconds the
    server may send nothing at all; `extra` are fields of the request's body, where None takes one out."""

    base: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    chat: bool = False
    timeout: float = 60.0
    extra: dict = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"{self.base}/chat/completions" if self.chat else f"{self.base}/completions"

    def open(self) -> httpx.AsyncClient:
        """A client in which every request opens a connection of its own: each is another user, and a server that closes
        an idle connection just then is no error."""
        headers = {"Accept-Encoding": "identity", "User-Agent": "kvcourse"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        host = httpx.URL(self.base).host
        direct = {f"all://{host}": None} if host in ("localhost", "127.0.0.1", "::1") else None  # past any proxy
        timeout = httpx.Timeout(self.timeout, connect=min(self.timeout, CONNECT_AT_MOST))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, mounts=direct)

    def body(self, prompt, new_tokens: int) -> dict:
        """The JSON of a request: greedy, streamed, with the server's own count of tokens at the end."""
        fields = {"model": self.model}
        if self.chat:
            fields["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        else:
            fields["prompt"] = prompt
        fields |= {"max_tokens": new_tokens, "temperature": 0, "stream": True}
        fields |= {"stream_options": {"include_usage": True}, **self.extra}
        return {name: value for name, value in fields.items() if value is not None}


def base_url(url: str) -> str:
    """The base of an endpoint, up to and with /v1. Raises `ValueError` for what is no such URL."""
    given = url.strip() if isinstance(url, str) else url
    try:
        parsed = httpx.URL(given)
    except (TypeError, httpx.InvalidURL):
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"{url!r} is no URL of a server: {BASE}.")
    if parsed.userinfo:
        raise ValueError("The URL has a name or password in it: leave it out, and give an API key instead.")
    path = parsed.path.rstrip("/")
    if parsed.query or parsed.fragment or path.endswith(("/completions", "/models", "/chat")):
        raise ValueError(f"{url} is more than a base: {BASE}.")
    return str(parsed.copy_with(path=path if path.endswith("/v1") else f"{path}/v1"))


async def find_model(client: httpx.AsyncClient, endpoint: Endpoint) -> str:
    """The only model that the endpoint has. Raises `EndpointError` when it has several, or does not tell."""
    url = f"{endpoint.base}/models"
    async with _failures_explained(url, endpoint), client.stream("GET", url) as response:
        await require_ok(response, endpoint.api_key is not None)
        await response.aread()
    try:
        models = [str(model["id"]) for model in response.json()["data"]]
    except (ValueError, TypeError, KeyError):
        models = []
    if len(models) != 1:
        has = (
            f"has {len(models)} models ({', '.join(models[:10])})" if models else "does not say which models there are"
        )
        raise EndpointError(f"{url} {has}: give the one to measure as model.")
    return models[0]


async def ask(
    client: httpx.AsyncClient, endpoint: Endpoint, prompt, record: Record, clock: Callable[[], float] = perf_counter
) -> None:
    """Send one request and fill in `record` while the answer comes. A failure is its `error`, and is not raised.

    `clock()` gives the seconds of the record's times.
    """
    try:
        async with (
            _failures_explained(endpoint.url, endpoint),
            client.stream("POST", endpoint.url, json=endpoint.body(prompt, record.new_tokens)) as response,
        ):
            await require_ok(response, endpoint.api_key is not None)
            await require_stream(response)
            await _read(response, record, clock)
    except EndpointError as error:
        record.error = str(error)
    record.end = clock()


async def _read(response: httpx.Response, record: Record, clock: Callable[[], float]) -> None:
    """Note the chunks of a stream up to its end. Events that came in one packet have one time."""
    reader, chunks, usage, events = EventReader(), [], None, 0
    async for event, now in _events(response, reader, clock):
        events += 1
        if event.strip() == DONE:
            break
        chunk = parse_chunk(event)
        usage = chunk.usage or usage
        record.finish_reason = chunk.finish_reason or record.finish_reason
        if chunk.carries:
            chunks.append(chunk)
            record.arrivals.append(now)
            record.text += chunk.text
            record.token_ids += chunk.ids
    else:
        if not events:
            raise EndpointError("The server closed the stream without sending any event.")
        if record.finish_reason is None:
            raise EndpointError("The stream was cut off: it ended without a finish_reason and without [DONE].")
    usage = usage or {}
    record.tokens = usage.get("completion")
    if record.tokens is None:
        record.tokens = _counted(chunks)
    record.prompt_tokens, record.cached_tokens = usage.get("prompt"), usage.get("cached")


async def _events(response: httpx.Response, reader: EventReader, clock: Callable[[], float]):
    try:
        async for packet in response.aiter_bytes():
            now = clock()
            for event in reader.feed(packet):
                yield event, now
    except (httpx.RemoteProtocolError, httpx.ReadError):
        raise EndpointError("The stream was cut off: the server closed the connection before its end.") from None
    for event in reader.close():
        yield event, clock()


def _counted(chunks: list[Chunk]) -> int | None:
    """The tokens that the chunks themselves say they have. None if one of them does not say, or there are none."""
    counts = [chunk.count for chunk in chunks]
    return sum(counts) if counts and None not in counts else None


@asynccontextmanager
async def _failures_explained(url: str, endpoint: Endpoint):
    try:
        yield
    except (httpx.HTTPError, httpx.StreamError, OSError) as error:
        raise EndpointError(explain(error, url, endpoint.timeout)) from error
