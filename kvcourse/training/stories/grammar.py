"""Which sentences the grammar of the stories can write: a measure of how well a model has learned to write them.

A sentence is right when some template, with words of its sections in the slots, gives it letter by letter, with the
right article, and with different people where the template has several. Whether it fits the sentences before it is not
looked at.
"""

import re
from functools import cache

from kvcourse.training.stories.facts import ASKED, KINDS, LEADS, PLAINLY_ASKED, PLAINLY_STATED, STATED
from kvcourse.training.stories.fillers import FILLERS
from kvcourse.training.stories.sentences import LASTING, PRONOUNS, SLOTS
from kvcourse.training.stories.shapes import REFRAINS, SHAPES
from kvcourse.training.stories.words import article, capital, past, vocabulary

PEOPLE = ("name", "hero", "friend")
BEGIN = rf"""(?=["A-Z\0]|\{{(?:{"|".join(PEOPLE)}|[A-Z]))"""  # of a sentence, also in a template
END = re.compile(rf"""(?<=[.?!]) {BEGIN}|(?<=[.?!]") {BEGIN}""")
SLOT = re.compile(r"(\0?)\{(\w+)\}")  # \0: an article


def sentences(text: str) -> list[str]:
    """The sentences of a text; what somebody says and who says so are one."""
    return END.split(text.strip())


def writable(sentence: str) -> bool:
    """Whether the grammar can write this sentence."""
    for pattern in patterns():
        match = pattern.fullmatch(sentence)
        if match:
            if len(set(match.groups())) == len(match.groups()):
                return True
    return False


@cache
def patterns() -> list[re.Pattern]:
    """One for each sentence of each template."""
    templates = [template for some in FILLERS.values() for template in some]
    templates += [text for shape in SHAPES for text in (shape.opening, *shape.beats, shape.closing)]
    templates += [refrain.replace("{list}", "{listed}").replace("{List}", "{Listed}") for refrain in REFRAINS]
    templates += [
        template.replace("{Question}", "{Asked}?").replace("{question}", "{asked}?")
        for template in (*STATED, *ASKED, *PLAINLY_STATED, *PLAINLY_ASKED)
    ]
    parts = {part for template in templates for part in END.split(re.sub(r"\b[Aa]n\? ", "\0", template))}
    return [re.compile(pattern(part)) for part in sorted(parts)]


def pattern(part: str) -> str:
    """A sentence of a template as a regular expression; each person is a group."""
    found, end, people = "", 0, set()
    for match in SLOT.finditer(part):
        slot = match[2].lower()
        words = f"(?P={slot})" if slot in people else words_of(slot, bool(match[1]))
        found += re.escape(part[end : match.start()]) + words
        end = match.end()
        people |= {slot} & {*PEOPLE}
    return found + re.escape(part[end:])


@cache
def words_of(slot: str, with_article: bool = False) -> str:
    """What may stand in a slot."""
    if slot in PEOPLE:
        return f"(?P<{slot}>{'|'.join(vocabulary()['names'])})"
    if slot == "fact":
        return one_of(either(kind.statement).format(key=key_of(kind), answer=answer_of(kind)) for kind in KINDS)
    if slot == "asked":
        return one_of(either(kind.question[:-1]).format(key=key_of(kind)) for kind in KINDS)
    if slot == "listed":
        thing = f"{words_of('look', True)} {words_of('thing')}"
        return f"(?i:{thing}(?:, {thing})+ and {thing})"
    if slot == "lead":
        return any_of(LEADS)
    if slot in ("he", "him", "his"):
        return any_of({pronouns[slot] for pronouns in PRONOUNS.values()})
    if slot in ("said", "replied"):
        return any_of({"said", *(past(verb) for verb in vocabulary()["speech" if slot == "said" else "replies"])})
    section, inflect, _ = SLOTS[LASTING[slot][0] if slot in LASTING else slot]
    words = [inflect(word) for word in vocabulary()[section]]
    return any_of(map(article, words) if with_article else words)


def key_of(kind) -> str:
    return any_of(vocabulary()["names" if kind.keys == "cast" else kind.keys])


def answer_of(kind) -> str:
    return any_of(vocabulary()[kind.answers])


def either(text: str) -> str:
    """The text with a first letter of either case, unless a slot comes first."""
    return text if text[0] == "{" else f"[{text[0].lower()}{text[0].upper()}]{text[1:]}"


def any_of(words) -> str:
    """Any of the words, which may start a sentence."""
    return one_of(sorted(map(re.escape, {form for word in words for form in (word, capital(word))}), reverse=True))


def one_of(patterns) -> str:
    return f"(?:{'|'.join(patterns)})"
