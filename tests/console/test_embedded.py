"""The embedded broker: its directory, its server under a guard, its runtime file. Real server; runs on no engine."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from api.batch.queue import connect_blocking
from api.batch.worker import BatchWorkerConfig, run_batch_worker
from broker.embedded import server as embedded
from broker.embedded.server import Layout, Runtime
from broker.errors import BrokerConfigError
from harness.stack import wait_until
from harness.wait import PATIENCE_S
from tests.console.processes import are_gone, children_of


@pytest.fixture
def layout() -> Iterator[Layout]:
    # Not tmp_path: its length would move the socket away from the data directory.
    with tempfile.TemporaryDirectory(prefix="mtplx-", dir="/tmp") as folder:
        yield Layout(Path(folder))


class Server:
    """The guarded server of an owned directory."""

    def __init__(self, layout: Layout, *, tcp_port: int = 0, linger_s: float = 0.0) -> None:
        self.layout = layout
        command = embedded.server_command(layout, tcp_port=tcp_port, linger_s=linger_s)
        self.guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        wait_until(lambda: embedded.answers(layout), "the server answers")
        self.client = redis.Redis.from_url(embedded.redis_url(layout), decode_responses=True)

    @property
    def pids(self) -> list[int]:
        return [self.guard.pid, *children_of(self.guard.pid)]

    def close_pipe(self) -> None:
        assert self.guard.stdin is not None
        self.guard.stdin.close()

    def stop(self) -> None:
        self.client.close()
        self.guard.terminate()
        self.guard.wait(PATIENCE_S)
        self.close_pipe()


@pytest.fixture
def server(layout: Layout) -> Iterator[Server]:
    with embedded.owned(layout):
        server = Server(layout)
        yield server
        server.stop()


def test_server_persists_every_write_and_never_evicts(server: Server) -> None:
    wanted = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction", "save": ""}

    assert {name: server.client.config_get(name)[name] for name in wanted} == wanted


def test_server_opens_no_tcp_port_unless_shared(server: Server) -> None:
    assert server.client.config_get("port")["port"] == "0"


def test_server_asks_for_the_password(server: Server) -> None:
    stranger = redis.Redis(unix_socket_path=str(server.layout.socket), retry=Retry(NoBackoff(), 0))

    with pytest.raises(redis.AuthenticationError), stranger:
        stranger.ping()


def test_server_keeps_what_was_written_when_it_is_killed(layout: Layout) -> None:
    with embedded.owned(layout):
        first = Server(layout)
        first.client.set("kept", "yes")
        os.killpg(first.guard.pid, signal.SIGKILL)
        first.stop()

        second = Server(layout)

        assert second.client.get("kept") == "yes"
        second.stop()


def test_server_ends_when_the_pipe_of_its_guard_closes(server: Server) -> None:
    pids = server.pids

    server.close_pipe()

    assert server.guard.wait(PATIENCE_S) == 0
    assert are_gone(pids)
    assert not server.layout.socket.exists()


def test_server_lingers_for_those_who_hand_back_when_the_pipe_of_its_guard_closes(layout: Layout) -> None:
    with embedded.owned(layout):
        server = Server(layout, linger_s=600)

        server.close_pipe()

        assert server.client.ping()
        server.stop()


def test_server_leaves_no_socket_when_it_is_stopped(server: Server) -> None:
    server.stop()

    assert not server.layout.socket.exists()


def test_guard_ends_with_the_status_of_its_server(server: Server) -> None:
    _, valkey = server.pids

    os.kill(valkey, signal.SIGKILL)

    assert server.guard.wait(PATIENCE_S) == 128 + signal.SIGKILL


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="only the Linux kernel tells a child that its parent died")
def test_server_ends_when_its_guard_is_killed(server: Server) -> None:
    guard, valkey = server.pids

    os.kill(guard, signal.SIGKILL)

    wait_until(lambda: are_gone([valkey]), "the server is gone")


def test_owner_is_refused_when_the_directory_is_owned(layout: Layout) -> None:
    with (
        embedded.owned(layout),
        pytest.raises(BrokerConfigError, match="in use by another mtplx up"),
        embedded.owned(layout),
    ):
        pass


def test_owner_is_refused_when_the_directory_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(BrokerConfigError, match="cannot be used"), embedded.owned(Layout(tmp_path / "file")):
        pass


def test_owner_ends_a_server_that_outlived_its_up(layout: Layout) -> None:
    with embedded.owned(layout):
        orphan = Server(layout)

    with embedded.owned(layout):
        assert not embedded.answers(layout)
    assert orphan.guard.wait(PATIENCE_S) == 0
    orphan.stop()


def test_password_stays_the_same_over_restarts(layout: Layout) -> None:
    with embedded.owned(layout):
        first = embedded.redis_url(layout)

    with embedded.owned(layout):
        assert embedded.redis_url(layout) == first


@pytest.mark.parametrize("name", ["password", "broker.conf", "runtime.json"])
def test_files_with_a_secret_are_for_their_owner_alone(layout: Layout, name: str) -> None:
    with embedded.owned(layout):
        embedded.server_command(layout)
        embedded.write_runtime(layout, Runtime(redis_url="unix:///x", api_url="http://x", pid=1))

        assert stat.S_IMODE((layout.data_dir / name).stat().st_mode) == 0o600


def test_runtime_is_found_while_the_directory_is_owned(layout: Layout) -> None:
    runtime = Runtime(redis_url="unix:///x", api_url="http://x", pid=1)

    with embedded.owned(layout):
        embedded.write_runtime(layout, runtime)

        assert embedded.find_runtime(layout) == runtime
    assert embedded.find_runtime(layout) is None


def test_runtime_stays_when_a_second_owner_is_refused(layout: Layout) -> None:
    runtime = Runtime(redis_url="unix:///x", api_url="http://x", pid=1)
    with embedded.owned(layout):
        embedded.write_runtime(layout, runtime)
        with pytest.raises(BrokerConfigError), embedded.owned(layout):
            pass

        assert embedded.find_runtime(layout) == runtime


def test_runtime_of_a_killed_up_is_not_believed(layout: Layout) -> None:
    with embedded.owned(layout):
        pass
    embedded.write_runtime(layout, Runtime(redis_url="unix:///x", api_url="http://x", pid=1))

    assert embedded.find_runtime(layout) is None


def test_runtime_is_not_found_where_nothing_ever_ran(tmp_path: Path) -> None:
    assert embedded.find_runtime(Layout(tmp_path)) is None


def test_socket_lies_in_the_data_directory_when_the_path_is_short() -> None:
    assert Layout(Path("/data")).socket == Path("/data/broker.sock")


@pytest.mark.parametrize("data_dir", ["/" + "x" * 120, "/" + "ä" * 60], ids=["ascii", "two-byte letters"])
def test_socket_path_fits_macos_whatever_the_data_directory(data_dir: str) -> None:
    assert len(os.fsencode(Layout(Path(data_dir)).socket)) <= embedded.MAX_SOCKET_PATH_BYTES


def test_server_runs_in_a_long_directory_with_spaces(tmp_path: Path) -> None:
    layout = Layout(tmp_path / ("with 'quotes' and \"spaces\" " * 4))
    with embedded.owned(layout):
        server = Server(layout)

        assert server.client.ping()
        server.stop()


@pytest.mark.parametrize(
    "name",
    [
        "Ünï côde & spaces = fun",
        "a::b?c#d%20e@f",
        "back\\slash 'and' \"quotes\"",
        "line\nbreak\ttab",
        "not-utf-8-\udcff",
    ],
    ids=["unicode and spaces", "signs of URLs", "quotes", "control characters", "no UTF-8"],
)
def test_server_is_reached_by_its_url_in_a_directory_of_any_name(tmp_path: Path, name: str) -> None:
    layout = Layout(tmp_path / name)
    with embedded.owned(layout):
        server = Server(layout)
        client = connect_blocking(embedded.redis_url(layout))
        config = BatchWorkerConfig(redis_url=embedded.redis_url(layout), files_url=str(layout.data_dir / "files"))

        assert client.ping()
        run_batch_worker(config, is_burst=True)
        client.close()
        server.stop()
    assert [path.parent.name for path in layout.data_dir.glob("broker/*")] != []


@pytest.mark.parametrize(
    "words",
    [
        ("CONFIG", "SET", "dir", "/tmp"),
        ("CONFIG", "SET", "dbfilename", "x"),
        ("MODULE", "LOAD", "/x"),
        ("DEBUG", "JMAP"),
    ],
    ids=" ".join,
)
def test_server_lets_no_holder_of_its_password_write_files_or_load_code(server: Server, words: tuple[str, ...]) -> None:
    with pytest.raises(redis.ResponseError, match="not allowed|protected"):
        cast("Any", server.client).execute_command(*words)


def test_server_is_reached_over_tcp_when_shared(layout: Layout, unused_tcp_port: int) -> None:
    with embedded.owned(layout):
        server = Server(layout, tcp_port=unused_tcp_port)

        with redis.Redis.from_url(embedded.shared_url(layout, host="127.0.0.1", port=unused_tcp_port)) as guest:
            assert guest.ping()
        server.stop()
