"""From the messages of a conversation to the tokens of a prompt: the model's template, and what in them is text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from api.errors import BadRequestError
from api.openai.schemas import ChatRequest, Message
from api.text.chat_template import ChatTemplate, TemplateError
from api.text.control_tokens import UnguardedError, unused_character, without_character
from api.text.detokenizer import TokenizerText
from api.text.tokenizers import Bundle

LONG_TEXT = 20_000
"""Characters from which rendering or tokenising would hold up the event loop."""
LONG_CONVERSATION = 200
"""Messages from which rendering would."""

_OWN_WORDS = ("content", "name", "reasoning_content")
"""Fields of a message that are the client's text."""


class Prompt(NamedTuple):
    """A conversation as its template writes it."""

    text: str
    marked: str | None = None
    """The same with marked control tokens, where the messages mention some that are text."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a template is given."""

    messages: Sequence[dict[str, Any]]
    variables: Mapping[str, Any]

    def texts(self) -> Iterator[str]:
        """Every text that a client wrote."""
        for message in self.messages:
            yield from (message[field] for field in _OWN_WORDS if field in message)
        yield from (value for value in self.variables.values() if isinstance(value, str))


async def render(body: ChatRequest, bundle: Bundle) -> Prompt:
    """Raises: BadRequestError."""
    template = bundle.template
    if template is None:
        raise BadRequestError("This model has no chat template; use /v1/completions.", param="model")
    if _is_long(body.messages):
        return await asyncio.to_thread(_render_long, template, bundle.text, body)
    parts = _parts(template, body)
    if not _mentions_control(bundle.text, body, parts):
        return Prompt(_rendered(template, parts))
    return await asyncio.to_thread(_render_guarded, template, bundle.text, parts)


async def encode(prompt: Prompt, text: TokenizerText) -> list[int]:
    """The tokens of a prompt."""
    if prompt.marked is not None:
        return await asyncio.to_thread(text.guarded.encode, prompt.marked)
    if len(prompt.text) < LONG_TEXT:
        return text.encode(prompt.text, add_special_tokens=False)
    return await asyncio.to_thread(text.encode_aside, prompt.text, add_special_tokens=False)


def _is_long(messages: Sequence[Message]) -> bool:
    return len(messages) >= LONG_CONVERSATION or sum(map(_length, messages)) >= LONG_TEXT


def _length(message: Message) -> int:
    """Characters of a message, one more for each part of it."""
    content, reasoning = message.content or "", message.reasoning_content or message.reasoning or ""
    length = len(content) if isinstance(content, str) else sum(len(part.text) + 1 for part in content)
    return length + len(reasoning)


def _render_long(template: ChatTemplate, text: TokenizerText, body: ChatRequest) -> Prompt:
    parts = _parts(template, body)
    if _mentions_control(text, body, parts):
        return _render_guarded(template, text, parts)
    return Prompt(_rendered(template, parts))


def _parts(template: ChatTemplate, body: ChatRequest) -> _Parts:
    messages = [_message(message, has_developer=template.names_developer) for message in body.messages]
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    return _Parts(messages, {**effort, **(body.chat_template_kwargs or {})})


def _mentions_control(text: TokenizerText, body: ChatRequest, parts: _Parts) -> bool:
    """Whether a text of the client has control tokens that must not count."""
    return not body.parse_control_tokens and any(map(text.controls.occur_in, parts.texts()))


def _render_guarded(template: ChatTemplate, text: TokenizerText, parts: _Parts) -> Prompt:
    """Render with the client's control tokens broken up, and then mark those that are whole."""
    try:
        mark = text.guarded.mark
    except UnguardedError as error:
        message = (
            f"The messages have control tokens, which this model's tokenizer cannot take for text ({error}); "
            "parse_control_tokens has them count as such."
        )
        raise BadRequestError(message, param="messages") from error
    stand_in = unused_character([template.source, *parts.texts()])
    rendered = _rendered(template, _broken_up(parts, text, stand_in))
    marked = text.controls.mark(rendered, mark)
    return Prompt(without_character(rendered, stand_in), without_character(marked, stand_in))


def _broken_up(parts: _Parts, text: TokenizerText, stand_in: str) -> _Parts:
    def change(value: Any, *, is_models_own: bool) -> Any:
        if not isinstance(value, str):
            return value
        return text.controls.break_up(value, stand_in, is_models_own=is_models_own)

    messages = [
        {
            field: change(value, is_models_own=message["role"] == "assistant") if field in _OWN_WORDS else value
            for field, value in message.items()
        }
        for message in parts.messages
    ]
    return _Parts(messages, {name: change(value, is_models_own=True) for name, value in parts.variables.items()})


def _rendered(template: ChatTemplate, parts: _Parts) -> str:
    try:
        return template.render(parts.messages, parts.variables)
    except TemplateError as error:
        raise BadRequestError(f"The model's chat template refuses these messages: {error}", param="messages") from error


def _message(message: Message, *, has_developer: bool) -> dict[str, Any]:
    """A message as templates know it: content is one string, absent fields are absent."""
    content = message.content
    if content is None and message.role != "assistant":
        raise BadRequestError(f"A {message.role} message needs content.", param="messages")
    is_renamed = message.role == "developer" and not has_developer
    fields: dict[str, Any] = {
        "role": "system" if is_renamed else message.role,
        "content": content if isinstance(content, str) else "\n".join(part.text for part in content or ()),
    }
    if message.name is not None:
        fields["name"] = message.name
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if reasoning is not None:
        fields["reasoning_content"] = reasoning
    return fields
