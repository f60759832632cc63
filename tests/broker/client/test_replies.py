"""The inbox of one request is bounded and never loses silently. Engine: none; no Redis."""

from __future__ import annotations

from broker.client.replies import Inbox
from broker.wire import Progress


async def test_full_inbox_is_emptied_and_asks_to_be_repaired() -> None:
    inbox = Inbox(capacity=3)

    for done in range(5):
        inbox.put(Progress("r1", done, 10))

    assert await inbox.get(0.01) is None
    assert await inbox.get(0.01) == Progress("r1", 4, 10)


async def test_inbox_gives_events_in_order() -> None:
    inbox = Inbox(capacity=3)

    for done in range(3):
        inbox.put(Progress("r1", done, 10))

    assert [await inbox.get(0.01) for _ in range(3)] == [Progress("r1", done, 10) for done in range(3)]
