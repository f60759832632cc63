"""Batches in the metrics, in `mtplx status` and on the page. Engine: scripted, in a process of its own."""

from __future__ import annotations

import json
import subprocess

import httpx
from openai import OpenAI

from console.supervisor import mtplx_command
from harness.stack import Stack, clean_environment
from tests.offline.batch_files import jsonl, line, submit, wait_for


def test_running_batch_is_counted_apart_and_shown_with_its_progress(openai: OpenAI, offline_stack: Stack) -> None:
    lines = [line(f"view-{i}", max_tokens=20) for i in range(40)] + [line(f"l-{i}", max_tokens=2000) for i in range(60)]
    batch = submit(openai, jsonl(lines))
    wait_for(openai, batch, lambda each: each.request_counts is not None and each.request_counts.completed >= 10)

    metrics = httpx.get(f"{offline_stack.url}/metrics").text
    said = subprocess.run(
        [*mtplx_command("status"), "--json", "--redis", offline_stack.redis_url],
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=60,
    )
    openai.batches.cancel(batch.id)
    wait_for(openai, batch)

    assert 'mtplx_batches{status="in_progress"} 1.0' in metrics
    assert 'mtplx_queue_requests{priority="interactive"} 0.0' in metrics
    [view] = json.loads(said.stdout)["batches"]
    assert (view["id"], view["status"], view["total"]) == (batch.id, "in_progress", 100)
    assert view["completed"] >= 10


def test_page_has_a_script_for_batches(offline_stack: Stack) -> None:
    page = httpx.get(offline_stack.url).text
    script = httpx.get(f"{offline_stack.url}/static/batches.js")

    assert 'id="batches"' in page
    assert script.headers["content-type"].startswith("text/javascript")
    assert "/v1/batches" in script.text
