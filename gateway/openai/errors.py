"""A refusal in OpenAI's words: the body of an HTTP error, and the same as a stream's frame."""

from typing import Any

import msgspec

from core.errors import DIALECTS, Refusal
from gateway.sse import data_frame, json_line

_SERVER_FAULT = 500


def error_body(refusal: Refusal, request_id: str) -> tuple[int, bytes]:
    """HTTP status and JSON body."""
    return refusal.status, msgspec.json.encode(_error(refusal, request_id))


def error_frame(refusal: Refusal, request_id: str) -> bytes:
    """An event that SDKs raise on. No `[DONE]` follows it."""
    return data_frame(json_line(_error(refusal, request_id)))


def _error(refusal: Refusal, request_id: str) -> dict[str, Any]:
    status, kind, _ = DIALECTS[refusal.code]
    message = refusal.message
    if status >= _SERVER_FAULT:
        message = f"{message} (request {request_id})"  # what a report to us must name
    return {
        "error": {
            "message": message,
            "type": kind,
            "param": refusal.param,
            "code": refusal.code.value,
        }
    }
