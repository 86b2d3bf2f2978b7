"""Load on an endpoint: users who wait for their answers (a closed loop), or requests that come at their own times
whether or not the server keeps up (an open loop)."""

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from random import Random
from threading import Thread
from time import perf_counter

import httpx
from tqdm.auto import tqdm

from kvcourse.endpoint.client import Endpoint, ask, base_url, find_model
from kvcourse.endpoint.events import EndpointError
from kvcourse.endpoint.plan import Job, Plan, checked_extra, listed, make_plan
from kvcourse.endpoint.prompts import LONG, SHORT, Ruler, some_words
from kvcourse.endpoint.record import Record
from kvcourse.endpoint.report import MeterReport
from kvcourse.require import require_flag, require_number

KEY_VARIABLE = "KVCOURSE_API_KEY"


def meter(
    url: str,
    prompts=None,
    *,
    new_tokens: int = 64,
    prompt_tokens: int | tuple[int, int] | None = None,
    shared_prefix: int = 0,
    concurrency: int | None = None,
    rate: float | None = None,
    requests: int | None = None,
    seconds: float = 60.0,
    timeout: float = 60.0,
    model: str | None = None,
    api_key: str | None = None,
    chat: bool = False,
    ignore_eos: bool = False,
    extra: dict | None = None,
    seed: int | None = None,
    progress: bool = True,
) -> MeterReport:
    """Measure TTFT, ITL and tokens per second of an OpenAI-compatible streaming endpoint, such as a server of
    llama.cpp, vLLM or SGLang, from outside. `url` is its base, such as http://127.0.0.1:8080, with or without /v1.

    By default one user (`concurrency`) sends 32 `requests`, one after another, with made-up prompts of about 256 tokens
    (`prompt_tokens`: a number, or the least and the most), of which the first `shared_prefix` are the same in all.
    With `rate` it is an open loop: so many requests a second on average, at the times of a Poisson process. After
    `seconds` no request is sent any more; those still running then have `timeout` seconds to finish. `timeout` is also
    how long the server may send nothing before a request counts as failed.

    `prompts` in place of made-up ones: texts, lists of token ids, lists of messages with `chat`, or a trace of
    `kvcourse.serving.workload.Arrival`, which brings its own times and numbers of new tokens. Without `model` the
    endpoint's only one is taken; without `api_key` the environment variable KVCOURSE_API_KEY. `ignore_eos` asks for
    all `new_tokens` where the server knows that field; `extra` are more fields of the request's body, such as
    {"logprobs": 1} (llama.cpp) or {"return_token_ids": True} (vLLM), with which the records have token ids; those that
    the meter sets itself, such as max_tokens, are refused.
    With the same `seed` prompts and times are the same, and a server's prefix cache may know them: by default each run
    has its own.

    One or two short requests come first, which are not part of the figures: they show that the server streams, and how
    many tokens a word is. Raises `ValueError` for arguments that cannot be, before anything is sent, and
    `EndpointError` (a `RuntimeError`) when one of these requests fails. Failures after that are counted in the report.
    When Ctrl-C is pressed the report is about what was measured so far.
    """
    prompts, extra = listed(prompts), checked_extra(extra)
    plan = make_plan(
        prompts, new_tokens, prompt_tokens, shared_prefix, concurrency, rate, requests, seconds, seed, chat
    )
    fields = {"ignore_eos": True} if require_flag("ignore_eos", ignore_eos) else {}
    if not _can_be_sent([prompts, extra, model]):
        raise ValueError("Prompts, extra and model must be what JSON in UTF-8 can hold.")
    if model is not None and (not isinstance(model, str) or not model):
        raise ValueError(f"model={model!r} must be the name of a model.")
    key, timeout = _checked_key(api_key), require_number("timeout", timeout)
    endpoint = Endpoint(base_url(url), model, key, require_flag("chat", chat), timeout, fields | extra)
    run = Run(endpoint, plan)
    with tqdm(total=plan.requests, unit="request", disable=not progress, leave=False, mininterval=0.5) as bar:
        run.watch(lambda: bar.update(sum(record.end is not None for record in run.records) - bar.n))
    return run.report()


def _can_be_sent(content) -> bool:
    try:
        json.dumps(content, ensure_ascii=False, allow_nan=False, default=vars).encode()  # vars: of an `Arrival`
    except (TypeError, ValueError):
        return False
    return True


def _checked_key(api_key: str | None) -> str | None:
    key = os.environ.get(KEY_VARIABLE) or None if api_key is None else api_key
    if key is not None and not (
        isinstance(key, str) and key and key.isascii() and key.isprintable() and " " not in key
    ):
        raise ValueError(f"The API key must be letters, digits and signs without spaces: check it, or {KEY_VARIABLE}.")
    return key


class Run:
    """One measurement: finds the model, sends the first short requests, then the load. It runs in a thread with an
    event loop of its own, since a notebook's kernel has one already."""

    def __init__(self, endpoint: Endpoint, plan: Plan):
        self.endpoint, self.plan, self.ruler = endpoint, plan, Ruler()
        self.records: list[Record] = []
        self.interrupted = False
        self._begin = 0.0
        self._error: BaseException | None = None
        self._stop: Callable[[], None] = lambda: None
        self._thread = Thread(target=self._in_thread, name="kvcourse-meter", daemon=True)

    def watch(self, tick: Callable[[], None]) -> None:
        """Run to the end, or to Ctrl-C, and call `tick` meanwhile. Raises what made the run impossible."""
        self._thread.start()
        try:
            while self._thread.is_alive():
                self._thread.join(0.1)
                tick()
        except KeyboardInterrupt:
            while self._thread.is_alive():
                with suppress(RuntimeError):  # its loop has just ended
                    self._stop()
                self._thread.join(0.1)
            if not self.records:
                raise
            self.interrupted = True
        if self._error is not None and not self.interrupted:
            raise self._error

    def report(self) -> MeterReport:
        return MeterReport(self.endpoint, self.plan, self.ruler, self.records, self.interrupted)

    def _in_thread(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # raised again where the run is watched
            self._error = error

    async def _main(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        self._stop = lambda: loop.call_soon_threadsafe(task.cancel)
        async with self.endpoint.open() as client:
            if self.endpoint.model is None:
                async with self._patience():
                    model = await find_model(client, self.endpoint)
                self.endpoint = replace(self.endpoint, model=model)
            await self._try_out(client)
            jobs = self.plan.jobs(self.ruler)
            self._begin = perf_counter()
            send = self._open_loop if self.plan.open_loop else self._closed_loop
            try:
                async with asyncio.timeout(self.plan.seconds + self.endpoint.timeout):
                    await send(client, jobs)
            except TimeoutError:
                pass  # what is still running then is in the records, without an end

    async def _try_out(self, client: httpx.AsyncClient) -> None:
        """One short request, or two that show how many tokens a word is. Raises `EndpointError` if one fails."""
        random, counts = Random(f"try out {self.plan.seed}"), []
        for words in (SHORT, LONG) if self.plan.prompts is None else (SHORT,):
            record = Record(0.0, 0.0, new_tokens=1)
            async with self._patience():
                await ask(client, self.endpoint, " ".join(some_words(random, words)), record)
            if record.error:
                raise EndpointError(record.error)
            counts.append(record.prompt_tokens)
        if len(counts) == 2:
            self.ruler = Ruler.from_counts(*counts)

    @asynccontextmanager
    async def _patience(self):
        """A server that only sends signs of life must not keep anybody waiting for ever."""
        limit = self.plan.seconds + self.endpoint.timeout
        try:
            async with asyncio.timeout(limit):
                yield
        except TimeoutError:
            raise EndpointError(f"{self.endpoint.base} did not answer a short request within {limit:g} s.") from None

    def _clock(self) -> float:
        """Seconds from the beginning of the run."""
        return perf_counter() - self._begin

    async def _closed_loop(self, client: httpx.AsyncClient, jobs: list[Job]) -> None:
        todo = iter(jobs)  # shared: each user takes the next job

        async def user() -> None:
            while self._clock() < self.plan.seconds and (job := next(todo, None)) is not None:
                await self._send(client, job, due=self._clock())

        async with asyncio.TaskGroup() as users:
            for _ in range(min(self.plan.concurrency, len(jobs))):
                users.create_task(user())

    async def _open_loop(self, client: httpx.AsyncClient, jobs: list[Job]) -> None:
        async with asyncio.TaskGroup() as running:
            for job in jobs:
                if job.at >= self.plan.seconds:
                    break
                await asyncio.sleep(max(0.0, job.at - self._clock()))
                running.create_task(self._send(client, job, due=job.at))

    async def _send(self, client: httpx.AsyncClient, job: Job, due: float) -> None:
        record = Record(due, self._clock(), job.new_tokens)
        self.records.append(record)
        await ask(client, self.endpoint, job.prompt, record, self._clock)
