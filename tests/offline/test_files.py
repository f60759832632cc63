"""Files with the official client: up, down, listed, gone; and what is refused. Engine: scripted, doing nothing."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from harness.stack import Stack

DATA = b'{"custom_id": "a"}\n' * 1000


def test_file_comes_back_as_it_was_sent(openai: OpenAI) -> None:
    file = openai.files.create(file=("calls.jsonl", DATA), purpose="batch")

    assert openai.files.content(file.id).content == DATA


def test_file_object_says_everything_truly(openai: OpenAI) -> None:
    file = openai.files.create(file=("../dir/calls.jsonl", DATA), purpose="batch")

    assert (file.object, file.bytes, file.filename, file.purpose) == ("file", len(DATA), "calls.jsonl", "batch")
    assert file.status == "processed"
    assert file.expires_at == file.created_at + 30 * 24 * 3600
    assert openai.files.retrieve(file.id) == file


def test_file_expires_when_the_client_says(openai: OpenAI) -> None:
    expiry = {"anchor": "created_at", "seconds": 7200}
    file = openai.files.create(file=("a", DATA), purpose="batch", expires_after=expiry)  # type: ignore[arg-type]

    assert file.expires_at == file.created_at + 7200


def test_files_are_listed_page_by_page_in_either_order(openai: OpenAI) -> None:
    made = [openai.files.create(file=(f"{i}", DATA), purpose="batch").id for i in range(3)]

    newest_first = [file.id for file in openai.files.list(limit=2)]
    oldest_first = [file.id for file in openai.files.list(limit=2, order="asc")]

    assert newest_first[:3] == made[::-1]
    assert oldest_first == newest_first[::-1]
    assert list(openai.files.list(purpose="batch_output", after=made[0])) is not None


def test_deleted_file_is_gone(openai: OpenAI) -> None:
    file = openai.files.create(file=("a", DATA), purpose="batch")

    deleted = openai.files.delete(file.id)

    assert deleted.deleted
    with pytest.raises(NotFoundError):
        openai.files.retrieve(file.id)
    with pytest.raises(NotFoundError):
        openai.files.content(file.id)
    assert file.id not in [each.id for each in openai.files.list()]


def test_file_for_another_purpose_is_refused(openai: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="purpose"):
        openai.files.create(file=("a", DATA), purpose="fine-tune")


@pytest.mark.parametrize(
    ("files", "data", "status"),
    [
        ({"file": ("a", b"x")}, {"purpose": "batch", "more": "1"}, 400),
        ({"other": ("a", b"x")}, {"purpose": "batch"}, 400),
        ({"file": ("a", b"x")}, {"purpose": "batch", "expires_after[seconds]": "7200"}, 400),
        ({"file": ("a", b"x")}, {"purpose": "x" * 5000}, 400),
        ({"file": ("a", b"x")}, {}, 400),
        (None, {"purpose": "batch"}, 415),
    ],
    ids=["unknown-field", "no-file", "no-anchor", "long-field", "no-purpose", "not-multipart"],
)
def test_bad_upload_is_refused_in_openais_shape(
    offline_stack: Stack, files: dict[str, tuple[str, bytes]] | None, data: dict[str, str], status: int
) -> None:
    answer = httpx.post(f"{offline_stack.url}/v1/files", files=files, data=data)

    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"", b"--x\r\nnonsense", b"--y--\r\n"], ids=["empty", "cut", "other-boundary"])
def test_broken_multipart_body_is_refused(offline_stack: Stack, body: bytes) -> None:
    headers = {"content-type": "multipart/form-data; boundary=x"}

    answer = httpx.post(f"{offline_stack.url}/v1/files", content=body, headers=headers)

    assert answer.status_code == 400


@pytest.mark.parametrize("headers", [{"sec-fetch-site": "cross-site"}, {"origin": "http://evil.example"}], ids=str)
def test_page_of_another_site_may_not_upload(offline_stack: Stack, headers: dict[str, str]) -> None:
    answer = httpx.post(
        f"{offline_stack.url}/v1/files", files={"file": ("a", b"x")}, data={"purpose": "batch"}, headers=headers
    )

    assert answer.status_code == 403


def test_page_of_this_server_may_upload(offline_stack: Stack) -> None:
    headers = {"origin": offline_stack.url, "sec-fetch-site": "same-origin"}

    answer = httpx.post(
        f"{offline_stack.url}/v1/files", files={"file": ("a", b"x")}, data={"purpose": "batch"}, headers=headers
    )

    assert answer.status_code == 200


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_upload_with_a_content_encoding_is_stored_decoded(
    offline_stack: Stack, openai: OpenAI, encoding: str, pack: Callable[[bytes], bytes]
) -> None:
    plain = httpx.Request("POST", "http://x", files={"file": ("a", DATA)}, data={"purpose": "batch"})
    headers = {"content-type": plain.headers["content-type"], "content-encoding": encoding}

    answer = httpx.post(f"{offline_stack.url}/v1/files", content=pack(plain.read()), headers=headers)

    assert answer.status_code == 200
    assert openai.files.content(answer.json()["id"]).content == DATA


def test_upload_with_another_content_encoding_is_refused_by_name(offline_stack: Stack) -> None:
    headers = {"content-encoding": "br"}

    answer = httpx.post(
        f"{offline_stack.url}/v1/files", files={"file": ("a", b"x")}, data={"purpose": "batch"}, headers=headers
    )

    assert (answer.status_code, "br" in answer.json()["error"]["message"]) == (415, True)


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/batches"), ("POST", "/v1/batches/batch-x/cancel"), ("DELETE", "/v1/files/file-x")],
)
@pytest.mark.parametrize("declared", [{}, {"content-type": "text/plain"}], ids=["untyped", "text"])
def test_body_that_is_not_declared_as_json_is_415_on_every_route_that_acts(
    offline_stack: Stack, method: str, path: str, declared: dict[str, str]
) -> None:
    answer = httpx.request(method, offline_stack.url + path, content=b"{}", headers=declared)

    assert answer.status_code == 415


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/batches/batch-x/cancel"), ("DELETE", "/v1/files/file-x")])
@pytest.mark.parametrize("declared", [{}, {"content-type": "application/json"}], ids=["untyped", "json"])
def test_route_that_needs_no_body_is_served_without_one(
    offline_stack: Stack, method: str, path: str, declared: dict[str, str]
) -> None:
    answer = httpx.request(method, offline_stack.url + path, headers=declared)

    assert answer.status_code == 404


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "order=up", "after=file-nothing"])
def test_listing_with_a_bad_query_is_refused(offline_stack: Stack, query: str) -> None:
    assert httpx.get(f"{offline_stack.url}/v1/files?{query}").status_code == 400
