"""Prompts of about so many tokens, for a tokenizer that only the server knows.

They are common English words in random order, most of which are one token in most tokenizers. How many tokens a word is
there on average, and how many the server adds, follows from two prompts whose tokens the server counts.
"""

from dataclasses import dataclass
from random import Random

WORDS = (
    "the of and to in is was for on that with he as his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so "
    "these would other into has more her two like him see time could no make than first been its who now people my "
    "made over did down only way find use may water long little very after words called just where most know get "
    "through back much before go good new write our used me man too any day same right look think also around "
    "another came come work three word must because does part even place well such here take why things help put "
    "years different away again off went old number great tell men say small every found still between name should "
    "home big give air line set own under read last never us left end along while might next sound below saw "
    "something thought both few those always looked show large often together asked house world going want school "
    "important until form food keep children feet land side without boy once animals life enough took sometimes "
    "four head above kind began almost live page got earth need far hand high year mother light parts country "
    "father let night following picture being study second"
).split()
SHORT, LONG = 16, 144  # words of the two prompts


@dataclass(frozen=True)
class Ruler:
    """A prompt of n words has about n * `per_word` + `added` tokens: `added` are those of a chat template, or of a
    token for the beginning. `measured` tells whether a server's counts say so, or words are taken for tokens."""

    per_word: float = 1.0
    added: float = 0.0
    measured: bool = False

    @classmethod
    def from_counts(cls, short: int | None, long: int | None) -> "Ruler":
        """From the tokens that the server counted in prompts of `SHORT` and `LONG` words."""
        if short is None or long is None or long <= short:
            return cls()
        per_word = (long - short) / (LONG - SHORT)
        return cls(per_word, max(0.0, short - SHORT * per_word), True)

    def words(self, tokens: int) -> int:
        """Words for a prompt of about so many tokens. Raises `ValueError` where what is added takes them all."""
        words = round((tokens - self.added) / self.per_word)
        if words < 1:
            raise ValueError(
                f"A prompt of {tokens} tokens is too short: the server adds {self.added:.0f} to each, and a word is "
                f"{self.per_word:.1f}."
            )
        return words


def some_words(random: Random, n: int) -> list[str]:
    return random.choices(WORDS, k=n)


def make_prompts(random: Random, lengths: list[int], ruler: Ruler, shared_prefix: int = 0) -> list[str]:
    """A prompt for each length, in tokens. The first `shared_prefix` tokens are the same in all, about; what follows
    differs from the first word on as far as the words go: a neighbour's prompt never begins with the same word."""
    shared = some_words(random, round(shared_prefix / ruler.per_word))
    prompts, first = [], None
    for length in lengths:
        own = some_words(random, max(1, ruler.words(length) - len(shared)))
        while own[0] == first:
            own[0] = random.choice(WORDS)
        first = own[0]
        prompts.append(" ".join(shared + own))
    return prompts
