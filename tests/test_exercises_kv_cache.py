"""The exercises of notebook 02: worked answers and other right ways pass, the usual mistakes are named."""

import torch
from exercises import FORMS, shared_tests, solution

NOTEBOOK = "02_kv_cache"

RIGHT = {
    "append": [
        """
        def append(keys, new, length):
            stop = length + new.shape[2]
            if stop > keys.shape[2]:
                raise ValueError("full")
            keys[:, :, length:stop] = new
            return keys[:, :, :stop]
        """,
        """
        def append(keys, new, length):
            count = new.shape[2]
            if length + count > keys.shape[2]:
                raise ValueError("full")
            for i in range(count):
                keys[:, :, length + i] = new[:, :, i]
            return keys.narrow(2, 0, length + count)
        """,
        """
        def append(keys, new, length):
            memory, count = keys.numpy(), new.shape[2]
            if memory.shape[2] - length < count:
                raise ValueError("no room")
            memory[:, :, length : length + count] = new.numpy()
            return memory[:, :, : length + count]
        """,
    ],
    "bytes_copied": [
        """
        def bytes_copied(n, token_bytes):
            return sum(range(1, n + 1)) * token_bytes, sum(token_bytes for _ in range(n))
        """,
        """
        def bytes_copied(n, token_bytes):
            steps = np.arange(1, n + 1, dtype=np.float64)
            return np.sum(steps * token_bytes), float(n) * token_bytes
        """,
        """
        def bytes_copied(n, token_bytes):  # both in one array
            return np.array([n * (n + 1) // 2, n]) * token_bytes
        """,
    ],
    "cached_generate": [
        """
        def cached_generate(model, prompt, n):
            cache = kv.DenseCache(model.config, dtype=model.dtype, device=model.device)
            feed, ids = list(prompt), []
            for _ in range(n):
                logits = model(torch.tensor([feed]), cache=cache)
                ids.append(int(logits[0, -1].argmax()))
                feed = ids[-1:]
            return ids
        """,
        """
        def cached_generate(model, prompt, n):
            cache = kv.DenseCache(model.config, dtype=model.dtype, device=model.device)
            logits = kv.prefill(model, [prompt], cache)
            ids = [logits[0, 0].argmax().item()]
            for _ in range(n - 1):
                position = torch.tensor([[cache.length]])
                logits = model(torch.tensor([ids[-1:]]), positions=position, cache=cache, last_only=True)
                ids.append(logits[0, 0].argmax().item())
            return ids
        """,
        """
        def cached_generate(model, prompt, n):
            cache = kv.DenseCache(model.config, dtype=model.dtype, device=model.device)
            for token in prompt:
                logits = model(torch.tensor([[token]]), cache=cache)
            ids = torch.zeros(n, dtype=torch.int64)
            for i in range(n):
                ids[i] = int(np.argmax(logits[0, -1].double().cpu().numpy()))
                if i < n - 1:
                    logits = model(ids[i].view(1, 1), cache=cache)
            return ids
        """,
    ],
    "next_positions": [
        """
        def next_positions(lengths, new):
            offsets = torch.arange(max(new))
            positions = torch.tensor(lengths)[:, None] + offsets
            return positions.masked_fill(offsets >= torch.tensor(new)[:, None], -1)
        """,
        """
        def next_positions(lengths, new):
            out = torch.full((len(lengths), max(new)), -1)
            for i, (held, count) in enumerate(zip(lengths, new)):
                for j in range(count):
                    out[i, j] = held + j
            return out
        """,
        """
        def next_positions(lengths, new):
            offsets = np.arange(max(new))[None]
            return np.where(offsets < np.array(new)[:, None], np.array(lengths)[:, None] + offsets, -1)
        """,
    ],
    "chunk_mask": [
        """
        def chunk_mask(context, new):
            return torch.ones(new, context + new).tril(diagonal=context).bool()
        """,
        """
        def chunk_mask(context, new):
            return torch.ones(new, context + new).tril(diagonal=context).bool()
        """,
        """
        def chunk_mask(context, new):
            return np.array([[key <= context + query for key in range(context + new)] for query in range(new)])
        """,
    ],
}

FULL = 'stop > keys.shape[2]:\n        raise ValueError("full")'
COPIED = "def bytes_copied(n, token_bytes):\n    return {}"

MISTAKES = {
    "append": [
        (("return keys[:, :, :stop]", "return keys"), "every slot"),
        (("length:stop", "length - 1:stop - 1"), "over the last token"),
        (("length:stop", "length + 1:stop + 1"), "leaves a slot free|it raises"),
        (("keys[:, :, length:stop] = new", "keys[:, :, :new.shape[2]] = new"), "from slot 0"),
        (("return keys[:, :, :stop]", "return new"), "new tokens alone"),
        (("return keys[:, :, :stop]", "return keys[:, :, :length]"), "held before"),
        (("return keys[:, :, :stop]", "return keys[:, :, :stop].clone()"), "is a copy"),
        (
            ("keys[:, :, length:stop] = new", "return torch.cat((keys[:, :, :length], new), dim=2)"),
            "`keys` was left as it was",
        ),
        (("stop > keys.shape[2]", "False"), "lost without a word"),
        (("stop > keys.shape[2]", "length >= keys.shape[2]"), "ends in RuntimeError"),
        (("stop > keys", "stop >= keys"), "the tokens fit exactly, but it raises ValueError: full"),
        ((FULL, "stop >= keys.shape[2]:\n        raise ValueError"), "it raises ValueError; refuse only"),
        ((FULL, "stop > keys.shape[2]:\n        raise AssertionError"), "ends in AssertionError; check"),
        (("raise ValueError", "raise IndexError"), "ends in IndexError: full"),
        (("length:stop] = new", "length:] = new[:, :, -1:]"), "slots behind|first difference"),
    ],
    "bytes_copied": [
        (COPIED.format("n * (n - 1) // 2 * token_bytes, n * token_bytes"), "the new one too"),
        (COPIED.format("n * n * token_bytes, n * token_bytes"), "each step as the longest"),
        (COPIED.format("n * token_bytes, n * (n + 1) // 2 * token_bytes"), "swapped"),
        (COPIED.format("n * token_bytes, n * token_bytes"), "last step alone"),
        (COPIED.format("n * (n + 1) // 2, n"), "tokens, not bytes"),
        (COPIED.format("n * (n + 1) // 2 * token_bytes, token_bytes"), "one step"),
        (COPIED.format("n * (n + 1) // 2 * token_bytes"), "expected 2 values"),
    ],
    "cached_generate": [
        (("feed = ids[-1:]", "feed = list(prompt) + ids"), "reads it twice"),
        (("feed = ids[-1:]", "feed = list(ids)"), "made so far are all fed again"),
        (("feed = ids[-1:]", "feed = prompt[-1:]"), "prompt's last token"),
        (("range(n)", "range(n - 1)"), "one token is missing"),
        (("range(n)", "range(n + 1)"), "one token too many"),
        (("return ids", "return list(prompt) + ids"), "the prompt is in the answer"),
        (("logits[0, -1]", "logits[0, 0]"), "scores of the first row"),
        (("return ids", "model(torch.tensor([ids[-1:]]), cache=cache)\n    return ids"), "one forward pass too many"),
        (
            "def cached_generate(model, prompt, n):\n    return kv.generate_naive(model, prompt, n).ids",
            "without the cache",
        ),
        (
            (
                "logits = model(torch.tensor([feed]), cache=cache)",
                "cache.reset(); logits = model(torch.tensor([list(prompt) + ids]), cache=cache)",
            ),
            "feed the prompt once",
        ),
        (
            (
                "logits = model(torch.tensor([feed]), cache=cache)",
                "cache.reset(); logits = model(torch.tensor([feed]), cache=cache)",
            ),
            "context is lost",
        ),
        (("cache=cache)", "cache=cache, positions=torch.arange(len(feed))[None])"), "it raises ValueError"),
    ],
    "next_positions": [
        (
            ("torch.tensor(lengths)[:, None]", "max(lengths) * torch.ones(len(lengths), 1).long()"),
            "each text has a length of its own",
        ),
        (("torch.tensor(lengths)", "0 * torch.tensor(lengths)"), "starts at 0 again"),
        (("torch.tensor(lengths)", "(torch.tensor(lengths) - 1)"), "one too low"),
        (("torch.tensor(lengths)", "(torch.tensor(lengths) + 1)"), "one too high"),
        (("offsets >= torch.tensor(new)[:, None]", "offsets < 0"), "goes on counting"),
        (("None], -1)", "None], 0)"), "a real position"),
        (
            ("offsets >= torch.tensor(new)[:, None], -1)", "offsets >= torch.tensor(new)[:, None], -1).T"),
            "expected the shape",
        ),
    ],
    "chunk_mask": [
        (("diagonal=context", "diagonal=0"), "top left"),
        (("diagonal=context", "diagonal=new"), "must be `context`, not `new`"),
        (("diagonal=context", "diagonal=context - 1"), "does not see itself"),
        (("diagonal=context", "diagonal=context + 1"), "comes after it"),
        ((".bool()", " == 0"), "swapped"),
        ((".tril(diagonal=context)", ""), "those after it included"),
        (
            ("torch.ones(new, context + new).tril(diagonal=context)", "torch.ones(new, new).tril()"),
            "keys in the cache are missing",
        ),
        ((".bool()", ""), "dtype float32; `.bool()` makes True and False of it"),
    ],
}

ONE_FORM = {"append": FORMS}  # the memory of `keys` itself is asked for
TestExercises = shared_tests(NOTEBOOK, RIGHT, MISTAKES, ONE_FORM)


def test_append_by_hand():
    keys, new = torch.zeros(1, 1, 4, 1), torch.tensor([5.0, 6.0]).reshape(1, 1, 2, 1)
    filled = solution(NOTEBOOK, "append")(keys, new, 1)
    assert filled.flatten().tolist() == [0, 5, 6]
    assert keys.flatten().tolist() == [0, 5, 6, 0]


def test_bytes_copied_by_hand():
    assert solution(NOTEBOOK, "bytes_copied")(3, 10) == (10 + 20 + 30, 30)


def test_positions_and_mask_by_hand():
    assert solution(NOTEBOOK, "next_positions")([3, 7], [2, 1]).tolist() == [[3, 4], [7, -1]]
    assert solution(NOTEBOOK, "chunk_mask")(1, 2).tolist() == [[True, True, False], [True, True, True]]
