"""Checkers of notebook 02: adding to a cache, what that copies, positions, masks, and the loop itself."""

import torch
from torch import Tensor

from kvcourse.caches import DenseCache
from kvcourse.check.framework import compare, diagnose, error_of, exercise, normal, told
from kvcourse.config import ModelConfig
from kvcourse.model import Transformer


@exercise
def append(answer):
    """append(keys, new, length): write `new` (B, H, T, D) into `keys` (B, H, max_len, D) behind the `length` tokens
    that it holds; return the filled part, without copying it; refuse what does not fit."""

    def right(keys, new, length):
        stop = length + new.shape[2]
        keys[:, :, length:stop] = new
        return keys[:, :, :stop]

    def all_slots(keys, new, length):
        right(keys, new, length)
        return keys

    def shifted(by):
        def write(keys, new, length):
            stop = length + new.shape[2]
            keys[:, :, length + by : stop + by] = new
            return keys[:, :, :stop]

        return write

    roomy = [
        (normal(1, 1, 6, 2), normal(1, 1, 1, 2, seed=1), 2),
        (normal(2, 3, 8, 4), normal(2, 3, 3, 4, seed=1), 4),
        (normal(1, 2, 5, 4), normal(1, 2, 2, 4, seed=1), 0),
    ]
    fault = compare(
        answer,
        right,
        roomy,
        mistakes={
            "it returns every slot, those that hold nothing yet included; return the first length + T": all_slots,
            "it writes over the last token held: the first free slot is number `length`": shifted(-1),
            "it leaves a slot free: the first free slot is number `length`, not length + 1": shifted(1),
            "it writes from slot 0 and loses the tokens held; begin at slot `length`": _from_start,
            "it returns the new tokens alone; attention needs those held as well": lambda keys, new, length: new,
            "it returns the tokens held before; the new ones are visible to attention too": _before,
        },
    )
    return fault or _exact_fit_accepted(answer, right) or _written_in_place(answer) or _overflow_refused(answer)


def _from_start(keys, new, length):
    keys[:, :, : new.shape[2]] = new
    return keys[:, :, : length + new.shape[2]]


def _before(keys, new, length):
    return keys[:, :, :length]


def _exact_fit_accepted(answer, right) -> str | None:
    case = normal(1, 2, 5, 4), normal(1, 2, 1, 4, seed=1), 4
    error = error_of(answer, *case)
    if isinstance(error, ValueError | IndexError):
        return (
            f"with 4 tokens held, 1 new one and 5 slots the tokens fit exactly, but it raises {told(error)}; refuse "
            "only what needs more slots than there are"
        )
    return compare(answer, right, [case])


def _written_in_place(answer) -> str | None:
    keys, new = normal(1, 2, 6, 4), normal(1, 2, 1, 4, seed=1)
    before = keys.clone()
    filled = answer.__wrapped__(keys, new, 3)  # the original tensors, not copies of them
    if torch.equal(keys, before):
        return (
            "the numbers are right, but `keys` was left as it was: write into its memory instead of making a new tensor"
        )
    if not torch.equal(keys[:, :, 4:], before[:, :, 4:]):
        return "slots behind the new token were changed; only the slots of the new tokens may be written"
    if torch.as_tensor(filled).data_ptr() != keys.data_ptr():
        return "the numbers are right, but what it returns is a copy: return a slice of `keys` itself"
    return None


def _overflow_refused(answer) -> str | None:
    for new in (1, 2):
        error = error_of(answer, normal(1, 2, 6, 4), normal(1, 2, new, 4, seed=1), 7 - new)
        if error is None:
            return (
                "with 6 slots, all of them taken, one more token is accepted and lost without a word: raise ValueError"
            )
        if not isinstance(error, ValueError):
            return (
                f"a step that does not fit ends in {told(error)}; check the room first, and raise ValueError with the "
                "numbers"
            )
    return None


@exercise
def bytes_copied(answer):
    """bytes_copied(n, token_bytes): bytes copied in all, (by concatenation, into memory allocated once), when n tokens
    of `token_bytes` bytes each are added one at a time."""

    def right(n, token_bytes):
        return n * (n + 1) // 2 * token_bytes, n * token_bytes

    return compare(
        answer,
        right,
        cases=[(4, 10), (1, 7), (1000, 46_080)],
        mistakes={
            "the two numbers are swapped: first concatenation, then memory allocated once": lambda n, b: right(n, b)[
                ::-1
            ],
            "step t writes all t tokens into the new tensor, the new one too: add 1 + 2 + ... + n": lambda n, b: (
                n * (n - 1) // 2 * b,
                n * b,
            ),
            "n * n treats each step as the longest; the first ones copy less: add 1 + 2 + ... + n": lambda n, b: (
                n * n * b,
                n * b,
            ),
            "the first number is the last step alone; add up all the steps": lambda n, b: (n * b, n * b),
            "memory that is there already takes the new token only: one token a step, n in all": lambda n, b: (
                right(n, b)[0],
                right(n, b)[0],
            ),
            "the second number is one step; n steps copy n tokens": lambda n, b: (right(n, b)[0], b),
            "these are tokens, not bytes: multiply by token_bytes": lambda n, b: right(n, 1),
        },
    )


@exercise
def next_positions(answer):
    """next_positions(lengths, new): positions (B, max(new)) of the next `new[i]` tokens of text i, which holds
    `lengths[i]` tokens; -1 for padding, on the right."""

    def right(lengths, new, pad=-1, shift=0):
        rows = [[held + shift + i for i in range(count)] for held, count in zip(lengths, new, strict=True)]
        return torch.tensor([row + [pad] * (max(new) - len(row)) for row in rows])

    def padded_left(lengths, new):
        return torch.stack([row.roll(max(new) - count) for row, count in zip(right(lengths, new), new, strict=True)])

    return compare(
        answer,
        right,
        cases=[([3, 7], [1, 1]), ([0, 0], [2, 3]), ([3, 7, 0], [2, 1, 4]), ([5, 2], [0, 2])],
        mistakes={
            "every text continues where the longest ends; each text has a length of its own": lambda lengths, new: (
                right([max(lengths)] * len(lengths), new)
            ),
            "every text starts at 0 again; one that holds n tokens goes on at n": lambda lengths, new: right(
                [0] * len(lengths), new
            ),
            "each position is one too low: the tokens held have 0 to n - 1, so the next is n": lambda lengths, new: (
                right(lengths, new, shift=-1)
            ),
            "each position is one too high: positions count from 0, so after n tokens comes n": lambda lengths, new: (
                right(lengths, new, shift=1)
            ),
            "padding goes on counting as if it were text; mark it with -1": lambda lengths, new: right(
                lengths, [max(new)] * len(new)
            ),
            "padding has position 0, which is a real position; mark it with -1": lambda lengths, new: right(
                lengths, new, pad=0
            ),
            "padding stands on the left; here it stands on the right": padded_left,
        },
    )


@exercise
def chunk_mask(answer):
    """chunk_mask(context, new): bool (new, context + new), True where a new token may look at a key, when `context`
    tokens are in the cache."""

    def right(context, new, shift=0):
        query = context + torch.arange(new)[:, None]
        return torch.arange(context + new) <= query + shift

    return compare(
        answer,
        right,
        cases=[(5, 3), (0, 4), (4, 1), (2, 3)],  # the first: new is neither context nor next to it
        mistakes={
            "the triangle begins at key 0 (top left), so the first new token sees one key; query i stands at "
            "position context + i": lambda context, new: torch.ones(new, context + new).tril().bool(),
            "the diagonal must be `context`, not `new`": lambda context, new: (
                torch.ones(new, context + new).tril(new).bool()
            ),
            "a token does not see itself; its own key counts as well": lambda context, new: right(context, new, -1),
            "each token sees one token that comes after it": lambda context, new: right(context, new, 1),
            "True and False are swapped: True means that the key is seen": lambda context, new: ~right(context, new),
            "every token sees all keys, those after it included": lambda context, new: right(context, new, new),
            "the keys in the cache are missing: there are context + new columns": lambda context, new: right(0, new),
            "the new tokens do not see what is in the cache": lambda context, new: (
                right(context, new) & (torch.arange(context + new) >= context)
            ),
        },
    )


class Recorder(Transformer):
    """A small model with random weights that notes how many tokens each call ran, and whether a cache was there."""

    CONFIG = ModelConfig(vocab_size=96, n_layers=2, n_heads=4, n_kv_heads=2, d_model=32, d_ff=64, max_seq_len=64)

    def __init__(self):
        super().__init__(self.CONFIG)
        for seed, weight in enumerate(self.parameters()):
            if weight.ndim == 2:
                weight.copy_(0.4 * normal(*weight.shape, seed=seed))
        self.calls = []

    def forward(self, tokens, positions=None, cache=None, last_only=False) -> Tensor:
        self.calls.append((tokens.shape[-1], cache is not None))
        return super().forward(tokens, positions, cache, last_only)


@exercise
def cached_generate(answer):
    """cached_generate(model, prompt, n): the n greedy tokens after `prompt`, a list of ids, with a cache."""
    model = Recorder()
    for prompt, n in (([5, 17, 42], 6), ([3], 4), ([7, 7, 90, 1, 33, 8, 2], 5), ([5, 17, 42], 1)):
        model.calls.clear()
        got = answer(model, prompt, n)
        calls = list(model.calls)
        case = f"with a prompt of {len(prompt)} and n = {n}, "
        expected = _loop(model, prompt, n)
        fault = diagnose(got, expected, {text: wrong(model, prompt, n) for text, wrong in LOOP_MISTAKES.items()})
        if fault:
            return case + fault
        rows, needed = sum(count for count, _ in calls), len(prompt) + n - 1
        if rows > needed and not all(cached for _, cached in calls):
            return f"{case}the tokens are right, but without the cache: {rows} rows ran where {needed} suffice"
        if rows == needed + 1:
            return (
                f"{case}the tokens are right, but there is one forward pass too many: nobody needs the scores after "
                "the last token, so it is not fed back"
            )
        if rows > needed:
            return (
                f"{case}the tokens are right, but {rows} rows ran where {needed} suffice: feed the prompt once, then "
                "each new token alone"
            )
    return None


def _loop(model, prompt, n, feed=lambda ids, prompt: ids[-1:], first=-1) -> list[int]:
    """The right loop; `feed` says what goes into the model after each token, `first` which row's scores it reads."""
    # Room to spare: what a mistake feeds must fit too.
    room = (len(prompt) + n) * (n + 1)
    cache = DenseCache(model.config, max_len=room, dtype=model.dtype, device=model.device)
    tokens, ids = prompt, []
    with torch.inference_mode():
        for _ in range(n):
            logits = model(torch.tensor([tokens]), cache=cache)
            ids.append(int(logits[0, first].argmax()))
            tokens = feed(ids, prompt)
    return ids


LOOP_MISTAKES = {
    "the prompt is in the answer; return the new tokens alone": lambda m, p, n: p + _loop(m, p, n),
    "one token is missing: the prefill gives the first of the n tokens": lambda m, p, n: _loop(m, p, n)[:-1],
    "the first token is missing: the prefill's scores give it already": lambda m, p, n: _loop(m, p, n + 1)[1:],
    "there is one token too many: the prefill gives the first of the n tokens": lambda m, p, n: _loop(m, p, n + 1),
    "the prompt's last token is fed at each step; feed the token that was just made": lambda m, p, n: _loop(
        m, p, n, feed=lambda ids, prompt: prompt[-1:]
    ),
    "the whole text is fed again into a cache that holds it already, so the model reads it twice; feed the new "
    "token alone": lambda m, p, n: _loop(m, p, n, feed=lambda ids, prompt: prompt + ids),
    "the tokens made so far are all fed again; the cache holds them already, feed the newest alone": lambda m, p, n: (
        _loop(m, p, n, feed=lambda ids, prompt: list(ids))
    ),
    "the scores of the first row are read; the next token is scored in the last row": lambda m, p, n: _loop(
        m, p, n, first=0
    ),
    "the context is lost: each token is made from the one before it alone, so the cache is empty at each step": (
        lambda m, p, n: _forgetful(m, p, n)
    ),
}


def _forgetful(model, prompt, n) -> list[int]:
    text = list(prompt)
    ids = _loop(model, text, 1)
    while len(ids) < n:
        ids += _loop(model, ids[-1:], 1)
    return ids
