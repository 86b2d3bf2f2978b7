"""The engine: requests come at any time, and each forward pass works for all of them (continuous batching).

`Engine` joins what the other files do: the scheduler says which tokens run, the packed cache takes them through the
model in one row, and each request has a sampler of its own. Neighbours change when its tokens come, never which.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count

import torch
from torch import Tensor

from kvcourse.caches.packed import PackedCache, Piece
from kvcourse.caches.pages import Pages
from kvcourse.metrics import Stopwatch
from kvcourse.model import Transformer
from kvcourse.require import require_flag, require_whole
from kvcourse.sampling import Sampler
from kvcourse.serving.blocks import BlockPool
from kvcourse.serving.prefix import Identity, PrefixIndex
from kvcourse.serving.scheduler import Plan, Scheduler
from kvcourse.serving.served import Served, Stats, Text, check_request, require_id
from kvcourse.texts import Prompt, as_ids, check_room

SAMPLE_OPTIONS = ("temperature", "top_k", "top_p", "stop_ids", "on_token")  # those of submit that samples share


class Engine:
    """Serves many requests with one model, from `num_blocks` pages of `block_size` tokens.

    - `prefix_caching`: prompts that begin as an earlier text did are not computed again as far as its pages are there;
    - `max_batch_tokens`: tokens a forward pass takes at most: a large number ends prompts early, a small one lets those
      who read along wait less for the prompts of others;
    - `max_running`: requests that have pages at the same time;
    - `attention`: "gather" or "direct", see `PackedCache`.

    Raises `ValueError` for sizes below 1 and for pages that do not fit into memory.

    An interrupt (KeyboardInterrupt) or an error in the middle of a step leaves the engine usable: tokens chosen so far
    are kept, all pages are forgotten, and whoever was running is computed again. Recomputing undoes everything.

    One thread steps, and only that one submits and aborts; callbacks run in it, and may do all of this.
    """

    def __init__(
        self,
        model: Transformer,
        num_blocks: int,
        block_size: int = 16,
        prefix_caching: bool = True,
        max_batch_tokens: int = 512,
        max_running: int = 64,
        attention: str | None = None,
    ):
        if not isinstance(model, Transformer):
            raise ValueError(f"model must be a Transformer, such as lm.model, not {type(model).__name__}.")
        self.model = model
        self.num_blocks, self.block_size = num_blocks, block_size
        self.prefix_caching = require_flag("prefix_caching", prefix_caching)
        self.max_batch_tokens, self.max_running = max_batch_tokens, max_running
        self.pages = Pages(model.config, num_blocks, block_size, model.dtype, model.device)
        self.scheduler = self._new_scheduler()
        self.packed = PackedCache(self.pages, attention)
        self.clock = Stopwatch(model.device)
        self.stats = Stats()
        self.plan: Plan | None = None  # of the latest step
        self.results: dict[Hashable, Served] = {}  # of all requests that have ended
        self._texts: dict[Hashable, Text] = {}  # those that have not, by arrival
        self._since_run: dict[Hashable, Served] = {}
        self._untold: deque[tuple[Text, int]] = deque()
        self._ids = count()
        self._damaged = False  # an interrupt struck in the middle of beginning anew

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._texts)

    @property
    def free_blocks(self) -> int:
        """Blocks that no running request holds. What the prefix cache keeps counts as free: it gives way."""
        return self.scheduler.pool.free_blocks

    def submit(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        *,
        id: Hashable = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop_ids: Iterable[int] | None = None,
        on_token: Callable[[int], None] | None = None,
    ) -> Hashable:
        """Ask for `max_new_tokens` tokens after `prompt`; returns the request's id.

        `id` is anything that can be the key of a dict. Without one it is a number that no request has or had, given or
        not: so do not count your own ids where others are left to the engine; a number it has given out is taken.
        Options are those of `generate`. `on_token(token)` is called as each token arrives; when it raises an exception,
        this request ends with that `error`, and the others go on. Raises `ValueError` at once when something is out of
        range, or the request does not fit the model's context or all pages together.
        """
        options = dict(temperature=temperature, top_k=top_k, top_p=top_p, stop_ids=stop_ids, on_token=on_token)
        text = self._make_text(prompt, max_new_tokens, id, seed=seed, **options)
        self._add(text)
        return text.id

    def submit_samples(self, prompt: Prompt, n: int, max_new_tokens: int, *, seed=None, **options) -> list[Hashable]:
        """Ask for `n` answers to one prompt. Returns their ids.

        The prompt is computed once for all samples that are let in while the first one runs: they share its pages, and
        compute the last token of the prompt again. Later ones, as with `max_running` below `n` or one new token each,
        find what the prefix cache has of it: its full blocks at most. Options are those of `submit` but `id`; sample i
        draws with `seed + i`.
        """
        if "id" in options:
            raise ValueError("submit_samples gives each sample a number as its id: leave id out.")
        if unknown := options.keys() - SAMPLE_OPTIONS:
            allowed = ", ".join(SAMPLE_OPTIONS)
            raise TypeError(f"submit_samples has no option {min(unknown)!r}; it takes seed, {allowed}.")
        n = require_whole("n", n)
        seeds = [None] * n if seed is None else [require_whole("seed", seed, least=0) + i for i in range(n)]
        first = self._make_text(prompt, max_new_tokens, None, seed=seeds[0], **options)
        options["stop_ids"] = first.stop_ids  # what was given may be an iterator, which is read once
        others = [self._make_text(first.tokens, max_new_tokens, None, seed=each, **options) for each in seeds[1:]]
        for text in [first, *others]:
            text.source = None if text is first else first
            self._add(text)
        return [first.id, *(text.id for text in others)]

    def abort(self, id: Hashable) -> bool:
        """End a request now, whatever its state, and free its pages; what was made so far is its result. False when it
        had ended already. Raises `ValueError` for an id that was never submitted."""
        if not self._known(id):
            raise ValueError(f"id={id!r} is unknown: abort takes an id that submit has returned.")
        if id in self._texts:
            with self._recompute_after_an_interrupt():
                self._end(self._texts[id], "aborted")
            return True
        return False

    def forget(self, id: Hashable) -> Served:
        """Take the result of a request that has ended out of `results`, and return it: they are kept until then, so
        whoever serves for long forgets. The id may be given again. Raises `ValueError` when there is no such result."""
        if not self._known(id) or id not in self.results:
            raise ValueError(f"id={id!r} has no result: forget takes the id of a request that has ended.")
        self._since_run.pop(id, None)
        return self.results.pop(id)

    def step(self) -> list[Hashable]:
        """Run one forward pass, and return the ids of the requests that got a token by it."""
        with self._recompute_after_an_interrupt():
            self.plan = self.scheduler.schedule()
            served = self._compute(self.plan) if self.plan.chunks else []
            self._tell()
        return served

    def run(self) -> dict[Hashable, Served]:
        """Step until nothing is left to do; returns what has ended since the last `run`, by id. `results` keeps it."""
        while self._texts or self._untold:
            self.step()
        ended, self._since_run = self._since_run, {}
        return ended

    def _new_scheduler(self) -> Scheduler:
        """A scheduler for free pages, of which nothing is known."""
        pool = BlockPool(self.num_blocks, self.block_size)
        config, prefix = self.model.config, None
        if self.prefix_caching:
            prefix = PrefixIndex(pool, Identity(repr(config), str(self.model.dtype), config.window))
        window = None if None in config.windows else max(config.windows)
        return Scheduler(pool, prefix, self.max_batch_tokens, self.max_running, window)

    def _make_text(
        self, prompt, max_new_tokens, id, *, temperature=0.0, top_k=None, top_p=None, seed, stop_ids=None, on_token=None
    ) -> Text:
        """The request, checked."""
        vocab_size = self.model.config.vocab_size
        prompt, max_new_tokens = check_request(prompt, max_new_tokens, on_token, vocab_size)
        check_room(self.model, [prompt], max_new_tokens, None)
        if id is None:
            id = next(number for number in self._ids if not self._known(number))
        elif self._known(id):
            raise ValueError(
                f"id={id!r} was given to a request before, perhaps to one without: each needs one of its own."
            )
        text = Text(
            id,
            prompt,
            max_new_tokens,
            sampler=Sampler(temperature, top_k, top_p, seed),
            stop_ids=as_ids("stop_ids", () if stop_ids is None else stop_ids, vocab_size),
            on_token=on_token,
            submitted=self.clock.read(),
            served=Served(prompt_length=len(prompt), id=id),
        )
        self.scheduler.check_fits(text)
        return text

    def _known(self, id: Hashable) -> bool:
        """Whether a request has this id, or had it. Raises `ValueError` for what can be no id."""
        require_id(id)
        return id in self._texts or id in self.results

    def _add(self, text: Text) -> None:
        with self._recompute_after_an_interrupt():
            self._texts[text.id] = text
            if text.end is None:
                self.scheduler.add(text)
            else:  # no token was asked for
                self._end(text, text.end)

    @torch.inference_mode()
    def _compute(self, plan: Plan) -> list[Hashable]:
        """Run the plan and choose the tokens that come next; returns who got one."""
        self.pages.copy(plan.copies)
        self.packed.pieces = [Piece(request.table.blocks, start, stop) for request, start, stop in plan.chunks]
        tokens = [token for request, start, stop in plan.chunks for token in request.tokens[start:stop]]
        scores = self.model(torch.tensor([tokens]), cache=self.packed, last_only=True)[0]  # one row for each chunk
        for chunk in plan.chunks:
            self.scheduler.advance(chunk)
        self.stats.steps += 1
        self.stats.computed_tokens += len(tokens)
        self.stats.reused_tokens += plan.reused
        self.stats.preemptions += len(plan.preempted)
        self.stats.copied_blocks += len(plan.copies)
        ending = [(chunk.request, row) for chunk, row in zip(plan.chunks, scores, strict=True) if chunk.ends]
        return [text.id for text, row in ending if self._choose(text, row)]

    def _choose(self, text: Text, scores: Tensor) -> bool:
        """Choose the next token of `text` from scores `(vocab_size,)`; False, and its end, when they are no numbers."""
        made, state = text.made, text.sampler.generator.get_state()
        try:
            text.tokens.append(text.sampler(scores))  # kept at once: an interrupt must not lose a draw
        except BaseException as error:
            if text.made == made:
                text.sampler.generator.set_state(state)  # nor leave one out
            if not isinstance(error, RuntimeError):
                raise
            self._end(text, "error", error)
            return False
        text.served.arrivals.append(self.clock.read() - text.submitted)
        self.stats.output_tokens += 1
        self._untold.append((text, text.tokens[-1]))
        if text.end is not None:
            self._end(text, text.end)
        return True

    def _tell(self) -> None:
        """Call `on_token` for what is new. An interrupt in one leaves the rest for the next step."""
        while self._untold:
            text, token = self._untold.popleft()
            if text.on_token is None or text.served.stop_reason in ("aborted", "error"):
                continue
            try:
                text.on_token(token)
            except Exception as error:
                self._end(text, "error", error)

    def _end(self, text: Text, reason: str, error: Exception | None = None) -> None:
        served = text.served
        served.ids, served.stop_reason, served.error = text.tokens[text.prompt_length :], reason, error
        served.cached_tokens, served.preemptions = text.cached_tokens, text.preemptions
        self._since_run[text.id] = self.results[text.id] = served
        self.scheduler.finish(text)
        self._texts.pop(text.id, None)  # last: all that has not ended in every respect is here after an interrupt

    @contextmanager
    def _recompute_after_an_interrupt(self) -> Iterator[None]:
        """If something is raised inside, it may have struck anywhere, so no count of pages can be trusted: begin anew,
        and once more if another interrupt strikes while doing so."""
        if self._damaged:
            self._begin_anew()
        try:
            yield
        except BaseException:
            self._damaged = True
            self._begin_anew()
            raise

    def _begin_anew(self) -> None:
        """All pages are free, and all requests that have not ended wait again, in the same order."""
        self.packed.open_step = None  # if a step was left open, it must not clear pages whenever it is ended
        self.packed = PackedCache(self.pages, self.packed.attention)
        self.scheduler = self._new_scheduler()
        for text in list(self._texts.values()):
            if text.id in self.results:
                text.state = "finished"
            text.restart(self.clock.read())
            if text.state == "finished":
                del self._texts[text.id]
            elif text.end is not None:
                self._end(text, text.end)
            else:
                self.scheduler.add(text)
        self._damaged = False
