"""The exercises of notebook 03: worked answers and other right ways pass, the usual mistakes are named."""

import pytest
from exercises import shared_tests, solution
from reference import SMOLLM2

NOTEBOOK = "03_prefill_and_decode"

RIGHT = {
    "least_time": [
        """
        def least_time(flops, nbytes, flops_per_second, bytes_per_second):
            ceilings = kv.Ceilings(flops_per_second, bytes_per_second, "cpu", "float32")
            return kv.roofline(flops, nbytes, ceilings).seconds
        """,
        """
        def least_time(flops, nbytes, flops_per_second, bytes_per_second):
            computing, reading = np.array([flops, nbytes]) / [flops_per_second, bytes_per_second]
            return computing if computing > reading else reading
        """,
    ],
    "intensity": [
        "def intensity(rows, bits):\n    return 16 * rows / bits",
        """
        def intensity(rows, bits):
            weights = torch.ones(100, 100)
            operations = 2 * rows * weights.numel()
            return torch.tensor(operations / (weights.numel() * bits / 8))
        """,
    ],
    "crossover_context": [
        """
        def crossover_context(config, batch_size):
            weights = kv.bytes_moved(config, 1, 0, batch_size).weights
            return weights / (2 * 2 * config.n_layers * config.n_kv_heads * config.d_head * batch_size)
        """,
        """
        def crossover_context(config, batch_size):
            return kv.weight_bytes(config) / kv.cache_bytes(config, 1, batch_size)
        """,
        """
        def crossover_context(config, batch_size):
            grown = kv.bytes_moved(config, 1, 1000, batch_size)
            return 1000 * grown.weights / grown.cache_read
        """,
        """
        def crossover_context(config, batch_size):
            attention = 2 * config.d_model * (config.n_heads + config.n_kv_heads) * config.d_head
            layer = attention + 3 * config.d_model * config.d_ff + 2 * config.d_model
            rows = config.vocab_size if config.tie_embeddings else config.vocab_size + batch_size
            weights = config.n_layers * layer + config.d_model + rows * config.d_model
            return weights / (2 * config.n_layers * config.n_kv_heads * config.d_head * batch_size)
        """,
    ],
    "prefill_in_chunks": [
        """
        def prefill_in_chunks(model, ids, cache, chunk):
            for start in range(0, len(ids), chunk):
                logits = model(torch.tensor([ids[start : start + chunk]]), cache=cache)
            return logits[0, -1]
        """,
        """
        def prefill_in_chunks(model, ids, cache, chunk):
            return kv.prefill(model, [ids], cache, chunk)
        """,
        """
        def prefill_in_chunks(model, ids, cache, chunk):
            while cache.length < len(ids):
                piece = torch.tensor(ids[cache.length :][:chunk])[None]
                scores = model(piece, cache=cache, last_only=True)
            return scores.flatten().double().numpy()
        """,
    ],
    "accept": [
        """
        def accept(guesses, greedy):
            count = 0
            while count < len(guesses) and guesses[count] == greedy[count]:
                count += 1
            return count, greedy[count]
        """,
        """
        def accept(guesses, greedy):
            for i, (guess, choice) in enumerate(zip(guesses, greedy)):
                if guess != choice:
                    return i, choice
            return len(guesses), greedy[-1]
        """,
        """
        def accept(guesses, greedy):
            right = np.array(guesses, dtype=int) == np.array(greedy[:-1], dtype=int)
            count = int(np.cumprod(right).sum())
            return count, torch.tensor(greedy)[count]
        """,
    ],
    "output_price_ratio": [
        """
        def output_price_ratio(prompt_tokens, prefill_seconds, step_seconds, batch_size):
            return (step_seconds / batch_size) / (prefill_seconds / prompt_tokens)
        """,
        """
        def output_price_ratio(prompt_tokens, prefill_seconds, step_seconds, batch_size):
            return (prompt_tokens / prefill_seconds) / (batch_size / step_seconds)
        """,
        """
        def output_price_ratio(prompt_tokens, prefill_seconds, step_seconds, batch_size):
            rates = np.array([batch_size / step_seconds, prompt_tokens / prefill_seconds])
            output, given = (kv.price_per_million(rate, 3.0) for rate in rates)
            return output / given
        """,
    ],
}

LEAST = "def least_time(flops, nbytes, flops_per_second, bytes_per_second):\n    return {}"
INTENSITY = "def intensity(rows, bits):\n    return {}"

MISTAKES = {
    "least_time": [
        (LEAST.format("flops / flops_per_second + nbytes / bytes_per_second"), "the two times are added"),
        (LEAST.format("min(flops / flops_per_second, nbytes / bytes_per_second)"), "the shorter of the two"),
        (LEAST.format("flops / flops_per_second"), "only the operations"),
        (LEAST.format("nbytes / bytes_per_second"), "the reading alone"),
        (LEAST.format("max(flops / bytes_per_second, nbytes / flops_per_second)"), "rates are swapped"),
        (LEAST.format("max(flops_per_second / flops, bytes_per_second / nbytes)"), "divided by a rate"),
    ],
    "intensity": [
        (INTENSITY.format("rows / (bits / 8)"), "that is two operations"),
        (INTENSITY.format("2 * rows / bits"), "operations per bit"),
        (INTENSITY.format("2 / (bits / 8)"), "read once for all rows"),
        (INTENSITY.format("(bits / 8) / (2 * rows)"), "upside down"),
        (INTENSITY.format("2 * rows * bits / 8"), "divide by them"),
    ],
    "crossover_context": [
        (("n_kv_heads", "n_heads"), "n_kv_heads heads, not for n_heads"),
        (("d_head * batch_size)", "d_head) * batch_size"), "divide by the batch"),
        ((" * batch_size)", ")"), "the batch is missing"),
        (("2 * 2", "2"), "only one of them is counted"),
        ((" * config.n_layers", ""), "only one is counted"),
        (("return weights / (", "return 1 / weights * ("), "upside down"),
        (("return weights /", "return weights //"), "do not round"),
        (("* config.d_head", "* (config.d_model / config.n_heads)"), "d_model / n_heads need not be"),
    ],
    "prefill_in_chunks": [
        (("len(ids), chunk)", "len(ids) - chunk + 1, chunk)"), "the last piece"),
        (("    return logits[0, -1]", "        return logits[0, -1]"), "after the first piece"),
        (("logits[0, -1]", "logits[0, 0]"), "take its last row"),
        ((", cache=cache", ""), "a text of its own"),
        (("chunk):\n    for", "chunk):\n    chunk = 100\n    for"), "the passes ran [7] tokens"),
        (("return logits[0, -1]", "return logits"), "expected the shape"),
        (("start : start + chunk", "start : start + chunk + 1"), "the pieces overlap by a token"),
        (("cache=cache)", "cache=kv.DenseCache(model.config, dtype=model.dtype))"), "own"),
    ],
    "accept": [
        (("return count,", "count = sum(g == c for g, c in zip(guesses, greedy))\n    return count,"), "cannot stand"),
        (("return count, greedy[count]", "return count, greedy[-1]"), "after a guess that does not stand"),
        (("return count, greedy[count]", "return count, greedy[max(count - 1, 0)]"), "one place too early"),
        (("return count,", "return count + 1,"), "one too high"),
        (("return count, greedy[count]", "return greedy[count], count"), "swapped"),
        (("return count,", "count = count if count == len(guesses) else 0\n    return count,"), "all or nothing"),
        (("== greedy[count]:", "== greedy[count + 1]:"), "not against greedy[i + 1]"),
        (("== greedy[count]:", "== greedy[count - 1]:"), "not against greedy[i - 1]"),
        (
            (
                "== greedy[count]:\n        count += 1\n    return count, greedy[count]",
                "== greedy[count + 1]:\n        count += 1\n    return count, greedy[count + 1]",
            ),
            "one place too late",
        ),
        (("return count, greedy[count]", "return 0, greedy[0]"), "value 1 of 2: expected 4, yours is 0"),
        (
            ("return count, greedy[count]", "return count, (list(guesses) + list(greedy[-1:]))[count]"),
            "the rejected guess",
        ),
    ],
    "output_price_ratio": [
        (
            (
                "(step_seconds / batch_size) / (prefill_seconds / prompt_tokens)",
                "(prefill_seconds / prompt_tokens) / (step_seconds / batch_size)",
            ),
            "upside down",
        ),
        (("(step_seconds / batch_size)", "step_seconds"), "divide its time by the batch"),
        (("step_seconds / batch_size", "step_seconds * batch_size"), "multiplied by the batch"),
        (("(prefill_seconds / prompt_tokens)", "prefill_seconds"), "reads many tokens"),
    ],
}

TestExercises = shared_tests(NOTEBOOK, RIGHT, MISTAKES)


def test_least_time_and_intensity_by_hand():
    assert solution(NOTEBOOK, "least_time")(100, 30, 20, 10) == 5  # 5 s of arithmetic hide 3 s of reading
    assert solution(NOTEBOOK, "least_time")(100, 90, 20, 10) == 9
    assert solution(NOTEBOOK, "intensity")(1, 16) == 1
    assert solution(NOTEBOOK, "intensity")(8, 4) == 32


@pytest.mark.parametrize("batch_size, tokens", [(1, 11_677), (4, 2_919), (16, 730)])
def test_where_the_cache_of_smollm2_outweighs_its_weights(batch_size, tokens):
    """134,515,008 weights against 2 x 30 x 3 x 64 numbers for each token of each text."""
    assert 134_515_008 / (11_520 * batch_size) == pytest.approx(tokens, abs=0.5)
    assert solution(NOTEBOOK, "crossover_context")(SMOLLM2, batch_size) == pytest.approx(tokens, abs=0.5)


def test_accept_by_hand():
    assert solution(NOTEBOOK, "accept")([5, 7, 9], [5, 7, 8, 3]) == (2, 8)
    assert solution(NOTEBOOK, "accept")([], [5]) == (0, 5)


def test_output_price_ratio_by_hand():
    # 1 ms for an input token; 40 ms for an output token alone, 60 / 16 ms in a batch
    assert solution(NOTEBOOK, "output_price_ratio")(500, 0.5, 0.04, 1) == pytest.approx(40)
    assert solution(NOTEBOOK, "output_price_ratio")(500, 0.5, 0.06, 16) == pytest.approx(3.75)
