"""The vocabulary of the stories, and the regular inflection of English words."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random

VOWELS = "aeiou"
VERBS = ("speech", "replies", "motion", "acts", "stirs", "handle", "noises")


@cache
def vocabulary() -> dict[str, tuple[str, ...]]:
    """Section of `words.txt` -> its words in the order of the file, without their irregular forms, each once."""
    return {name: tuple(dict.fromkeys(plain(entry) for entry in entries)) for name, entries in sections().items()}


@cache
def sections() -> dict[str, tuple[str, ...]]:
    """Section -> its entries as they stand in the file: `knife/knives`. A line `@name` stands for another section."""
    found, name = {}, ""
    for line in Path(__file__).with_name("words.txt").read_text(encoding="utf-8").splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("["):
            name = line.strip("[]")
            found[name] = ()
        elif line:
            found[name] += tuple(line.split())

    def expanded(entries: tuple[str, ...]) -> tuple[str, ...]:
        return sum((expanded(found[entry[1:]]) if entry[0] == "@" else (entry,) for entry in entries), ())

    return {name: expanded(entries) for name, entries in found.items()}


@cache
def ordered(section: str) -> tuple[str, ...]:
    """The words of a section from frequent to rare; here as in languages, the shorter, the more frequent (G. K. Zipf,
    "The psycho-biology of language", 1935)."""
    return tuple(sorted(vocabulary()[section], key=lambda word: (len(word), word)))


def by_frequency(rng: Random, words: Sequence[str]) -> str:
    """One of the words, which stand in order, the k-th about as often as 1 / k (Zipf's law): few words make up most of
    a text, as in any language, and a model that has read little writes those well."""
    return words[int((len(words) + 1) ** rng.random()) - 1]


def plain(entry: str) -> str:
    return entry.partition("/")[0].replace("_", " ")


@cache
def irregular(verbs: bool) -> dict[str, str]:
    """Word -> its irregular past (of a verb) or plural (of any other word)."""
    entries = [entry for name, some in sections().items() if (name in VERBS) == verbs for entry in some if "/" in entry]
    return {plain(entry): entry.partition("/")[2].replace("_", " ") for entry in entries}


@cache
def plural(noun: str) -> str:
    """One apple, two apples: `berry` -> `berries`, `box` -> `boxes`, `knife` -> `knives`."""
    if noun in irregular(verbs=False):
        return irregular(verbs=False)[noun]
    if noun.endswith(("s", "x", "z", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in VOWELS:
        return noun[:-1] + "ies"
    return noun + "s"


@cache
def past(verb: str) -> str:
    """`walk` -> `walked`, `hop` -> `hopped`, `carry` -> `carried`, `run` -> `ran`."""
    if verb in irregular(verbs=True):
        return irregular(verbs=True)[verb]
    if verb.endswith("e"):
        return verb + "d"
    if verb.endswith("y") and verb[-2] not in VOWELS:
        return verb[:-1] + "ied"
    return stem(verb) + "ed"


@cache
def ing(verb: str) -> str:
    """`walk` -> `walking`, `hop` -> `hopping`, `ride` -> `riding`, `tie` -> `tying`."""
    if verb.endswith("ie"):
        return verb[:-2] + "ying"
    if verb.endswith("e") and not verb.endswith(("ee", "ye", "oe")):
        return verb[:-1] + "ing"
    return stem(verb) + "ing"


def stem(verb: str) -> str:
    """Doubles the last letter of a word with one vowel before one consonant: `hop` -> `hopp`, but `gallop`."""
    if irregular(verbs=True).get(verb) == verb + verb[-1] + "ed":  # unwrap, unwrapped
        return verb + verb[-1]
    one_vowel = sum(letter in VOWELS for letter in verb.replace("qu", "q")) == 1
    short = one_vowel and verb[-2:-1] in VOWELS and verb[-1] not in VOWELS + "wxy"
    return verb + verb[-1] if short else verb


def article(phrase: str) -> str:
    """`apple` -> `an apple`, `useful bag` -> `a useful bag`, by how the word sounds."""
    vowel = phrase[0].lower() in VOWELS and not phrase.startswith(("use", "uni", "one", "uku", "eu"))
    return f"{'an' if vowel or phrase.startswith(('honest', 'hour', 'heir')) else 'a'} {phrase}"


def capital(sentence: str) -> str:
    """The first letter in upper case, the others as they are."""
    return sentence[:1].upper() + sentence[1:]
