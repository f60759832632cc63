"""A real HTTP server in the test's own event loop, over the fake queue."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache

import httpx
import pytest
import pytest_asyncio
import uvicorn
from openai import AsyncOpenAI

from api.app import create_app
from api.config import ApiConfig
from api.fleet.backend import Backend, Fleet
from api.http.protocol import bounded_protocol
from broker.scripts import Idempotency, Quota
from broker.wire import Request, Ticket
from harness.wait import PATIENCE_S
from tests.api.fake import FakeBackend, FakeHandle, beating


@asynccontextmanager
async def serving(backend: Backend, config: ApiConfig | None = None) -> AsyncIterator[str]:
    """A server for one test; yields its URL."""

    async def open_backend(_: ApiConfig) -> Backend:
        return backend

    config = config or api_config()
    server_config = uvicorn.Config(
        create_app(config, open_backend=open_backend),
        host="127.0.0.1",
        port=0,
        http=bounded_protocol(config.receive_timeout_s),
        ws="none",
        log_config=None,
        lifespan="on",
        timeout_graceful_shutdown=1,
    )
    # Started and stopped by hand: its own main loop ticks ten times a second, which every test would wait for.
    server = uvicorn.Server(server_config)
    server_config.load()
    server.lifespan = server_config.lifespan_class(server_config)
    await server.startup()
    assert server.started
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        await server.shutdown()


def api_config(**changes: object) -> ApiConfig:
    values: dict[str, object] = {"redis_url": "redis://unused", "registry_age_s": 0.0, **changes}
    return ApiConfig(**values)  # type: ignore[arg-type]  # a test names the fields it changes


_LIMITS = httpx.Limits()


class _Stage:
    """Stands before the fake queue of the running test, so that all tests share one server."""

    def __init__(self) -> None:
        self.current = FakeBackend()

    @property
    def is_connected(self) -> bool:
        return self.current.is_connected

    async def submit(
        self,
        request: Request,
        ticket: Ticket,
        *,
        seed: int | None,
        timeout_ms: int,
        retain_ms: int,
        quota: Quota,
        idempotency: Idempotency | None = None,
    ) -> FakeHandle:
        return await self.current.submit(
            request,
            ticket,
            seed=seed,
            timeout_ms=timeout_ms,
            retain_ms=retain_ms,
            quota=quota,
            idempotency=idempotency,
        )

    def while_answering(self) -> AbstractAsyncContextManager[None]:
        return self.current.while_answering()

    async def keep(self, request_id: str, for_ms: int) -> None:
        await self.current.keep(request_id, for_ms)

    async def cancel_unwanted(self, request_id: str) -> None:
        await self.current.cancel_unwanted(request_id)

    async def fleet(self) -> Fleet:
        return beating(await self.current.fleet())

    async def tokenizer_files(self, digest: str) -> dict[str, bytes]:
        return await self.current.tokenizer_files(digest)

    async def close(self) -> None:
        await self.current.close()


@pytest.fixture(scope="session")
def stage() -> _Stage:
    return _Stage()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def url(stage: _Stage) -> AsyncIterator[str]:
    async with serving(stage) as address:
        yield address


@pytest.fixture
def backend(stage: _Stage) -> FakeBackend:
    stage.current = FakeBackend()
    return stage.current


@pytest_asyncio.fixture(loop_scope="session")
async def http(url: str, backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(url) as client:
        yield client


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_openai(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with openai_client(url) as client:
        yield client


@pytest.fixture
def openai(shared_openai: AsyncOpenAI, backend: FakeBackend) -> AsyncOpenAI:
    return shared_openai


def http_client(url: str, *, limits: httpx.Limits = _LIMITS) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, verify=no_tls(), limits=limits)


def openai_client(url: str, *, api_key: str = "none") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=PATIENCE_S)


@cache
def no_tls() -> ssl.SSLContext:
    """Reading the system's certificates takes httpx longer than a whole test."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


async def wait_until(condition: Callable[[], bool], *, timeout_s: float = PATIENCE_S) -> None:
    """Wait for something another task does."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
