"""What the API answers when it cannot do what was asked; the only place that knows HTTP statuses.

ApiConfigError                  the configuration cannot be served
ApiError                        one answer in OpenAI's error shape
 ├── BadRequestError            400, names the field
 │    ├── ContextLengthError    400 context_length_exceeded
 │    └── ClientGoneError       400 that nothing reads
 ├── InvalidKeyError            401
 ├── ModelNotFoundError         404
 └── BusyError                  503 with Retry-After
"""

from __future__ import annotations

from collections.abc import Mapping

from broker.errors import BrokerError, BrokerUnavailableError, ConflictError, QueueFullError, QuotaError, RefusedError
from broker.wire import Cause, Failed


class ApiConfigError(Exception):
    """The configuration cannot be served; the message names key, value and what is allowed."""


class ApiError(Exception):
    """One answer in OpenAI's error shape."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 500,
        kind: str = "server_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = dict(headers or {})


class BadRequestError(ApiError):
    """The request itself is wrong; `param` names the field."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, status=400, kind="invalid_request_error", code=code, param=param)


class ContextLengthError(BadRequestError):
    """The prompt does not fit any lane of the model."""

    def __init__(self, *, tokens: int, limit: int, param: str, is_least: bool = False) -> None:
        """`is_least`: it has this many tokens or more; nobody counted them."""
        count = f"at least {tokens}" if is_least else str(tokens)
        super().__init__(
            f"This model's maximum context length is {limit} tokens, and one of them must be left for the answer; "
            f"your {param} has {count} tokens.",
            param=param,
            code="context_length_exceeded",
        )


class ClientGoneError(BadRequestError):
    """The client left in the middle of its request, so nothing reads the answer."""

    def __init__(self) -> None:
        super().__init__("The client left before its request was whole.")


class InvalidKeyError(ApiError):
    """No key, or one that nobody knows."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            status=401,
            kind="invalid_request_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


class ModelNotFoundError(ApiError):
    """Nobody ever served a model of this name."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"The model {model!r} does not exist; GET /v1/models lists those that do.",
            status=404,
            kind="invalid_request_error",
            code="model_not_found",
            param="model",
        )


class BusyError(ApiError):
    """Not now; `retry_after_s` says when asking again makes sense."""

    def __init__(self, message: str, *, code: str, retry_after_s: float = 1.0) -> None:
        headers = {"Retry-After": _whole_seconds(retry_after_s)}
        super().__init__(message, status=503, kind="server_error", code=code, headers=headers)


def from_broker(error: BrokerError) -> ApiError:
    """The answer to what the broker refused or could not do."""
    match error:
        case QuotaError():
            if error.retry_after_s is None:
                headers = {"x-should-retry": "false"}  # it would never fit; clients retry a 429 otherwise
            else:
                headers = {"Retry-After": _whole_seconds(error.retry_after_s)}
            return ApiError(str(error), status=429, kind="rate_limit_error", code=error.code, headers=headers)
        case QueueFullError():
            return BusyError(str(error), code=error.code, retry_after_s=error.retry_after_s or 1.0)
        case ConflictError():
            return ApiError(str(error), status=409, kind="invalid_request_error", code=error.code)
        case RefusedError():
            return BusyError(str(error), code=error.code, retry_after_s=error.retry_after_s or 1.0)
        case BrokerUnavailableError():
            return BusyError("The queue cannot be reached; nothing was accepted.", code=error.code)
        case _:
            return ApiError(str(error), code=error.code)


_FAILED_STATUS = {
    "over_capacity": 503,
    "no_worker": 503,
    "shutdown": 503,
    "row_rejected": 400,
    "bad_request": 400,
    "context_length_exceeded": 400,
    "deadline": 504,
}


def from_failed(event: Failed) -> ApiError:
    """The answer to a request that was accepted and then failed."""
    status = _FAILED_STATUS.get(event.code, 500)
    kind = "invalid_request_error" if status == 400 else "server_error"
    headers = {"Retry-After": "1"} if status == 503 else {}
    return ApiError(event.message, status=status, kind=kind, code=event.code, headers=headers)


def interrupted(cause: Cause) -> ApiError:
    """The answer to a request that was cancelled under a client that still waits."""
    message = f"The request was cancelled ({cause}): the process that answers it was taken for dead or told to stop."
    return ApiError(message, status=503, code=cause, headers={"Retry-After": "1"})


def _whole_seconds(seconds: float) -> str:
    """Retry-After knows whole seconds only; round up, so that nobody comes back too early."""
    return str(max(1, int(-(-seconds // 1))))
