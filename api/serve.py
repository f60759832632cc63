"""Runs the application under uvicorn until it is told to stop; then lets open streams end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterator

import uvicorn
from litestar import Litestar

from api.app import create_app
from api.config import ApiConfig
from api.http.descriptors import allow_many_connections
from api.http.protocol import bounded_protocol
from api.http.services import Services
from broker.connection.entrance import enter

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that they close them and not we under their next request."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: it re-raises what it caught, and so ends in a signal, not in order."""

    def __init__(
        self, config: uvicorn.Config, app: Litestar, on_ready: Callable[[str], None], *, notice_s: float
    ) -> None:
        super().__init__(config)
        self._app = app
        self._on_ready = on_ready
        self._notice_s = notice_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup()
        if self.started:
            self._on_ready(self._address())

    def stop(self) -> None:
        """Tell balancers, stop accepting, let streams end. Called twice: stop accepting at once."""
        services: Services = self._app.state.services
        if services.is_draining or not self._notice_s:
            self._refuse()
        else:
            asyncio.get_running_loop().call_later(self._notice_s, self._refuse)
        services.is_draining = True

    def _refuse(self) -> None:
        self.should_exit = True

    def _address(self) -> str:
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def run_api(config: ApiConfig, *, on_ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT; `on_ready` gets the URL once connections are taken.

    Raises:
        ApiConfigError: the configuration cannot be served.
        BrokerConfigError: see `broker.connection.entrance.enter`.
    """
    app = create_app(config)
    allow_many_connections()
    if not await enter(config.redis_url, who="the API"):
        return
    server = _Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            http=bounded_protocol(config.receive_timeout_s),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="on",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(config.drain_s)),
        ),
        app,
        on_ready or (lambda url: logger.info("serving at %s", url)),
        notice_s=config.drain_notice_s,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    try:
        await server.serve()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
