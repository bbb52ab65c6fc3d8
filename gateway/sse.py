"""Server-sent events: how bytes are framed, in either dialect. No dialect's content is here.

The one invariant: a frame's data never holds anything that some reader takes for the end of
a line. JSON escapes CR and LF; we also escape NEL and the two Unicode separators, at which
readers that split decoded text (as `str.splitlines` does) would cut a frame in half.
"""

import msgspec

SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
KEEP_ALIVE = b": ping\n\n"

_LINE_ENDS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)

_encode = msgspec.json.Encoder().encode


def json_line(value: object) -> bytes:
    """JSON that is one line to every reader."""
    encoded = _encode(value)
    if encoded.isascii():
        return encoded
    for raw, escaped in _LINE_ENDS:
        encoded = encoded.replace(raw, escaped)
    return encoded


def data_frame(data: bytes) -> bytes:
    """An event without a name, as OpenAI's streams have them. `data` is one line."""
    return b"data: " + data + b"\n\n"


def named_frame(event: bytes, data: bytes) -> bytes:
    """An event with a name, as Anthropic's streams have them. `data` is one line."""
    return b"event: " + event + b"\ndata: " + data + b"\n\n"
