"""What a call is known by under an Idempotency-Key: what its client said. Engine: none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from api.calls.idempotency import said_by
from api.fleet.catalog import NAMESAKES, Catalog
from api.http.services import CHAT_DECODER, COMPLETION_DECODER
from api.openai.parsing import parse
from tests.api.fake import IDENTITY, NAME, FakeBackend, card, fleet

CHAT = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "logit_bias": {"5": 1, "7": -1}}


def said(fields: dict[str, Any]) -> str:
    return said_by(parse(json.dumps(fields).encode(), CHAT_DECODER))


@pytest.mark.parametrize(
    "written",
    [
        pytest.param(dict(reversed(CHAT.items())), id="fields in another order"),
        pytest.param(CHAT | {"logit_bias": {"7": -1.0, "5": 1.0}}, id="a map in another order"),
        pytest.param(CHAT | {"max_tokens": None}, id="an absent field named"),
        pytest.param(CHAT | {"stream": True, "stream_options": {"include_usage": True}}, id="streamed"),
        pytest.param(CHAT | {"user": "u1", "metadata": {"try": "2"}}, id="labelled"),
    ],
)
def test_same_words_are_known_again(written: dict[str, Any]) -> None:
    assert said(written) == said(CHAT)


@pytest.mark.parametrize(
    "changed",
    [
        {"model": IDENTITY},
        {"messages": [{"role": "user", "content": "Hi!"}]},
        {"messages": [{"role": "system", "content": "Hi"}]},
        {"max_tokens": 5},
        {"max_completion_tokens": 5},
        {"n": 2},
        {"seed": 1},
        {"temperature": 0},
        {"logit_bias": {"5": 1}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"logprobs": True},
    ],
    ids=str,
)
def test_other_words_are_another_call(changed: dict[str, Any]) -> None:
    assert said(CHAT | changed) != said(CHAT)


def test_text_to_go_on_with_is_known_by_its_words() -> None:
    def said_of(prompt: object) -> str:
        return said_by(parse(json.dumps({"model": NAME, "prompt": prompt}).encode(), COMPLETION_DECODER))

    assert said_of("The") == said_of("The")
    assert len({said_of(prompt) for prompt in ("The", ["The"], ["The", "the"], [1, 2], [[1], [2]])}) == 5


async def test_namesakes_are_the_other_identities_of_a_name_those_served_last_first() -> None:
    backend = FakeBackend()
    cards = [card(identity=f"{NAME}@{i}") for i in range(NAMESAKES + 3)]
    backend.picture = fleet(
        cards=[*cards, card("other", "other@1")], last_seen_ms={each.model: i for i, each in enumerate(cards)}
    )
    catalog = Catalog(backend, age_s=0, lane_grace_s=60, stall_s=120)
    await catalog.fleet()

    found = [route.card.model for route in catalog.namesakes(cards[-1])]

    assert found == [each.model for each in reversed(cards[:-1])][:NAMESAKES]
