"""Checkers of notebook 07, the bill: the price of a request, and the tokens that a whole chat computes."""

from kvcourse.check.framework import compare, exercise


@exercise
def request_price(answer):
    """request_price(prompt_tokens, cached_tokens, output_tokens, prices): dollars of a request. `prices` are for a
    million uncached input, cached input and output tokens. The cached tokens are part of the prompt."""

    def right(prompt_tokens, cached_tokens, output_tokens, prices):
        fresh, cached, output = prices
        return ((prompt_tokens - cached_tokens) * fresh + cached_tokens * cached + output_tokens * output) / 1e6

    return compare(
        answer,
        right,
        cases=[
            (1000, 800, 100, (3.0, 0.3, 15.0)),
            (1000, 0, 100, (3.0, 0.3, 15.0)),
            (5000, 4096, 700, (1.25, 0.125, 10.0)),
            (64, 48, 1, (2.0, 0.5, 8.0)),
        ],
        mistakes={
            "the cached tokens are paid twice: they are part of the prompt, so take them off it": (
                lambda p, c, o, prices: (p * prices[0] + c * prices[1] + o * prices[2]) / 1e6
            ),
            "the cached tokens are paid at the full price": lambda p, c, o, prices: (
                (p * prices[0] + o * prices[2]) / 1e6
            ),
            "the cached tokens are not paid at all; they are cheap, not free": lambda p, c, o, prices: (
                ((p - c) * prices[0] + o * prices[2]) / 1e6
            ),
            "cached and uncached are swapped": lambda p, c, o, prices: (
                ((p - c) * prices[1] + c * prices[0] + o * prices[2]) / 1e6
            ),
            "the prices are for a million tokens: divide by 1,000,000": lambda *given: 1e6 * right(*given),
            "the output is missing": lambda p, c, o, prices: ((p - c) * prices[0] + c * prices[1]) / 1e6,
            "all of the prompt is paid at the cached price": lambda p, c, o, prices: (
                (p * prices[1] + o * prices[2]) / 1e6
            ),
        },
    )


@exercise
def tokens_computed(answer):
    """tokens_computed(turns, system, question, reply, caching): tokens of prompt that a chat computes in all."""

    def plain(turns, system, question, reply):
        return sum(system + turn * question + (turn - 1) * reply for turn in range(1, turns + 1))

    def right(turns, system, question, reply, caching):
        if caching:
            return system + turns * question + turns - 1
        return plain(turns, system, question, reply)

    def with_caching(formula):
        """The right answer without caching, `formula` with it."""
        return lambda n, s, q, r, caching: formula(n, s, q, r) if caching else plain(n, s, q, r)

    def without_caching(formula):
        return lambda n, s, q, r, caching: right(n, s, q, r, True) if caching else formula(n, s, q, r)

    return compare(
        answer,
        right,
        cases=[
            (1, 100, 10, 20, False),
            (1, 100, 10, 20, True),
            (2, 100, 10, 20, False),
            (2, 100, 10, 20, True),
            (8, 250, 30, 12, False),
            (8, 250, 30, 12, True),
            (50, 1000, 40, 300, False),
            (50, 1000, 40, 300, True),
        ],
        mistakes={
            "the last token of each answer is missing: it was chosen and sent, but never run through the model": (
                with_caching(lambda n, s, q, r: s + n * q)
            ),
            "the answers' tokens are computed again; but for its last token, an answer was computed as it was made": (
                with_caching(lambda n, s, q, r: s + n * q + (n - 1) * r)
            ),
            "the last token of each answer is computed in the next turn, and after the last answer there is none: "
            "turns - 1 of them": with_caching(lambda n, s, q, r: s + n * q + n),
            "it is the other way round: an answer was computed as it was made, all but its last token; only that one "
            "is left, 1 for each answer before, not reply - 1": with_caching(
                lambda n, s, q, r: s + n * q + (n - 1) * (r - 1)
            ),
            "the system prompt is computed at each turn; once it is known, it is found": with_caching(
                lambda n, s, q, r: n * (s + q) + n - 1
            ),
            "this is the last prompt alone; all turns together are wanted": lambda n, s, q, r, caching: (
                right(n, s, q, r, True) if caching else s + n * q + (n - 1) * r
            ),
            "the answers are missing in the prompts: each turn sends them again": without_caching(
                lambda n, s, q, r: sum(s + t * q for t in range(1, n + 1))
            ),
            "the first prompt holds no answer yet: turn k has k questions and k - 1 answers": without_caching(
                lambda n, s, q, r: sum(s + t * (q + r) for t in range(1, n + 1))
            ),
            "the system prompt is counted once; without caching each turn computes it again": without_caching(
                lambda n, s, q, r: plain(n, s, q, r) - (n - 1) * s
            ),
            "the turns begin at 0, so the first prompts are too short: range(1, turns + 1), not range(turns)": (
                without_caching(lambda n, s, q, r: sum(s + t * q + (t - 1) * r for t in range(n)))
            ),
            "with and without caching are swapped": lambda n, s, q, r, caching: right(n, s, q, r, not caching),
            "the turns are counted one short: range(1, turns + 1)": without_caching(
                lambda n, s, q, r: plain(n - 1, s, q, r)
            ),
        },
    )
