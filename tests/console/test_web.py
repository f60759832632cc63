"""HTTP of the commands where proxies are set: past them to this machine, through them elsewhere. Runs on no engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from console.commands.batch import Server, ServerError
from console.commands.up import read_health
from console.web import is_this_machine, open_url

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
DEAD = "http://127.0.0.1:9"


class Echo(BaseHTTPRequestHandler):
    """Answers with the target it was asked for, as a healthy server's status and as an object's id."""

    def do_GET(self) -> None:
        body = b'{"status": "healthy", "id": "%s"}' % self.path.encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def dead_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variable that names a proxy names one that is not there."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in VARIABLES:
        monkeypatch.setenv(name, DEAD)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "0.0.0.0"])
def test_commands_reach_this_machine_past_proxies(port: int, host: str) -> None:
    url = f"http://{host}:{port}"

    assert read_health(url) == "healthy"
    assert Server(url).call("GET", "/v1/batches/b")["id"] == "/v1/batches/b"


def test_commands_ask_the_proxy_for_other_machines(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, f"http://127.0.0.1:{port}")

    with open_url("http://studio.example/health", timeout_s=5) as reply:
        assert b'"id": "http://studio.example/health"' in reply.read()


def test_proxy_that_is_not_there_is_told_of_other_machines() -> None:
    with pytest.raises(ServerError, match=r"http://studio\.example cannot be reached"):
        Server("http://studio.example").call("GET", "/v1/batches")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost.", True), ("api.localhost", True)]
    + [
        ("192.0.2.1", False),
        ("2001:db8::1", False),
        ("studio.example", False),
        ("", False),
        ("localhost.example", False),
    ],
)
def test_this_machine_is_known_by_its_names_and_addresses(host: str, expected: bool) -> None:
    assert is_this_machine(host) is expected
