"""Every Redis key and channel, built in one place.

All keys share one hash tag, so that every script's keys live on one primary. A key either carries a TTL or its
pattern is listed in `PERMANENT`.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

TAG = "{mtplx}"

WAIT_INTERACTIVE = f"{TAG}:wait:interactive"
WAIT_OFFLINE = f"{TAG}:wait:offline"
WAIT_RETURNED = f"{TAG}:wait:returned"
"""Handed-back requests of either priority; read first, ordered by ordinal."""

ORDINAL = f"{TAG}:ordinal"
"""Counter of accepted requests; gives each its place in line."""
LOAD = f"{TAG}:load"
"""Hash: requests and tokens accepted and not yet ended, by priority."""
KEY_ROWS = f"{TAG}:key_rows"
"""Hash: rows running now, by API key id."""
ENDED = f"{TAG}:ended"
"""Hash: requests ended, by `priority:status:cause`."""
LIVE = f"{TAG}:live"
"""Sorted set: id of every request that has not ended, by its deadline; so that no end depends on a waiting entry."""
DAEMONS = f"{TAG}:daemons"
"""Set of the ids of all registered daemons."""
MODELS = f"{TAG}:models"
"""Hash: model identity to its `ModelCard`."""
LAST_SEEN = f"{TAG}:last_seen"
"""Hash: model identity to the Redis time in ms when a worker last served it."""
DEAD_LETTERS = f"{TAG}:dead"
"""Stream of requests given up on and of entries nobody can read; trimmed to a bound."""
FORMER_LEASE = f"{TAG}:former_lease"

OPEN_BATCHES = f"{TAG}:batches_open"
"""Set of the ids of all batches that have not ended."""
FILE_ENDS = f"{TAG}:file_ends"
"""Sorted set: file id to the second when it expires; its content must be removed then, long after its record went."""
FOREIGN = "rq:*"
"""RQ's own keys: its registries and queues are without a TTL by design, its jobs and workers expire."""
BATCH_WORKERS = "rq:workers:mtplx-batches"
"""RQ's set of the keys of batch workers; each is a hash that expires without heartbeats."""

CONTROL = f"{TAG}:control"
"""Channel: wakes workers to look at cancellations."""
WAKE = f"{TAG}:wake"
"""Channel: wakes the former, because something waits or a row became free."""

PERMANENT = (
    WAIT_INTERACTIVE,
    WAIT_OFFLINE,
    WAIT_RETURNED,
    ORDINAL,
    LOAD,
    KEY_ROWS,
    ENDED,
    LIVE,
    DAEMONS,
    MODELS,
    LAST_SEEN,
    DEAD_LETTERS,
    OPEN_BATCHES,
    FILE_ENDS,
    FOREIGN,
)


def wait(priority: str) -> str:
    """The waiting stream of a priority, `interactive` or `offline`."""
    return f"{TAG}:wait:{priority}"


def state(request_id: str) -> str:
    """Hash: everything known about a request."""
    return f"{TAG}:req:{request_id}"


def log(request_id: str) -> str:
    """String: committed tokens, four bytes each, little endian."""
    return f"{TAG}:log:{request_id}"


def logprobs(request_id: str) -> str:
    """List: one MessagePack `Logprob` per committed token, where asked for."""
    return f"{TAG}:lps:{request_id}"


def jobs(worker_id: str) -> str:
    """Stream of jobs for one worker."""
    return f"{TAG}:jobs:{worker_id}"


def rows(worker_id: str) -> str:
    """Hash: request id to attempt, the rows a worker owns."""
    return f"{TAG}:rows:{worker_id}"


def daemon(daemon_id: str) -> str:
    """Hash: one daemon's record with its heartbeat counter; a worker's also has its lane and free rows."""
    return f"{TAG}:daemon:{daemon_id}"


def tokenizer(digest: str) -> str:
    """Hash: file name to content, for the tokenizer files with this hash."""
    return f"{TAG}:tokenizer:{digest}"


def bucket(key_id: str) -> str:
    """Hash: what an API key may still have of requests and tokens, and when that was true."""
    return f"{TAG}:bucket:{key_id}"


def idempotency(key_id: str, digest: str) -> str:
    """String: the request that an idempotency key stands for; scoped to the API key."""
    return f"{TAG}:idem:{key_id}:{digest}"


def note(call_id: str) -> str:
    """String: what whoever submitted a call wrote down in order to read its answer later; the broker reads none."""
    return f"{TAG}:note:{call_id}"


def batch(batch_id: str) -> str:
    """Hash: everything known about a batch, its progress included."""
    return f"{TAG}:batch:{batch_id}"


def batch_lease(batch_id: str) -> str:
    """String: the runner that works on a batch now."""
    return f"{TAG}:batch_lease:{batch_id}"


def batches(key_id: str) -> str:
    """Sorted set: the batches of an API key by their creation; lives as long as the last of them."""
    return f"{TAG}:batches:{key_id}"


def file(file_id: str) -> str:
    """String: what is known about a file; its content lies elsewhere."""
    return f"{TAG}:file:{file_id}"


def files(key_id: str) -> str:
    """Sorted set: the files of an API key by their creation; lives as long as the last of them."""
    return f"{TAG}:files:{key_id}"


def listening(api_id: str) -> str:
    """Set: the requests that end when this API process incarnation does."""
    return f"{TAG}:listening:{api_id}"


def reply(api_id: str) -> str:
    """Channel on which one API process incarnation hears of its requests."""
    return f"{TAG}:reply:{api_id}"


def is_permanent(key: str) -> bool:
    """Whether a key may live without a TTL."""
    return any(fnmatchcase(key, pattern) for pattern in PERMANENT)
