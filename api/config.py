"""The one configuration object of an API process; built by the command line, read by everybody here."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from api.errors import ApiConfigError

_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/*?#@]+")
_HOST = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """How one API process serves."""

    redis_url: str
    """Any redis-py URL: redis://, rediss:// or unix://."""
    host: str = "127.0.0.1"
    port: int = 8000
    keys_file: Path | None = None
    """TOML file of hashed API keys; see `api.auth`. Without one, everybody who can connect may ask."""
    allow_open: bool = False
    """Serve beyond loopback without keys."""
    allow_host: tuple[str, ...] = ()
    """Names beside those of loopback to which a server on loopback without keys answers."""
    allow_origin: tuple[str, ...] = ()
    """Origins whose pages may use this server; `*` stands for every origin but the opaque `null`."""
    receive_timeout_s: float = 30.0
    """How long a request's head may take to arrive, and how long its body may pause."""
    keep_alive_s: float = 10.0
    """Longest silence on a stream before a comment is sent; at most 15."""
    body_limit_bytes: int = 10 * 1024 * 1024
    files_url: str = ""
    """Directory, or URL that fsspec reads, for the contents of files; empty: files and batches are off."""
    file_limit_bytes: int = 200 * 1024 * 1024
    default_timeout_s: float = 3600.0
    """Deadline of a request that names none."""
    max_timeout_s: float = 6 * 3600.0
    queue_requests_max: int = 10_000
    """Interactive requests that may wait or run at once, and as many offline ones; beyond it 503 with Retry-After."""
    queue_tokens_max: int = 50_000_000
    """Tokens, prompts and completions, that they may cost together."""
    retention_s: float = 600.0
    """How long an ended request stays readable."""
    detach_s: float = 60.0
    """How long a request under an Idempotency-Key outlives its listener."""
    lane_grace_s: float = 60.0
    """How long a model without a live worker still queues."""
    drain_s: float = 30.0
    """How long open streams may go on after SIGTERM."""
    drain_notice_s: float = 0.0
    """How long after SIGTERM requests are still taken while health says that none should come; for a balancer."""
    redis_connections: int = 32
    """Connections to Redis that calls share; more calls wait their turn."""
    registry_age_s: float = 1.0
    """How old the picture of models and lanes may be."""
    lease_s: float = 5.0
    """How long a heartbeat may stand still before a former calls its daemon dead; health waits for several of them."""
    stall_s: float = 120.0
    """When a worker without progress gives itself up; health calls it stalled after half of that."""

    def __post_init__(self) -> None:
        _check("port", self.port, allowed="0 to 65535", is_good=0 <= self.port <= 65535)
        _check("keep_alive_s", self.keep_alive_s, allowed="above 0, at most 15", is_good=0 < self.keep_alive_s <= 15)
        _check("redis_connections", self.redis_connections, allowed="at least 1", is_good=self.redis_connections >= 1)
        _check(
            "body_limit_bytes", self.body_limit_bytes, allowed="at least 1024", is_good=self.body_limit_bytes >= 1024
        )
        _check("receive_timeout_s", self.receive_timeout_s, allowed="above 0", is_good=self.receive_timeout_s > 0)
        for origin in self.allow_origin:
            allowed = "*, or an origin such as https://app.example or http://localhost:3000, without a path"
            _check("allow_origin", origin, allowed=allowed, is_good=origin == "*" or bool(_ORIGIN.fullmatch(origin)))
        for host in self.allow_host:
            _check("allow_host", host, allowed="a host name without a port", is_good=bool(_HOST.fullmatch(host)))
        longest = self.max_timeout_s
        _check(
            "default_timeout_s",
            self.default_timeout_s,
            allowed=f"above 0, at most max_timeout_s ({longest:g})",
            is_good=0 < self.default_timeout_s <= longest,
        )
        for name in (
            "retention_s",
            "detach_s",
            "lane_grace_s",
            "drain_s",
            "drain_notice_s",
            "registry_age_s",
            "lease_s",
            "stall_s",
        ):
            value = getattr(self, name)
            _check(name, value, allowed="0 or more", is_good=value >= 0)

    def check_exposure(self) -> None:
        """Refuse to serve other machines, or pages of every origin, without keys, unless that was said explicitly.

        Raises:
            ApiConfigError: it would.
        """
        if self.keys_file is None and not self.allow_open and not is_loopback(self.host):
            raise ApiConfigError(
                f"host = {self.host!r} without keys: anybody who reaches this machine could use it; "
                "allowed: a loopback host, a keys file, or serving openly said explicitly"
            )
        if "*" in self.allow_origin and self.keys_file is None and not self.allow_open:
            raise ApiConfigError(
                "allow_origin = '*' without keys: any web page that a person here opens could use this server; "
                "allowed: the origins by name, a keys file, or serving openly said explicitly"
            )


@lru_cache(256)  # asked for every request
def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`."""
    if host.lower().removesuffix(".") == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _check(key: str, value: object, *, allowed: str, is_good: bool) -> None:
    if not is_good:
        raise ApiConfigError(f"{key} = {value!r}: allowed: {allowed}")
