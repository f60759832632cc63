"""How a request's body is read: what it must be declared as, which content encodings are undone, and within what size.

Every route that reads JSON reads it here, and so does every route that acts without a body (`check_no_body`).
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import logging
import zlib
from collections.abc import AsyncGenerator

from litestar.exceptions import HTTPException

from api.errors import ApiError, BadRequestError, ClientGoneError
from api.http.dependencies import HttpRequest

logger = logging.getLogger(__name__)

PIECE_BYTES = 64 * 1024
"""Most that is decoded at once, so that a small body cannot take much memory however far it expands."""
_ENCODINGS = {"gzip": 31, "x-gzip": 31, "deflate": zlib.MAX_WBITS}
"""zlib's window bits for each content encoding."""
_RAW_DEFLATE = -zlib.MAX_WBITS
_TEXTS = frozenset({"utf-8", "ascii"})
"""Python's names of the character sets that are read as UTF-8."""
_OTHER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


async def read_json(request: HttpRequest) -> bytes:
    """Return the body of a JSON route: decoded, without a byte-order mark.

    Raises:
        ApiError: it is not declared as JSON. A page of another origin may post a body without a content type, or
            plain text, without asking first; what is declared as JSON it may not.
    """
    _check_json(request, request.headers.get("content-type", ""))
    limit = request.route_handler.resolve_request_max_body_size() or None
    body = bytearray()
    async for piece in read_decoded(request):
        body += piece
        if limit is not None and len(body) > limit:
            raise too_large()
    return _without_mark(bytes(body))


def check_no_body(request: HttpRequest) -> None:
    """Check a request that acts and needs no body: one that it has all the same must be declared as JSON.

    Raises:
        ApiError: it is not.
    """
    declared = request.headers.get("content-type", "")
    has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
    if declared or has_body:
        _check_json(request, declared)


async def read_decoded(request: HttpRequest) -> AsyncGenerator[bytes, None]:
    """The pieces of a body as they arrive, with its content encoding undone.

    Raises:
        ApiError: the encoding is not one of ours, or the body is not encoded so.
        ClientGoneError: the client left before the body was whole.
    """
    encoding = _encoding_of(request)
    pieces = _pieces_of(request)
    async with contextlib.aclosing(pieces if encoding is None else _decoded(pieces, encoding)) as decoded:
        async for piece in decoded:
            yield piece


def too_large() -> ApiError:
    """The refusal of a body over the limit, before or after decoding."""
    message = "The body is larger than this server takes."
    return ApiError(message, status=413, kind="invalid_request_error")


def _check_json(request: HttpRequest, declared: str) -> None:
    kind, *parameters = [part.strip().lower() for part in declared.split(";")]
    if kind != "application/json":
        what = f"Content-Type {kind!r}" if kind else "No Content-Type"
        raise _unsupported(f"{what}: send application/json.")
    for name, _, value in (parameter.partition("=") for parameter in parameters):
        if name.strip() == "charset" and _charset(value.strip().strip('"')) not in _TEXTS:
            raise _unsupported(f"Content-Type charset {value.strip()}: send JSON as UTF-8.")


def _charset(name: str) -> str:
    try:
        return codecs.lookup(name).name
    except LookupError:
        return name


def _without_mark(body: bytes) -> bytes:
    for mark, name in _OTHER_MARKS.items():
        if body.startswith(mark):
            raise BadRequestError(f"The body is {name}, as its byte-order mark says: send JSON as UTF-8.")
    return body.removeprefix(codecs.BOM_UTF8)


def _encoding_of(request: HttpRequest) -> str | None:
    named = ",".join(request.headers.getall("content-encoding", [])).lower().split(",")
    encodings = [name.strip() for name in named if name.strip() not in ("", "identity")]
    if not encodings:
        return None
    if len(encodings) > 1 or encodings[0] not in _ENCODINGS:
        message = f"Content-Encoding {', '.join(encodings)}: send gzip, deflate, or the body as it is."
        raise _unsupported(message, {"accept-encoding": "gzip, deflate"})
    return encodings[0]


def _unsupported(message: str, headers: dict[str, str] | None = None) -> ApiError:
    return ApiError(message, status=415, kind="invalid_request_error", headers=headers)


async def _pieces_of(request: HttpRequest) -> AsyncGenerator[bytes, None]:
    try:
        async for piece in request.stream():
            yield piece
    except HTTPException as error:
        if error.status_code < 500:
            raise
        logger.debug("%s %s: the client left in the middle of the body", request.method, request.scope["path"])
        raise ClientGoneError from error


async def _decoded(pieces: AsyncGenerator[bytes, None], encoding: str) -> AsyncGenerator[bytes, None]:
    decoder = _Decoder(encoding)
    async for piece in pieces:
        rest = piece
        while rest:
            decoded, rest = decoder.decode(rest)
            if decoded:
                yield decoded
            await asyncio.sleep(0)  # a body that expands a thousand times must not hold up the event loop
    if not decoder.is_whole:
        raise decoder.refusal("it ends too early")


class _Decoder:
    """One body in gzip or deflate, which may consist of several gzip members."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._bits = _ENCODINGS[encoding]
        self._zlib = zlib.decompressobj(self._bits)
        self._has_begun = False

    @property
    def is_whole(self) -> bool:
        """Whether the body may end here; an empty one is nothing encoded, as some clients send it."""
        return self._zlib.eof or not self._has_begun

    def decode(self, data: bytes) -> tuple[bytes, bytes]:
        """Decode one piece at most; also return the input that is left.

        Raises:
            BadRequestError: the data is not encoded as it was declared.
        """
        if self._zlib.eof:
            if self._encoding == "deflate":
                raise self.refusal("something follows its end")
            self._zlib = zlib.decompressobj(self._bits)
        try:
            decoded = self._zlib.decompress(data, PIECE_BYTES)
        except zlib.error as error:
            if self._encoding != "deflate" or self._has_begun:
                raise self.refusal(str(error)) from error
            return self._begin_raw(data)
        self._has_begun = True
        return decoded, self._zlib.unused_data or self._zlib.unconsumed_tail

    def refusal(self, why: str) -> BadRequestError:
        return BadRequestError(f"The body cannot be decoded as {self._encoding}: {why}.")

    def _begin_raw(self, data: bytes) -> tuple[bytes, bytes]:
        """Decode deflate without zlib's header, which some clients send under the same name."""
        self._has_begun, self._zlib = True, zlib.decompressobj(_RAW_DEFLATE)
        return self.decode(data)
