"""The body of a call as a struct, or a refusal that names the field. Knows fields, not models or prompts."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec

from api.errors import BadRequestError
from api.openai.schemas import DEFAULTS, FREE_FIELDS, UNSUPPORTED, ChatRequest, CompletionRequest, GenerationRequest
from api.text.chat_template import is_variable

Body = TypeVar("Body", bound=msgspec.Struct)

_UNKNOWN_FIELD = re.compile(r"unknown field `([^`]*)`")
_MISSING_FIELD = re.compile(r"missing required field `([^`]*)`")
_PATH = re.compile(r" - at `\$\.?([^`]*)`")


def parse(data: bytes, decoder: msgspec.json.Decoder[Body]) -> Body:
    """The body as a struct.

    Raises:
        BadRequestError: it is no JSON, or a field is missing, unknown, unsupported or out of bounds.
    """
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        if _UNKNOWN_FIELD.search(str(error)) and b"null" in data:
            return _parse_without_nulls(data, decoder)
        raise _field_error(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(f"The body is not JSON: {error}.") from error
    except RecursionError as error:
        raise BadRequestError("The body is nested too deeply.") from error


def _parse_without_nulls(data: bytes, decoder: msgspec.json.Decoder[Body]) -> Body:
    """The body once more, where a field is unknown: if its value is null, it asks for nothing."""
    try:
        return decoder.decode(json.dumps(_without_nulls(json.loads(data))).encode())
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # behind the unknown field it is no JSON
        raise BadRequestError(f"The body is not JSON: {error}.") from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: item if name in FREE_FIELDS else _without_nulls(item) for name, item in value.items() if item is not None
    }


def check_chat(body: ChatRequest) -> None:
    """Raises: BadRequestError when fields contradict each other or ask for what is not built."""
    _check_shared(body)
    if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
        raise BadRequestError("max_tokens and max_completion_tokens contradict each other.", param="max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise BadRequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    for name in body.chat_template_kwargs or {}:
        if not is_variable(name):
            raise BadRequestError(f"chat_template_kwargs: {name!r} cannot be set.", param="chat_template_kwargs")


def check_completion(body: CompletionRequest) -> None:
    """Raises: BadRequestError when fields contradict each other or ask for what is not built."""
    _check_shared(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise _unsupported("best_of")


def _check_shared(body: GenerationRequest) -> None:
    for name, value in DEFAULTS.items():
        if getattr(body, name, None) not in (None, value):
            raise _unsupported(name)
    options = body.stream_options
    if options is None:
        return
    if options.include_obfuscation:
        raise _unsupported("stream_options.include_obfuscation")
    if options.continuous_usage_stats:
        raise _unsupported("stream_options.continuous_usage_stats")
    if options.include_usage and not body.stream:
        raise BadRequestError("stream_options needs stream to be true.", param="stream_options")


def _field_error(message: str) -> BadRequestError:
    """msgspec's words, with the field where OpenAI's clients look for it."""
    path = match[1] if (match := _PATH.search(message)) else ""
    text = _PATH.sub("", message)
    for pattern in (_UNKNOWN_FIELD, _MISSING_FIELD):
        if match := pattern.search(text):
            path = f"{path}.{match[1]}" if path else match[1]
            word = "Unknown field" if pattern is _UNKNOWN_FIELD else "Missing field"
            return BadRequestError(f"{word}: {path}.", param=path)
    leaf = re.split(r"[.\[]", path)[0] if not path.startswith("messages") else path.rpartition(".")[2]
    if leaf in UNSUPPORTED:
        return _unsupported(path)
    return BadRequestError(f"{path}: {text}." if path else f"{text}.", param=path or None)


def _unsupported(path: str) -> BadRequestError:
    return BadRequestError(f"{path} is not supported.", param=path, code="unsupported_parameter")
