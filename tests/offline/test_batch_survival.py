"""A batch whose runner is killed, and whose Redis goes away: every line once. Engine: scripted, in processes."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter

from openai import OpenAI
from openai.types import Batch
from rq import worker_registration

from api.batch.queue import QUEUE
from broker import keys
from broker.batches import NO_BATCH_WORKER
from console.commands.batch import describe
from console.commands.doctor import judge_daemons
from console.overview import take_overview
from harness.scripted import ask
from harness.stack import Stack, answers, connection, wait_until
from harness.wait import PATIENCE_S
from tests.offline.batch_files import jsonl, line, read, submit, wait_for
from tests.offline.conftest import WORKER
from tests.offline.test_text_client import text_of

LINES = 800


def stack_of_its_own(*, lease_s: str = "2", step_s: str = "0") -> Stack:
    stack = Stack(workers=1, batchers=1)
    stack.arguments["worker"] = ("--engine", "scripted", "--decode-batch-max", "32", "--script-step-s", step_s)
    stack.arguments["batcher"] = ("--batch-lease-s", lease_s)
    return stack


def completed(batch: Batch) -> int:
    return 0 if batch.request_counts is None else batch.request_counts.completed


def ended_requests(stack: Stack) -> int:
    """Offline requests that ended since the stack began, by the queue's own count."""
    with connection(stack.redis_url) as redis:
        counts = redis.hgetall(keys.ENDED)
    return sum(int(count) for name, count in counts.items() if name.startswith(b"offline:"))


def test_every_line_is_answered_once_though_its_runner_is_killed_three_times_and_redis_once() -> None:
    with (
        stack_of_its_own() as stack,
        OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=8) as openai,
    ):
        batch = submit(openai, jsonl([line(f"line-{i}", max_tokens=4 + i % 8) for i in range(LINES)]))
        for share in (0.15, 0.35, 0.55):
            wait_for(openai, batch, lambda each, share=share: completed(each) >= share * LINES)  # type: ignore[misc]
            stack.kill("batcher-0")
            stack.start_one("batcher-0")
        wait_for(openai, batch, lambda each: completed(each) >= 0.7 * LINES)
        stack.kill("redis")
        stack.start_one("redis")
        wait_until(lambda: answers(stack.redis_url), "redis answers")

        ended = wait_for(openai, batch)

        found, errors = read(openai, ended.output_file_id), read(openai, ended.error_file_id)
        texts = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in found}
        assert (ended.status, errors) == ("completed", [])
        assert max(Counter(each["custom_id"] for each in found).values()) == 1
        assert texts == {f"line-{i}": text_of(ask(f"line-{i}", 4 + i % 8).expected) for i in range(LINES)}
        assert ended.request_counts is not None
        assert (ended.request_counts.total, ended.request_counts.completed) == (LINES, LINES)
        assert ended.request_counts.failed == 0
        assert ended_requests(stack) == LINES, "a line ran twice"


def test_runner_that_was_stopped_past_its_lease_writes_nothing_twice() -> None:
    with (
        stack_of_its_own() as stack,
        OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=8) as openai,
    ):
        batch = submit(openai, jsonl([line(f"line-{i}", max_tokens=20) for i in range(500)]))
        wait_for(openai, batch, lambda each: completed(each) >= 75)
        stack.signal("batcher-0", signal.SIGSTOP)
        stack.start_one("batcher-1")
        wait_for(openai, batch, lambda each: completed(each) >= 200 or each.status == "completed")
        stack.signal("batcher-0", signal.SIGCONT)

        ended = wait_for(openai, batch)

        names = [each["custom_id"] for each in read(openai, ended.output_file_id)]
        assert sorted(names) == sorted(f"line-{i}" for i in range(500))
        assert ended_requests(stack) == 500, "a line ran twice"


def test_batch_worker_told_to_stop_leaves_its_batch_to_the_next() -> None:
    with (
        stack_of_its_own() as stack,
        OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=8) as openai,
    ):
        batch = submit(openai, jsonl([line(f"line-{i}", max_tokens=20) for i in range(500)]))
        wait_for(openai, batch, lambda each: completed(each) >= 50)

        stack.signal("batcher-0", signal.SIGTERM)
        status = stack.processes["batcher-0"].wait(PATIENCE_S)
        stack.start_one("batcher-1")

        ended = wait_for(openai, batch)
        assert status == 0
        assert completed(ended) == 500
        assert ended_requests(stack) == 500, "a line ran twice"


def test_batch_for_a_model_without_a_worker_waits_and_says_so() -> None:
    stack = stack_of_its_own()
    stack.arguments["worker"] = WORKER
    stack.arguments["api"] = ("--lane-grace-s", "0")
    with stack, OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=8) as openai:
        stack.signal("worker-0", signal.SIGTERM)
        stack.processes["worker-0"].wait(PATIENCE_S)

        batch = submit(openai, jsonl([line("patient")]))
        waiting = wait_for(openai, batch, lambda each: bool((each.model_extra or {}).get("waits_for")))
        stack.start_one("worker-0")
        ended = wait_for(openai, batch)

        assert waiting.status == "in_progress"
        assert "scripted" in str((waiting.model_extra or {})["waits_for"])
        assert completed(ended) == 1
        assert not (ended.model_extra or {})["waits_for"]


def test_keys_left_by_batches_expire_or_are_permanent(offline_stack: Stack, openai: OpenAI) -> None:
    wait_for(openai, submit(openai, jsonl([line("a key")])))
    with connection(offline_stack.redis_url) as redis:
        left = [key.decode() for key in redis.scan_iter() if redis.ttl(key) < 0]

    assert [key for key in left if not keys.is_permanent(key)] == []


def test_batch_whose_lines_all_end_before_its_runner_hears_that_the_window_closed_is_expired() -> None:
    with (
        stack_of_its_own(lease_s="60", step_s="0.01") as stack,
        OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=8) as openai,
    ):
        lines = [line(f"slow-{i}", max_tokens=2000) for i in range(20)]

        ended = wait_for(openai, submit(openai, jsonl(lines), completion_window="2s"))

        errors = read(openai, ended.error_file_id)
        assert (ended.status, ended.output_file_id) == ("expired", None)
        assert {each["custom_id"] for each in errors} == {each["custom_id"] for each in lines}
        assert {each["error"]["code"] for each in errors} == {"batch_expired"}


def test_batch_that_no_batch_worker_runs_says_so_everywhere() -> None:
    with (
        Stack(workers=0, batchers=0) as stack,
        OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=8) as openai,
    ):
        batch = submit(openai, jsonl([line("alone")]))

        (listed,) = openai.batches.list().data
        overview = asyncio.run(take_overview(stack.redis_url))
        findings = {each.about: each for each in judge_daemons(overview)}
        assert (batch.model_extra or {})["waits_for"] == (listed.model_extra or {})["waits_for"] == NO_BATCH_WORKER
        assert [each.waits_for for each in overview.batches] == [NO_BATCH_WORKER]
        assert findings["batch worker"].level == "problem"
        assert NO_BATCH_WORKER in describe(batch.model_dump())


def test_batch_worker_that_rq_has_lost_registers_again_at_its_next_beat(offline_stack: Stack) -> None:
    with connection(offline_stack.redis_url) as redis:
        wait_until(lambda: redis.smembers(keys.BATCH_WORKERS) != set(), "it is registered")
        (name,) = redis.smembers(keys.BATCH_WORKERS)
        redis.delete(keys.BATCH_WORKERS, "rq:workers", name)

        wait_until(lambda: redis.smembers(keys.BATCH_WORKERS) == {name}, "it is back", timeout_s=60)

        wait_until(lambda: redis.hget(name, "birth") is not None, "its record is whole", timeout_s=60)
        assert name in redis.smembers("rq:workers")
        assert redis.ttl(name) > 0


def test_set_of_batch_workers_is_the_one_that_rq_keeps() -> None:
    assert worker_registration.WORKERS_BY_QUEUE_KEY % QUEUE == keys.BATCH_WORKERS
