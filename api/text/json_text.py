"""JSON as it leaves this program: every value on one line, by whichever rule a reader splits lines."""

from __future__ import annotations

import msgspec

_encoder = msgspec.json.Encoder()

_BREAKS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))
"""Line ends that Unicode knows and JSON does not escape. In JSON they occur in strings only."""


def encode_json(value: object) -> bytes:
    """The value as JSON, without a character that Unicode takes for the end of a line."""
    data = _encoder.encode(value)
    for line_break, escaped in _BREAKS:
        if line_break in data:
            data = data.replace(line_break, escaped)
    return data
