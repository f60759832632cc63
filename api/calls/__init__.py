"""A call whatever dialect it came in: prepare, submit, stream, retry; quota and idempotency keys."""
