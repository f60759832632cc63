"""Reads an answer to its end where nothing is streamed: all choices, whole."""

from __future__ import annotations

from api.calls.stream import Answer, CallFault, Delta, End, PrefillUpdate
from api.errors import ApiError
from api.openai.formats import WholeChoice


async def collect(answer: Answer, count: int) -> list[WholeChoice]:
    """All `count` choices, each with its end.

    Raises:
        ApiError: one of them failed, or the deadline passed before there was any text.
    """
    choices = [WholeChoice(index) for index in range(count)]
    while any(choice.end is None for choice in choices):
        for item in await answer.next_items():
            match item:
                case Delta():
                    choices[item.choice].add(item)
                case End():
                    choices[item.choice].end = item
                case CallFault(error):
                    raise error
                case PrefillUpdate():
                    pass
    if all(choice.reason == "deadline" and not choice.text for choice in choices):
        raise ApiError(
            "The deadline passed before the first token.",
            status=504,
            kind="server_error",
            code="deadline_exceeded",
            headers={"x-should-retry": "false"},
        )
    return choices
