"""Prompts of any length: chats about notes, or what the small checkpoint was trained on. Needs a tokenizer only."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Protocol

from checkpoints.corpus import conversation

QUESTIONS = (
    "Explain how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper.",
    "List five ways to save water at home.",
    "What is the difference between a lake and a sea?",
    "Write a Python function that reverses a list.",
    "Give me a recipe for a simple tomato soup.",
    "Why is the sky blue at noon and red in the evening?",
    "Describe a good morning routine.",
    "What should I pack for a week in the mountains?",
    "Write a polite letter that asks for a refund.",
    "How does a refrigerator keep food cold?",
    "Name three famous bridges and what makes them special.",
    "What are the pros and cons of working from home?",
    "Tell me a joke about computers.",
    "How would you teach a child to swim?",
    "What happened in the year 1969?",
)
NOTES = (
    "The harbour was built in 1874 and has been widened twice since then.",
    "Fishing boats leave before dawn and come back in the early afternoon.",
    "A small museum in the old customs house shows maps and ship models.",
    "Bread is baked in a stone oven next to the market square.",
    "Most houses are painted white because the summers are hot.",
    "The railway arrived late and closed again after forty years.",
    "Children walk to a school that stands on the hill above the church.",
    "In winter the road over the pass is closed for several weeks.",
    "Engineers measured the strength of the dam with sensors in the concrete.",
    "A library opened on Saturdays only lends about nine hundred books a month.",
    "Olive trees need little water but suffer when frost comes in April.",
    "The town council voted against a second car park near the beach.",
    "Tourists ask for the lighthouse, which can be climbed for three coins.",
    "Local cheese is made from goat milk and kept in caves for half a year.",
    "A storm in 1953 broke the western pier and sank eleven boats.",
    "The new clinic has two doctors, four nurses and an ambulance.",
    "Every autumn a choir from the valley sings in the market hall.",
    "Power comes from wind turbines that were put up behind the ridge.",
    "Farmers complain that wild pigs dig up their potato fields.",
    "The oldest map of the coast was drawn by a monk in 1502.",
    "A bus to the city leaves at seven, at noon and at half past five.",
    "Rain falls on about ninety days a year, most of it between October and March.",
    "The carpenter repairs boats in spring and builds furniture for the rest of the year.",
    "Two wells supply drinking water and are tested every month.",
    "An old song tells of a merchant who lost his ring and found it in a fish.",
    "The football team plays on gravel since nobody waters the grass.",
    "Visitors leave their bicycles at the station and walk the last mile.",
    "A painter from abroad bought the mill and turned it into a studio.",
    "Honey from the upper meadows tastes of thyme and sells out by June.",
    "The bridge carries one lane only, so drivers have to wait for each other.",
    "Archaeologists found coins and the floor of a Roman bath under the school yard.",
    "Last year the ferry company replaced its oldest ship with an electric one.",
    "The post office closes at noon and opens again at four.",
    "Shepherds still count their animals in a dialect that few people understand.",
    "A retired captain teaches knots and the names of stars on summer evenings.",
    "The lemon groves were abandoned when prices fell in the eighties.",
    "Internet cables came with the new sewer pipes in the same trench.",
    "Snow is rare at the coast but stays on the peaks until May.",
    "The baker and the butcher have been neighbours and rivals for thirty years.",
    "Plans for a hotel on the cliff were dropped after a landslide.",
    "Swallows nest under the roof of the town hall every spring.",
    "The radio station broadcasts weather, news and requests from listeners.",
    "Salt was once dried in shallow pools south of the river mouth.",
    "A single traffic light stands at the crossing and is often out of order.",
    "The vineyard belongs to a cooperative with sixty members.",
    "Divers come for the wreck that lies at eighteen metres.",
)
_ASK = "\nSummarise these notes, then: "


class Writer(Protocol):
    """Token ids of numbered prompts."""

    def write(self, number: int, *, tokens: int) -> tuple[int, ...]:
        """Prompt `number`, of about `tokens` tokens."""


class TalkWriter:
    """The small checkpoint's own kind of text, broken off anywhere."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def write(self, number: int, *, tokens: int) -> tuple[int, ...]:
        rng, ids = random.Random(number), list[int]()
        while len(ids) < tokens:
            ids += self._tokenizer.encode(conversation(rng))
        return tuple(ids[:tokens])


class PromptWriter:
    """A question, and before it as many sentences of notes as fit, by a model's own chat template if it has one."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def write(self, number: int, *, tokens: int) -> tuple[int, ...]:
        """Prompt `number`, the longest one of at most `tokens` tokens; longer only where its question alone is."""
        question = QUESTIONS[number % len(QUESTIONS)]
        written = self._render(question)
        notes = ""
        for place in range(len(NOTES)):
            notes += NOTES[(place + 7 * number) % len(NOTES)] + " "
            longer = self._render(notes + _ASK + question)
            if len(longer) > tokens:
                break
            written = longer
        return written

    def _render(self, text: str) -> tuple[int, ...]:
        if self._tokenizer.chat_template is None:  # a base model
            return tuple(self._tokenizer.encode(text))
        messages = [{"role": "system", "content": ""}, {"role": "user", "content": text}]
        ids: Any = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return tuple(ids)
