"""The recipe of docs/wire.md for other languages is run as it stands. Engine: none; Redis: a child `redis-server`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from broker import keys
from broker.former.daemon import Former, FormerConfig
from broker.scripts import Scripts
from broker.wire import Assignment, Request, decode_request, pack_tokens
from harness import factories as make
from harness.reads import read_jobs, read_state
from harness.redis_servers import ChildServer
from tests.broker.conftest import ChildServers

ROOT = Path(__file__).parents[3]


@pytest.fixture
def child(child_servers: ChildServers) -> ChildServer:
    child = child_servers.get("redis")
    child.flush()
    return child


def run_recipe(url: str) -> Sequence[Any]:
    """Run the page's Python block against a server; returns ACCEPT's reply."""
    [recipe] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/wire.md").read_text(encoding="utf-8"), re.S)
    recipe = recipe.replace(", msgpack, redis\n", "\n").replace("r = redis.Redis()\n", "")
    recipe = recipe.replace("broker/lua", str(ROOT / "broker/lua"))
    said: list[Sequence[Any]] = []
    with redis.Redis.from_url(url) as client:
        exec(recipe, {"r": client, "msgpack": _MessagePack, "print": said.append})
    return said[0]


class _MessagePack:
    """What the recipe needs of the `msgpack` package."""

    packb = staticmethod(msgspec.msgpack.encode)


async def test_foreign_producer_enqueues_a_request_that_is_formed(child: ChildServer) -> None:
    client = child.client()
    await Scripts(client).register(make.registration("w1", lane=make.lane(model="NAME@HASH")))

    reply = run_recipe(child.url)

    assert reply[:3] == [b"ok", b"mine-1", 1]
    assert await Former(FormerConfig("unused"), commands=client, blocking=client).step() == 1
    assert await read_jobs(client, "w1") == [[Assignment("mine-1", 1)]]
    body = (await read_state(client, "mine-1"))["body"]
    assert decode_request(body) == Request("mine-1", "NAME@HASH", "balanced", pack_tokens([1, 2, 3]), 16)
    await client.aclose()


def test_foreign_producer_is_accepted_once_when_it_sends_twice(child: ChildServer) -> None:
    run_recipe(child.url)

    assert run_recipe(child.url) == [b"again", b"mine-1", 1]


def test_wire_page_names_every_permanent_key() -> None:
    page = (ROOT / "docs/wire.md").read_text(encoding="utf-8")

    missing = [key for key in keys.PERMANENT if key not in page and f"…:{key.partition(':')[2]}" not in page]
    assert missing == []
