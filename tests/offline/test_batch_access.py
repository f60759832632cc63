"""Files and batches of one API key are nobody else's. Engine: scripted, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import AuthenticationError, NotFoundError, OpenAI

from api.auth import hash_key
from harness.stack import Stack
from tests.offline.batch_files import jsonl, line, submit, wait_for


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack that knows two keys."""
    path: Path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text("".join(f'[keys.{name}]\nhash = "{hash_key(name)}"\n' for name in ("alice", "bob")))
    stack = Stack(workers=1, batchers=1)
    stack.arguments["worker"] = ("--engine", "scripted")
    stack.arguments["api"] = ("--keys-file", str(path))
    stack.api_key = "alice"
    with stack:
        yield stack


def client(stack: Stack, key: str) -> OpenAI:
    return OpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0)


def test_batch_of_one_key_is_not_there_for_another(guarded: Stack) -> None:
    with client(guarded, "alice") as alice, client(guarded, "bob") as bob:
        batch = wait_for(alice, submit(alice, jsonl([line("mine")])))

        assert batch.status == "completed"
        with pytest.raises(NotFoundError):
            bob.batches.retrieve(batch.id)
        with pytest.raises(NotFoundError):
            bob.batches.cancel(batch.id)
        for file_id in (batch.input_file_id, batch.output_file_id or ""):
            with pytest.raises(NotFoundError):
                bob.files.content(file_id)
            with pytest.raises(NotFoundError):
                bob.files.delete(file_id)
        with pytest.raises(NotFoundError):
            bob.batches.create(input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h")
        assert (list(bob.batches.list()), list(bob.files.list())) == ([], [])
        assert [each.id for each in alice.batches.list()] == [batch.id]


def test_nobody_gets_in_without_a_key(guarded: Stack) -> None:
    with client(guarded, "mallory") as mallory:
        with pytest.raises(AuthenticationError):
            mallory.files.create(file=("a", b"x"), purpose="batch")
        with pytest.raises(AuthenticationError):
            mallory.batches.list()
