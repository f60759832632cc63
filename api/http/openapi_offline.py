"""The description of the Files and Batches routes, made of the structs that read and write their bodies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from api.openai.batch_schemas import Batch, BatchList, BatchRequest, File, FileDeleted, FileList

BODIES = [BatchRequest, Batch, BatchList, File, FileList, FileDeleted]

Answer = Callable[[str, type], dict[str, Any]]
Errors = Callable[..., dict[str, Any]]

_UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "additionalProperties": False,
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"enum": ["batch"]},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
    "dependentRequired": {
        "expires_after[anchor]": ["expires_after[seconds]"],
        "expires_after[seconds]": ["expires_after[anchor]"],
    },
}


def paths(answer: Answer, errors: Errors) -> dict[str, Any]:
    """Paths by name; `answer` and `errors` are the document's own ways to describe replies."""

    def reads(text: str, kind: type, *parameters: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "description": text,
            "parameters": list(parameters),
            "responses": {"200": answer("Found", kind), **errors(400, 401, 404, 503)},
        }

    file_id, batch_id = _in_path("file_id"), _in_path("batch_id")
    content = {"description": "The content", "content": {"application/octet-stream": {}}}
    return {
        "/v1/files": {
            "post": {
                "description": "Upload a file for a batch.",
                "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}},
                "responses": {"200": answer("The file", File), **errors(400, 401, 403, 413, 415, 503)},
            },
            "get": reads(
                "Files by age.", FileList, _limit(10_000), _after(), _query("order", enum=["asc", "desc"]),
                _query("purpose", type="string"),
            ),
        },
        "/v1/files/{file_id}": {
            "get": reads("One file.", File, file_id),
            "delete": reads("Remove a file.", FileDeleted, file_id),
        },
        "/v1/files/{file_id}/content": {
            "get": {
                "description": "What is in it.",
                "parameters": [file_id],
                "responses": {"200": content, **errors(401, 404, 503)},
            }
        },
        "/v1/batches": {
            "post": {
                "description": "Have every line of a file answered.",
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/BatchRequest"}}},
                },
                "responses": {"200": answer("The batch", Batch), **errors(400, 401, 404, 413, 415, 503)},
            },
            "get": reads("Batches, newest first.", BatchList, _limit(100), _after()),
        },
        "/v1/batches/{batch_id}": {"get": reads("One batch.", Batch, batch_id)},
        "/v1/batches/{batch_id}/cancel": {
            "post": {
                "description": "Have it end early; what is finished is delivered.",
                "parameters": [batch_id],
                "responses": {"200": answer("The batch", Batch), **errors(401, 404, 409, 503)},
            }
        },
    }  # fmt: skip


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]+$"}}


def _query(name: str, **schema: Any) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema}


def _limit(most: int) -> dict[str, Any]:
    return _query("limit", type="integer", minimum=1, maximum=most)


def _after() -> dict[str, Any]:
    return _query("after", type="string")
