"""The shapes of stories: how one begins, what happens on the way, how it ends.

Templates of `sentences`. `{hero}` and `{friend}` are the first two of the cast. What stays the same to the end of a
story: `{goal}` is its thing, `{home}` its place, `{helper}` its profession, `{stranger}` its other person, `{folk}` its
people, `{pet}` its animal, `{beast}` a second one, `{skill}` what the hero wants to do; also `{day_time}`, `{weather}`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    setting: str  # whose other sentences fit: "outdoors" or "indoors"
    opening: str
    beats: tuple[str, ...]  # in this order, spread over the story
    closing: str


SHAPES = (
    Shape(  # a journey
        "outdoors",
        "One {weather} {day_time} {hero} and {friend} set out for the {home}.",
        (
            "The way was long, and soon {hero} felt {sad}.",
            "Halfway there {friend} stopped by the {water} to rest.",
            '"How far is it now?" asked {friend}. "Not far," {replied} {hero}.',
            "Beyond the {land} they saw the {home} at last.",
        ),
        "At the {home} they rested, and {hero} was {glad}.",
    ),
    Shape(  # something is lost
        "indoors",
        "{hero} could not find {his} {look} {goal} and looked for it everywhere.",
        (
            "{hero} looked behind the {fixture}, but there was no {goal}.",
            '"Have you seen my {goal}?" {hero} asked the {helper}. The {helper} had not.',
            "{hero} even looked in the {room}, and {friend} looked, too.",
            '"Here is your {goal}!" called {friend}. "It was under the {fixture}!"',
        ),
        "So {hero} got the {goal} back, and {he} thanked {friend}.",
    ),
    Shape(  # a birthday
        "indoors",
        "It was the birthday of {hero}, and {he} was {glad}.",
        (
            "{friend} came early and brought some {foods}.",
            "The {folk} sang a song, and {hero} blushed.",
            '"This is for you," {said} {friend}, and gave {hero} an? {look} {goal}.',
            "When nothing was left of the {foods}, everyone played {game}.",
        ),
        "It was the best birthday of {his} life.",
    ),
    Shape(  # a school day
        "indoors",
        "At school {hero} and {friend} listened to the {helper}.",
        (
            '"Today we learn about {idea}," {said} the {helper}.',
            "{hero} wrote everything down {manner}.",
            "{friend} raised a hand and asked about the {animals}.",
            '"That is a good question," {replied} the {helper}.',
        ),
        "When school was over, {hero} and {friend} ran home together.",
    ),
    Shape(  # a wish
        "outdoors",
        "Once there was an? {trait} {fellow} called {hero} who wanted to {skill}.",
        (
            '"It is not easy to {skill}," {said} the {helper}.',
            "{hero} practiced every {day_time}, even when {he} was tired.",
            '"You can do it," {said} {friend}, and helped {hero}.',
            "At last {hero} could {skill} as well as the {helper}.",
        ),
        "And from that day on {hero} was the happiest {fellow} of all.",
    ),
    Shape(  # a stranger comes
        "outdoors",
        "Long ago an? {trait} {stranger} came to the {home} in an? {vehicle}.",
        (
            "Nobody knew the {stranger}, and the {folk} were afraid.",
            "Only {hero} and {friend} gave the {stranger} some {foods}.",
            '"Take this {goal}," {said} the {stranger} to {hero}. "It is {look}, but it brings luck."',
            "{hero} thanked the {stranger} and hid the {goal} near the {home}.",
        ),
        "Then the {stranger} left again, and {hero} waved for a long time.",
    ),
    Shape(  # a letter
        "indoors",
        '{hero} sat down and wrote a letter to {friend}. "You will be surprised," it began.',
        (
            '"Here it is {weather}, and the {room} is {cozy}," wrote {hero}.',
            '"The {pet} is {furred}, and I am {mood}," the letter went on.',
            '"Please send me an? {look} {goal}," wrote {hero}.',
            '"I must stop now, for the {helper} is waiting," the letter said.',
        ),
        'The letter ended, "With love from your {trait} friend {hero}."',
    ),
    Shape(  # a tale within a tale
        "indoors",
        '"Tell me a story," said {hero}, and {friend} began.',
        (
            '"Once an? {pet} lived near the {home}," said {friend}, "and it was {furred}."',
            '"What did the {pet} do?" asked {hero}. "It {acted} all day," said {friend}.',
            '"One {day_time} the {pet} found an? {look} {goal}," said {friend}.',
            '"And then?" asked {hero}. "Then it {moved} home with the {goal}," said {friend}.',
        ),
        '"And that was the story," said {friend}. "Now it is time to sleep."',
    ),
    Shape(  # an animal is gone
        "outdoors",
        "An? {trait} {helper} lived near the {home} with an? {furred} {pet}.",
        (
            "One {day_time} the {pet} was gone, and the {helper} wept.",
            "{hero} and {friend} heard of it and looked along the {way}.",
            "Under an? {tree} tree they found the {pet}, hungry but unhurt.",
            "The {helper} thanked them and gave them some {foods}.",
        ),
        "The {pet} never ran away again, and the {helper} was {glad}.",
    ),
    Shape(  # a day at work
        "indoors",
        "Early one {weather} morning {hero} woke up and felt {glad}.",
        (
            "There was much to do: {hero} wanted to {chore} and {chore}.",
            "By noon the {room} and the {fixture} were clean.",
            '"You work too hard," {said} {friend}, and brought {hero} some {foods}.',
            "In the evening {hero} and {friend} sat beside the {fixture} and talked about {idea}.",
        ),
        "That night {hero} slept well and dreamed of {idea}.",
    ),
    Shape(  # bad weather
        "indoors",
        "Dark clouds stood in the sky, and the {folk} at the {home} were {sad}.",
        (
            "The wind howled, and soon it began to rain.",
            "{hero} shut the windows, and {friend} locked the door of the {room}.",
            "All night long the rain drummed on the roof, and nobody slept.",
            "In the morning it was quiet, and {hero} looked out.",
        ),
        "The sky was clear again, and the {folk} were relieved.",
    ),
    Shape(  # a contest
        "outdoors",
        "{hero} and {friend} could not agree who could {skill} better.",
        (
            '"Let us {skill} now, and then we shall know," {said} {friend}.',
            "The {trait} {helper} was to be the judge of it.",
            "First {hero} tried {his} best, then {friend} tried it {manner}.",
            '"Both of you {skill} very well," {said} the {helper}. "Both have won!"',
        ),
        "So {hero} and {friend} shared some {foods}, and both were content.",
    ),
    Shape(  # two animals talk
        "outdoors",
        "Once upon a time an? {furred} {pet} met an? {furred} {beast} beside the {way}.",
        (
            '"Good {day_time}," {said} the {pet}. "Where are you going?"',
            '"I am looking for some {foods}," {replied} the {beast}.',
            "{hero} and {friend} heard it and gave them some {foods}.",
            '"I was {sad}, but now I am {glad}," {said} the {beast}.',
        ),
        "From that day on the {pet} and the {beast} were the best of friends.",
    ),
    Shape(  # a trip to the water
        "outdoors",
        "{hero} asked {friend} to come along to the {water}, for it was an? {weather} {day_time}.",
        (
            "They sat down under an? {tree} tree and ate some {foods}.",
            "{friend} saw an? {swimmer} in the {water} and called {hero}.",
            "Then the {helper} came by and told them about {idea}.",
            '"It is getting late," {said} {hero}. "We must go home."',
        ),
        "Tired but {glad}, {hero} and {friend} walked home along the {way}.",
    ),
)

REFRAINS = (
    '"Say it after me: {list}," {said} {name}. "{List}," {replied} the {person}.',
    "They took {list}. Then they counted what they had: {list}.",
    '{name} sang, "{List}!" And the {person} sang, "{List}!"',
    "On the list stood {list}. {name} read it aloud: {list}.",
)
