"""A small grammar of English: templates whose slots are filled with words, each story from a palette of its own.

A story draws a few words of each kind once and then keeps to them, as stories do. A template is a sentence with slots:
`{moved}` is a verb of motion in the past, `{thing}` something a hand can hold; with a capital letter, `{Flowers}`, it
starts a sentence. "an? " becomes "a " or "an ". `{name}` is someone of the cast; `{he}`, `{him}` and `{his}` speak of
that `{name}`, or of the `{hero}` where there is no other name. Only the shapes of stories name two people in one
sentence: a small model copies well and leaves out badly, and would name the same one twice.
"""

import re
from random import Random

from kvcourse.training.stories.fillers import FILLERS
from kvcourse.training.stories.words import article, by_frequency, capital, ing, ordered, past, plural, vocabulary

SLOT = re.compile(r"\{(\w+)\}")
ARTICLE = re.compile(r"\b([Aa])n\? ([\w-]+)")
PRONOUNS = {"girls": {"he": "she", "him": "her", "his": "her"}, "boys": {"he": "he", "him": "him", "his": "his"}}

# Slot -> (section, inflection, how many words of the section one story uses)
SLOTS = {
    "thing": ("things", str, 4),
    "things": ("things", plural, 4),
    "material": ("materials", str, 2),
    "clothing": ("clothes", str, 2),
    "look": ("looks", str, 6),
    "cut": ("cuts", str, 2),
    "fixture": ("fixtures", str, 3),
    "room": ("rooms", str, 2),
    "cozy": ("cozy", str, 4),
    "place": ("places", str, 3),
    "land": ("lands", str, 2),
    "way": ("ways", str, 2),
    "road": ("roads", str, 1),
    "water": ("waters", str, 1),
    "sea": ("seas", str, 1),
    "scenic": ("scenic", str, 5),
    "animal": ("animals", str, 3),
    "animals": ("animals", plural, 3),
    "furred": ("furred", str, 4),
    "housepet": ("housepets", str, 1),
    "bird": ("birds", str, 2),
    "birds": ("birds", plural, 2),
    "swimmer": ("swimmers", str, 2),
    "swimmers": ("swimmers", plural, 2),
    "fish": ("fishes", str, 2),
    "fishes": ("fishes", plural, 2),
    "insect": ("insects", str, 2),
    "flowers": ("flowers", plural, 2),
    "tree": ("trees", str, 2),
    "foods": ("foods", plural, 3),
    "drink": ("drinks", str, 1),
    "job": ("jobs", str, 3),
    "person": ("persons", str, 3),
    "people": ("persons", plural, 3),
    "fellow": ("people", str, 2),
    "trait": ("traits", str, 4),
    "mood": ("moods", str, 4),
    "glad": ("glad", str, 3),
    "sad": ("sad", str, 3),
    "part": ("parts", str, 3),
    "vehicle": ("vehicles", str, 1),
    "boat": ("boats", str, 1),
    "noise": ("noises", str, 2),
    "noised": ("noises", past, 2),
    "count": ("counts", str, 1),
    "herd": ("herds", str, 1),
    "heap": ("heaps", str, 1),
    "weather": ("weather", str, 1),
    "time": ("times", str, 1),
    "idea": ("ideas", str, 4),
    "game": ("games", str, 1),
    "chore": ("chores", str, 4),
    "wish": ("wishes", str, 3),
    "tone": ("tones", str, 4),
    "manner": ("manners", str, 4),
    "moved": ("motion", past, 4),
    "acted": ("acts", past, 5),
    "acting": ("acts", ing, 5),
    "stirring": ("stirs", ing, 2),
    "handled": ("handle", past, 4),
    "handle": ("handle", str, 4),
}

# Slots that mean the same word all through a story: slot -> (slot of the same kind, which of its words).
LASTING = {
    "goal": ("thing", 0),
    "home": ("place", 0),
    "helper": ("job", 0),
    "stranger": ("person", 0),
    "folk": ("people", 1),
    "pet": ("animal", 0),
    "beast": ("animal", 1),
    "skill": ("wish", 0),
    "day_time": ("time", 0),
}


class Scene:
    """The palette of one story, and the one who speaks its sentences.

    `avoid`, given with `forbid`, are the keys and answers of facts: no other sentence uses them.
    """

    def __init__(self, rng: Random, cast_size: int = 3):
        self.rng = rng
        people = [(name, section) for section in PRONOUNS for name in vocabulary()[section]]
        self.sex = dict(rng.sample(people, cast_size))
        self.cast = tuple(self.sex)
        self.setting = rng.choice(tuple(FILLERS))
        self.avoid: set[str] = set()
        self.palette: dict[str, list[str]] = {}
        self.unused: list[str] = []

    def forbid(self, words: set[str]) -> None:
        """Draw none of these words from now on, nor their plurals, nor a phrase with one of them in it."""
        self.avoid |= words | {plural(word) for word in words}

    def allowed(self, word: str) -> bool:
        return self.avoid.isdisjoint((word, plural(word), *word.replace("-", " ").split()))

    def choices(self, section: str, count: int) -> list[str]:
        """This story's few words of a section; drawn when first needed."""
        if section not in self.palette:
            words, drawn = ordered(section), []
            while len(drawn) < count:
                word = by_frequency(self.rng, words)
                if word not in drawn and self.allowed(word):
                    drawn.append(word)
            self.palette[section] = drawn
        return self.palette[section]

    def say(self, template: str) -> str:
        """The template with its slots filled. A word is not used twice for the same slot while there are others."""
        text = SLOT.sub(Filling(self, template), template)
        return capital(ARTICLE.sub(choose_article, text))

    def filler(self) -> str:
        """One sentence that states no fact; of another make than those before, until all have been used."""
        if not self.unused:
            templates = FILLERS[self.setting]
            self.unused = self.rng.sample(templates, len(templates))
        return self.say(self.unused.pop())


class Filling:
    """What stands in the slots of one sentence."""

    def __init__(self, scene: Scene, template: str):
        self.scene = scene
        self.used: dict[str, set[str]] = {}
        rng, cast = scene.rng, scene.cast
        absent = [name for name in cast if name not in template] or cast  # a fact may name someone already
        name = rng.choice(absent) if "{name}" in template else cast[0]
        self.fixed = {"name": name, "hero": cast[0], "friend": cast[1]}
        self.fixed |= PRONOUNS[scene.sex[name]]

    def __call__(self, match: re.Match) -> str:
        slot = match[1]
        word = self.word(slot.lower())
        return word if slot.islower() else capital(word)

    def word(self, slot: str) -> str:
        if slot in self.fixed:
            return self.fixed[slot]
        if slot in ("said", "replied"):
            return self.speech(slot)
        if slot in LASTING:
            kind, place = LASTING[slot]
            section, inflect, count = SLOTS[kind]
            word = self.scene.choices(section, count)[place]
        else:
            section, inflect, count = SLOTS[slot]
            options = self.scene.choices(section, count)
            taken = self.used.get(section, ())
            word = self.scene.rng.choice([option for option in options if option not in taken] or options)
        self.used.setdefault(section, set()).add(word)
        return inflect(word)

    def speech(self, slot: str) -> str:
        """Mostly "said"; sometimes one of the story's livelier words."""
        if self.scene.rng.random() < 0.5:
            return "said"
        return past(self.scene.rng.choice(self.scene.choices("speech" if slot == "said" else "replies", 2)))


def choose_article(match: re.Match) -> str:
    phrase = article(match[2])
    return capital(phrase) if match[1] == "A" else phrase
