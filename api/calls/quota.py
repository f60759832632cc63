"""Whether the requests of one call fit, all together, what their API key may have. ACCEPT counts each by itself and
knows nothing of its siblings: what it let through of a call that is refused later would be lost to the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from broker.errors import QuotaError
from broker.scripts import Accepted, Quota
from broker.wire import Ticket


class _Want(NamedTuple):
    what: str
    amount: int
    per_minute: int
    """0: no bound."""


def check_fits(tickets: Sequence[Ticket], quota: Quota) -> None:
    """Refuse the requests of a call that its key's limits can never take together; one alone is ACCEPT's to judge.

    Raises:
        QuotaError: without a time, since no wait would help.
    """
    if len(tickets) < 2:
        return
    for want in _wants(tickets, quota):
        if 0 < want.per_minute < want.amount:
            raise QuotaError(f"this call alone asks for more {want.what} than its API key may have in a minute")


def check_rest(tickets: Sequence[Ticket], done: int, quota: Quota, accepted: Accepted) -> None:
    """Refuse a call whose first requests were accepted when what that left to the key is too little for the others.

    Args:
        done: how many were accepted.
        accepted: what ACCEPT said of the last of them.

    Raises:
        QuotaError: with the time after which the whole call would fit, were the key used for nothing else.
    """
    left = (accepted.requests_left, accepted.tokens_left)
    whole, rest = _wants(tickets, quota), _wants(tickets[done:], quota)
    waits = [
        ((wanted.amount - have) * 60 / wanted.per_minute, wanted.what)
        for wanted, missing, have in zip(whole, rest, left, strict=True)
        if wanted.per_minute and have is not None and missing.amount > have
    ]
    if waits:
        wait_s, what = max(waits)
        message = f"the API key's limit of {what} per minute leaves too little for this call"
        raise QuotaError(message, retry_after_s=wait_s)


def whole_wait_s(tickets: Sequence[Ticket], refused: Ticket, quota: Quota, wait_s: float) -> float:
    """After what time a whole call would fit of which ACCEPT has refused a request, which would fit after `wait_s`."""
    pairs = zip(_wants(tickets, quota), _wants([refused], quota), strict=True)
    more_s = [(whole.amount - one.amount) * 60 / whole.per_minute for whole, one in pairs if whole.per_minute]
    return min(wait_s + max(more_s, default=0.0), 60.0)  # by then the key has again all it may have


def _wants(tickets: Sequence[Ticket], quota: Quota) -> tuple[_Want, _Want]:
    return (
        _Want("requests", len(tickets), quota.requests_per_minute),
        _Want("tokens", sum(ticket.cost_tokens for ticket in tickets), quota.tokens_per_minute),
    )
