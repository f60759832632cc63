"""The errors of the broker room. `code` is stable and crosses the wire; only the API knows HTTP statuses.

BrokerError
 ├── BrokerUnavailableError   Redis cannot be reached, or cannot work for now: it loads, is full, takes no writes
 │    └── BrokerDeniedError   Redis refuses us: password, certificate, a missing right, a cluster
 ├── BrokerConfigError        Redis is set up in a way that loses data, or refused us when a process started
 ├── WireError                bytes that this version cannot read
 ├── RefusedError             ACCEPT said no
 │    ├── QueueFullError      the queue's bound in requests or tokens is reached
 │    ├── QuotaError          a limit of this API key is reached
 │    └── ConflictError       the id or idempotency key is taken by another body
 └── UnknownRequestError      no such request, or its record has expired
"""

from __future__ import annotations

from typing import ClassVar


class BrokerError(Exception):
    """Base of everything the broker room raises on purpose."""

    code: ClassVar[str] = "broker_error"


class BrokerUnavailableError(BrokerError):
    """Redis cannot be reached, or cannot work for now: it loads, is full, takes no writes."""

    code = "broker_unavailable"


class BrokerDeniedError(BrokerUnavailableError):
    """Redis refuses us until a person changes something; the message says what.

    A process that starts ends with it. One that has worked before waits, as in any outage: a rule that was taken away
    by mistake must not cost the rows that run.
    """


class BrokerConfigError(BrokerError):
    """Redis, or the way to it, is set up wrongly; the message says which setting and what to do."""

    code = "broker_config"


class WireError(BrokerError):
    """Bytes that this version cannot read."""

    code = "wire"


class RefusedError(BrokerError):
    """ACCEPT said no; nothing was written."""

    code = "refused"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """When it may be tried again; None: unknown, or never."""


class QueueFullError(RefusedError):
    """The queue's bound in requests or tokens is reached."""

    code = "queue_full"


class QuotaError(RefusedError):
    """A limit of this API key is reached."""

    code = "rate_limit_exceeded"


class ConflictError(RefusedError):
    """The id or idempotency key is taken by a request with another body."""

    code = "conflict"


class UnknownRequestError(BrokerError):
    """No such request, or its record has expired."""

    code = "unknown_request"
