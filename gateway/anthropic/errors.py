"""A refusal in Anthropic's words: the body of an HTTP error, and the same as an event."""

from typing import Any

import msgspec

from core.errors import DIALECTS, Refusal
from gateway.sse import json_line, named_frame

OVERLOADED_STATUS = 529
_OVERLOADED = "overloaded_error"


def error_body(refusal: Refusal, request_id: str) -> tuple[int, bytes]:
    """HTTP status and JSON body."""
    status, _, kind = DIALECTS[refusal.code]
    body = msgspec.json.encode(_error(refusal, request_id))
    return (OVERLOADED_STATUS if kind == _OVERLOADED else status), body


def error_frame(refusal: Refusal, request_id: str) -> bytes:
    """An `error` event, the last of its stream: no `message_stop` follows it."""
    return named_frame(b"error", json_line(_error(refusal, request_id)))


def _error(refusal: Refusal, request_id: str) -> dict[str, Any]:
    return {
        "type": "error",
        "error": {"type": DIALECTS[refusal.code][2], "message": refusal.message},
        "request_id": request_id,
    }
