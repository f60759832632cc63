"""The API's description in OpenAPI 3.1, made of the same structs that read and write the bodies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec

from api.fleet.health import Health
from api.http import openapi_offline
from api.openai.schemas import DEFAULTS, Chat, ChatRequest, Completion, CompletionRequest, ErrorBody, Model, ModelList

_BODIES = [ChatRequest, CompletionRequest, Chat, Completion, Model, ModelList, Health, ErrorBody]

_NARROWED = {
    **{
        (body.__name__, name): {"enum": [value, None], "default": None}
        for body in (ChatRequest, CompletionRequest)
        for name, value in DEFAULTS.items()
        if name in body.__struct_fields__
    },
    ("StreamOptions", "include_obfuscation"): {"enum": [False, None], "default": None},
    ("StreamOptions", "continuous_usage_stats"): {"enum": [False, None], "default": None},
}
"""Fields whose type says more than is built; the intake refuses the rest."""

_TIMEOUT = {
    "name": "x-mtplx-timeout-ms",
    "in": "header",
    "required": False,
    "description": "Deadline of this call in milliseconds; longer ones are shortened to the server's longest.",
    "schema": {"type": "integer", "minimum": 1, "maximum": 10**12},
}

_IDEMPOTENCY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "The caller's name for this call: asked again under it, with the same body, it is the same call.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
}


@cache
def description(*, has_files: bool = False) -> bytes:
    """The whole document as JSON; with the Files and Batches routes where they are on."""
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "MTPLX",
            "version": "1",
            "description": "OpenAI's chat and text completions over a durable queue. Unknown fields are refused.",
        },
        "paths": _paths() | (openapi_offline.paths(_json, _errors) if has_files else {}),
        "components": {
            "schemas": _schemas([*_BODIES, *openapi_offline.BODIES] if has_files else _BODIES),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"bearer": []}],
    }
    return msgspec.json.encode(document)


def _schemas(bodies: Sequence[type]) -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    for (name, field), narrowed in _NARROWED.items():
        schemas[name]["properties"][field] = narrowed
    return schemas


def _paths() -> dict[str, Any]:
    return {
        "/v1/chat/completions": {"post": _generation("Answer a conversation.", ChatRequest, Chat)},
        "/v1/completions": {"post": _generation("Continue a text.", CompletionRequest, Completion)},
        "/v1/models": {"get": _read("Models that a worker serves or has served.", ModelList)},
        "/v1/models/{name}": {
            "get": {
                **_read("One model, by name or identity.", Model),
                "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
            }
        },
        "/health": {
            "get": {
                "description": "starting, healthy, draining or stalled, with the lanes.",
                "responses": {"200": _json("Ready to serve", Health), "503": _json("Not ready", Health)},
            }
        },
        "/metrics": {
            "get": {
                "description": "Counters and gauges.",
                "responses": {"200": {"description": "Prometheus' text format", "content": {"text/plain": {}}}},
            }
        },
    }


def _generation(text: str, asked: type, answered: type) -> dict[str, Any]:
    streamed = {"description": "with stream: server-sent events, the last one [DONE]"}
    whole = _json("The answer", answered)
    whole["content"]["text/event-stream"] = {"schema": streamed}
    whole["headers"] = {
        "x-request-id": {"schema": {"type": "string"}},
        "x-mtplx-max-tokens": {"schema": {"type": "integer"}, "description": "what max_tokens was lowered to"},
    }
    return {
        "description": text,
        "parameters": [_TIMEOUT, _IDEMPOTENCY],
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(asked)}}},
        "responses": {"200": whole, **_errors(400, 401, 403, 404, 409, 413, 415, 429, 500, 503, 504)},
    }


def _read(text: str, answered: type) -> dict[str, Any]:
    return {"description": text, "responses": {"200": _json("Found", answered), **_errors(401, 403, 404, 503)}}


_ERROR_WORDS = {
    400: "The body is wrong; `param` names the field",
    401: "No key, or an unknown one",
    403: "A page of another origin, or a host name that is not this machine's",
    404: "No such model, file or batch",
    409: "The idempotency key is that of another body, or the batch has ended",
    413: "The body is too large",
    415: "The body is not declared as JSON, or its encoding is not undone here",
    429: "A limit of this API key is reached",
    500: "The engine failed",
    503: "Not now; see Retry-After",
    504: "The deadline passed before the first token",
}


def _errors(*statuses: int) -> dict[str, Any]:
    return {str(status): _json(_ERROR_WORDS[status], ErrorBody) for status in statuses}


def _json(text: str, answered: type) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": _ref(answered)}}}


def _ref(struct: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{struct.__name__}"}
