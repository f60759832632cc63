"""The body of a call as a struct, or a refusal that names the field. Knows fields, not models or prompts."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from api.chat import RESERVED
from api.errors import BadRequestError
from api.schemas import UNSUPPORTED, ChatRequest, CompletionRequest, GenerationRequest

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
        raise _field_error(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(f"The body is not JSON: {error}.") from error
    except RecursionError as error:
        raise BadRequestError("The body is nested too deeply.") from error


def check_chat(body: ChatRequest) -> None:
    """Raises: BadRequestError when fields contradict each other or ask for what is not built."""
    _check_stream_options(body)
    if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
        raise BadRequestError("max_tokens and max_completion_tokens contradict each other.", param="max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise BadRequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    if body.store:
        raise _unsupported("store")
    for name in body.chat_template_kwargs or {}:
        if name in RESERVED:
            raise BadRequestError(f"{name!r} is not the client's to set.", param="chat_template_kwargs")


def check_completion(body: CompletionRequest) -> None:
    """Raises: BadRequestError when fields contradict each other or ask for what is not built."""
    _check_stream_options(body)
    if body.echo:
        raise _unsupported("echo")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise _unsupported("best_of")


def _check_stream_options(body: GenerationRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise BadRequestError("stream_options needs stream to be true.", param="stream_options")
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise _unsupported("stream_options.include_obfuscation")


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
