"""Input files of batches, and what comes out of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from openai import OpenAI
from openai.types import Batch

from workers.scripted_lane import NAME

POLL_S = 0.1
OVER = {"failed", "completed", "expired", "cancelled"}


def line(custom_id: str, prompt: str = "", **fields: Any) -> dict[str, Any]:
    """One call for a text to go on with."""
    body = {"model": NAME, "prompt": prompt or custom_id, "max_tokens": 8} | fields
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def jsonl(lines: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def submit(openai: OpenAI, data: bytes, **fields: Any) -> Batch:
    """Upload a file and have it run."""
    file = openai.files.create(file=("in.jsonl", data), purpose="batch")
    options: dict[str, Any] = {"endpoint": "/v1/completions", "completion_window": "24h"} | fields
    return openai.batches.create(input_file_id=file.id, **options)


def wait_for(
    openai: OpenAI, batch: Batch, is_there: Callable[[Batch], bool] | None = None, *, timeout_s: float = 180.0
) -> Batch:
    """The batch once it is over, or as far as asked."""
    end_s = time.monotonic() + timeout_s
    while True:
        found = openai.batches.retrieve(batch.id)
        if is_there(found) if is_there is not None else found.status in OVER:
            return found
        assert time.monotonic() < end_s, f"not in {timeout_s} s: {found.to_json()}"
        time.sleep(POLL_S)


def read(openai: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of an output or error file; none when there is no such file."""
    if file_id is None:
        return []
    return [json.loads(text) for text in openai.files.content(file_id).text.splitlines()]
