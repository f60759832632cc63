"""Files and batches with the official client, end to end. Engine: scripted, in a process of its own."""

from __future__ import annotations

import pytest
from openai import BadRequestError, ConflictError, NotFoundError, OpenAI

from harness.scripted import ask
from tests.offline.batch_files import jsonl, line, read, submit, wait_for
from tests.offline.test_text_client import text_of


def test_batch_answers_every_line_of_its_file(openai: OpenAI) -> None:
    batch = wait_for(openai, submit(openai, jsonl([line(f"call-{i}") for i in range(20)]), metadata={"for": "tests"}))

    answers = {each["custom_id"]: each for each in read(openai, batch.output_file_id)}

    assert batch.status == "completed"
    assert {name: each["response"]["body"]["choices"][0]["text"] for name, each in answers.items()} == {
        f"call-{i}": text_of(ask(f"call-{i}", 8).expected) for i in range(20)
    }
    assert all(each["response"]["status_code"] == 200 and each["error"] is None for each in answers.values())
    assert batch.error_file_id is None


def test_batch_object_says_everything_truly(openai: OpenAI) -> None:
    created = submit(openai, jsonl([line("a"), line("b")]), metadata={"for": "tests"})
    batch = wait_for(openai, created)

    assert created.status in ("validating", "in_progress", "finalizing", "completed")
    assert (batch.object, batch.endpoint, batch.completion_window) == ("batch", "/v1/completions", "24h")
    assert batch.metadata == {"for": "tests"}
    assert batch.model == "scripted"
    assert batch.input_file_id == created.input_file_id
    assert batch.expires_at == batch.created_at + 24 * 3600
    assert batch.created_at <= (batch.in_progress_at or 0) <= (batch.finalizing_at or 0) <= (batch.completed_at or 0)
    assert (batch.failed_at, batch.expired_at, batch.cancelling_at, batch.cancelled_at) == (None, None, None, None)
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (2, 2, 0)
    assert batch.usage is not None
    assert (batch.usage.input_tokens, batch.usage.output_tokens, batch.usage.total_tokens) == (2, 16, 18)
    assert batch.errors is None


def test_chat_lines_are_answered_as_chats(openai: OpenAI) -> None:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
    call = {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": body}

    batch = wait_for(openai, submit(openai, jsonl([call]), endpoint="/v1/chat/completions"))

    [answer] = read(openai, batch.output_file_id)
    assert answer["response"]["body"]["object"] == "chat.completion"
    assert len(answer["response"]["body"]["choices"][0]["message"]["content"]) == 5


def test_line_that_is_refused_goes_to_the_error_file_and_the_rest_completes(openai: OpenAI) -> None:
    lines = [line("good-1"), line("bad", temperature=9), line("streams", stream=True), line("good-2")]

    batch = wait_for(openai, submit(openai, jsonl(lines)))

    errors = {each["custom_id"]: each for each in read(openai, batch.error_file_id)}
    assert batch.status == "completed"
    assert {each["custom_id"] for each in read(openai, batch.output_file_id)} == {"good-1", "good-2"}
    assert set(errors) == {"bad", "streams"}
    assert errors["bad"]["response"]["status_code"] == 400
    assert errors["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 2)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (jsonl([line("a")]) + b'{"custom_id": \n', (2, "invalid_json_line")),
        (jsonl([line("a"), line("b"), line("a")]), (3, "duplicate_custom_id")),
        (jsonl([line("a")]) + b"\n" + jsonl([line("b") | {"url": "/v1/embeddings"}]), (3, "mismatched_endpoint")),
        (jsonl([line("a") | {"method": "GET"}]), (1, "invalid_method")),
        (jsonl([line("a") | {"body": {"prompt": "no model"}}]), (1, "invalid_request")),
        (jsonl([line("a") | {"more": 1}]), (1, "invalid_request")),
        (jsonl([line("a"), line("b", model="nobody")]), (2, "model_not_found")),
        (b"\n \n", (None, "empty_file")),
    ],
    ids=["malformed", "duplicate", "url", "method", "no-model", "unknown-field", "unknown-model", "empty"],
)
def test_file_that_is_wrong_fails_validation_with_its_line(
    openai: OpenAI, data: bytes, expected: tuple[int | None, str]
) -> None:
    batch = wait_for(openai, submit(openai, data))

    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert (batch.errors.data[0].line, batch.errors.data[0].code) == expected
    assert batch.output_file_id is None


def test_batch_cancelled_half_way_has_each_line_in_one_of_its_files(openai: OpenAI) -> None:
    lines = [line(f"quick-{i}") for i in range(20)] + [line(f"slow-{i}", max_tokens=2000) for i in range(160)]
    batch = submit(openai, jsonl(lines))
    wait_for(openai, batch, lambda each: each.request_counts is not None and each.request_counts.completed >= 20)

    asked = openai.batches.cancel(batch.id)
    ended = wait_for(openai, batch)

    assert asked.status in ("cancelling", "cancelled")
    assert ended.status == "cancelled"
    answers, errors = read(openai, ended.output_file_id), read(openai, ended.error_file_id)
    assert 20 <= len(answers) < len(lines)
    assert sorted(each["custom_id"] for each in answers + errors) == sorted(each["custom_id"] for each in lines)
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
    assert ended.request_counts is not None
    assert (ended.request_counts.completed, ended.request_counts.failed) == (len(answers), len(errors))


def test_batch_whose_window_closes_expires_with_an_error_for_every_line_left(openai: OpenAI) -> None:
    lines = [line(f"quick-{i}") for i in range(8)] + [line(f"slow-{i}", max_tokens=2000) for i in range(100)]

    batch = wait_for(openai, submit(openai, jsonl(lines), completion_window="4s"))

    answers, errors = read(openai, batch.output_file_id), read(openai, batch.error_file_id)
    assert batch.status == "expired"
    assert batch.expired_at is not None
    assert {each["custom_id"] for each in answers + errors} == {each["custom_id"] for each in lines}
    assert len(answers) + len(errors) == len(lines)
    assert {each["error"]["code"] for each in errors} == {"batch_expired"}
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (len(answers), len(errors))


def test_finished_batch_cannot_be_cancelled(openai: OpenAI) -> None:
    batch = wait_for(openai, submit(openai, jsonl([line("a")])))

    with pytest.raises(ConflictError):
        openai.batches.cancel(batch.id)


def test_batches_are_listed_newest_first_page_by_page(openai: OpenAI) -> None:
    made = [submit(openai, jsonl([line(f"page-{i}")])) for i in range(3)]

    first = openai.batches.list(limit=2)
    ids = [batch.id for batch in openai.batches.list(limit=2)]

    assert first.has_more
    assert [batch.id for batch in first.data] == [made[2].id, made[1].id]
    assert ids[:3] == [batch.id for batch in reversed(made)]


def test_batch_of_an_unknown_file_is_refused(openai: OpenAI) -> None:
    with pytest.raises(NotFoundError, match="file-nothing"):
        openai.batches.create(input_file_id="file-nothing", endpoint="/v1/completions", completion_window="24h")


def test_batch_for_another_endpoint_is_refused(openai: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="endpoint"):
        submit(openai, jsonl([line("a")]), endpoint="/v1/embeddings")


def test_unknown_batch_is_not_found(openai: OpenAI) -> None:
    with pytest.raises(NotFoundError):
        openai.batches.retrieve("batch-nothing")
