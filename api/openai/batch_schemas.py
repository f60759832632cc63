"""The bodies of the Files and Batches routes, as OpenAI has them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from broker.batches import BatchRecord, BatchStatus, FileRecord

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
MetadataName = Annotated[str, Meta(max_length=64)]
MetadataText = Annotated[str, Meta(max_length=512)]


class Expiry(Struct, frozen=True, forbid_unknown_fields=True):
    """How long after its creation a file expires."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=2_592_000)]


class BatchRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/batches."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,5}[smhd]$")]
    """`24h`, as with OpenAI, or any other time up to seven days."""
    metadata: Annotated[dict[MetadataName, MetadataText], Meta(max_length=16)] | None = None
    output_expires_after: Expiry | None = None


class File(Struct, frozen=True, kw_only=True):
    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileList(Struct, frozen=True, kw_only=True):
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class FileDeleted(Struct, frozen=True):
    id: str
    deleted: Literal[True] = True
    object: Literal["file"] = "file"


class BatchError(Struct, frozen=True):
    """What is wrong with an input file, and where."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Struct, frozen=True):
    data: list[BatchError]
    object: Literal["list"] = "list"


class RequestCounts(Struct, frozen=True):
    total: int
    completed: int
    failed: int


class InputDetails(Struct, frozen=True):
    cached_tokens: int = 0


class OutputDetails(Struct, frozen=True):
    reasoning_tokens: int = 0


class BatchUsage(Struct, frozen=True, kw_only=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails = InputDetails()
    output_tokens_details: OutputDetails = OutputDetails()


class Batch(Struct, frozen=True, kw_only=True):
    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: BatchStatus
    created_at: int
    expires_at: int
    model: str | None
    errors: BatchErrors | None
    output_file_id: str | None
    error_file_id: str | None
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None
    waits_for: str | None
    """Beyond OpenAI's: what keeps the batch from going on, such as a model nobody serves."""
    object: Literal["batch"] = "batch"


class BatchList(Struct, frozen=True, kw_only=True):
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


_errors = msgspec.json.Decoder(list[BatchError])
_metadata = msgspec.json.Decoder(dict[str, str] | None)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def window_s(completion_window: str) -> int:
    """Seconds of a completion window such as `24h`."""
    return int(completion_window[:-1]) * _UNITS[completion_window[-1]]


def file_object(record: FileRecord) -> File:
    return File(
        id=record.id,
        bytes=record.bytes,
        created_at=record.created_s,
        expires_at=record.expires_s,
        filename=record.filename,
        purpose=record.purpose,
    )


def batch_object(record: BatchRecord) -> Batch:
    errors = _errors.decode(record.errors)
    shared = {name: getattr(record, name) for name in Batch.__struct_fields__ if name in _SAME}
    return Batch(
        **shared,
        errors=BatchErrors(errors) if errors else None,
        request_counts=RequestCounts(record.total, record.completed, record.failed),
        usage=BatchUsage(
            input_tokens=record.input_tokens,
            output_tokens=record.output_tokens,
            total_tokens=record.input_tokens + record.output_tokens,
        ),
        metadata=_metadata.decode(record.metadata),
        waits_for=record.waits_for or None,
    )


_SAME = set(BatchRecord.__struct_fields__) - {"errors", "metadata", "waits_for"}
"""Fields of a record that the object shows as they are."""
