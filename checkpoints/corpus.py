"""Text for a very small model: conversations put together from a few patterns, the same for the same seed.

Spelling and patterns can be learnt in minutes; names, places and numbers cannot be foreseen. So a head that drafts on
it is right often and never always.
"""

from __future__ import annotations

import random

USER, ASSISTANT = "<|im_start|>user\n{}<|im_end|>\n", "<|im_start|>assistant\n{}<|im_end|>\n"

_NAMES = [
    "Ada",
    "Bruno",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Greta",
    "Henry",
    "Irene",
    "Jonas",
    "Klara",
    "Louis",
    "Marta",
    "Niels",
    "Olga",
    "Peter",
    "Rosa",
    "Simon",
]
_PLACES = [
    "the kitchen",
    "the garden",
    "the old barn",
    "the library",
    "the station",
    "the market",
    "the harbour",
    "the small office",
]
_THINGS = [
    "lantern",
    "basket",
    "letter",
    "kettle",
    "bicycle",
    "hammer",
    "violin",
    "blanket",
    "compass",
    "teapot",
    "umbrella",
    "camera",
]
_COLOURS = ["red", "green", "blue", "yellow", "white", "black", "grey", "brown"]
_NUMBERS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]

_TALKS = (
    (
        "Where is the {colour} {thing}?",
        "The {colour} {thing} is in {place}. {name} left it there on {day}, next to the {thing2}.",
    ),
    (
        "Who has the {thing}?",
        "{name} has the {thing}. {name2} gave it to {name} in {place}, and {name} wants to keep it until {day}.",
    ),
    (
        "How many {thing}s are there?",
        "There are {number} {thing}s in {place} and {number2} more in {place2}. "
        "{name} counted them on {day}, and {name2} counted them again.",
    ),
    (
        "Tell me a story about {name}.",
        "Once upon a time {name} found a {colour} {thing} in {place}. {name2} said that it was only a {thing2}, "
        "but {name} took it home. On {day} the {colour} {thing} was gone, and nobody knew where it was.",
    ),
    (
        "What does {name} do on {day}?",
        "On {day} {name} goes to {place} with {name2}. First they look for the {colour} {thing}, "
        "then they drink {number} cups of tea, and then they walk back to {place2}.",
    ),
    (
        "Write a list of things in {place}.",
        "In {place} there are:\n1. a {colour} {thing}\n2. {number} {thing2}s\n3. the {thing} of {name}\n"
        "4. a letter from {name2} to {name}",
    ),
)


def conversation(rng: random.Random) -> str:
    """One to three questions with their answers."""
    return "".join(_exchange(rng) for _ in range(rng.randint(1, 3)))


def _exchange(rng: random.Random) -> str:
    question, answer = rng.choice(_TALKS)
    name, name2 = rng.sample(_NAMES, 2)
    place, place2 = rng.sample(_PLACES, 2)
    thing, thing2 = rng.sample(_THINGS, 2)
    number, number2 = rng.sample(_NUMBERS, 2)
    words = {
        **{"name": name, "name2": name2, "place": place, "place2": place2, "thing": thing, "thing2": thing2},
        **{"number": number, "number2": number2, "colour": rng.choice(_COLOURS), "day": rng.choice(_DAYS)},
    }
    return USER.format(question.format(**words)) + ASSISTANT.format(answer.format(**words))
