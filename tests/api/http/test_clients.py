"""Other people's clients, unchanged, against a real server. Engine: none (the queue is a fake)."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from tests.api.fake import NAME, FakeBackend, Script

pytestmark = pytest.mark.asyncio(loop_scope="session")


def langchain(url: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{url}/v1", api_key=SecretStr("none"), model=NAME, max_retries=0, **options)


async def test_langchain_chats(url: str, backend: FakeBackend) -> None:
    answer = await langchain(url, temperature=0.5).ainvoke("Hello")

    assert answer.content == "Hello, world!"
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0
    assert backend.requests[0].sampling.temperature == 0.5


async def test_langchain_streams_with_usage(url: str, backend: FakeBackend) -> None:
    chunks = [chunk async for chunk in langchain(url, stream_usage=True).astream([("system", "Be"), ("user", "Hi")])]

    assert "".join(str(chunk.content) for chunk in chunks) == "Hello, world!"
    assert any(chunk.usage_metadata for chunk in chunks)


async def test_langchain_stops_at_a_stop_string(url: str, backend: FakeBackend) -> None:
    backend.script = lambda _: Script(text="one, two, three")

    answer = await langchain(url).ainvoke("Count", stop=[", t"])

    assert answer.content == "one"
