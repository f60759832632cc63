"""What a waiting request takes of Redis' memory, with the settings that are advised. Engine: none; Redis: redis."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from broker import keys
from broker.scripts import DEFAULT_BOUNDS, Scripts, Submission
from broker.wire import Request, Ticket, new_id, pack_tokens
from tests.broker.conftest import ChildServers

COUNT, PROMPT_TOKENS = 200, 50
BYTES_MAX = 1500


def submission() -> Submission:
    request_id, model = new_id("chatcmpl"), "smollm2-135m@0123456789ab"
    prompt = pack_tokens(range(PROMPT_TOKENS))
    request = Request(id=request_id, model=model, profile="balanced", prompt=prompt, max_tokens=256)
    ticket = Ticket(request_id, model, "balanced", PROMPT_TOKENS, 256, "offline", "a-key")
    return Submission(request, ticket, reply=keys.reply("api-0123456789abcdef01234567"))


async def test_waiting_request_of_fifty_tokens_takes_less_than_its_bound(child_servers: ChildServers) -> None:
    server = child_servers.get("redis")
    server.flush()
    client: Any = server.client()
    before = (await client.config_get("hash-max-listpack-value"))["hash-max-listpack-value"]
    await client.config_set("hash-max-listpack-value", 1024)
    scripts = Scripts(client)

    await asyncio.gather(*(scripts.accept(submission(), DEFAULT_BOUNDS) for _ in range(COUNT)))

    # All of it but the permanent counters, key names and the tables they are in included.
    sizes = [await cast("Any", client).memory_usage(key, samples=0) for key in await client.keys(keys.state("*"))]
    sizes += [await client.memory_usage(key, samples=0) for key in (keys.WAIT_OFFLINE, keys.LIVE)]
    await client.config_set("hash-max-listpack-value", before)
    await client.aclose()
    assert sum(sizes) / COUNT < BYTES_MAX
