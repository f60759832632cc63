"""HTTP as the commands speak it: through the proxies of the environment, but straight to this machine itself."""

from __future__ import annotations

import ipaddress
import socket
import urllib.request
from functools import cache
from http.client import HTTPResponse
from typing import cast
from urllib.parse import urlsplit


def open_url(request: urllib.request.Request | str, *, timeout_s: float) -> HTTPResponse:
    """Send a request. No proxy is asked for what runs on this machine, whatever `http_proxy` and its like say.

    Raises:
        OSError: there is no answer; `urllib.error.HTTPError` where there is one that is an error.
    """
    url = request if isinstance(request, str) else request.full_url
    if is_this_machine(urlsplit(url).hostname or ""):
        return cast("HTTPResponse", _direct().open(request, timeout=timeout_s))
    return cast("HTTPResponse", urllib.request.urlopen(request, timeout=timeout_s))


def is_this_machine(host: str) -> bool:
    """Whether a host's name is one of loopback, or its address one that this machine has."""
    name = host.lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
        if address.is_loopback:
            return True
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((name, 0))  # only an address of its own can a machine bind
    except (ValueError, OSError):
        return False
    return True


@cache
def _direct() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))
