"""One tree of refusals, told to a caller in whichever dialect it speaks.

    Refusal
    ├── caller's fault: BAD_REQUEST … LIMIT, QUOTA        4xx, not retryable (429 may be)
    └── ours:           OVERLOADED, UNAVAILABLE, INTERNAL  5xx, retryable

A refusal is a value with a code, a status and a sentence; it carries no dialect. The two
tables below are all that a dialect adds.
"""

from enum import StrEnum

import msgspec


class Code(StrEnum):
    """Why a request was refused."""

    BAD_REQUEST = "bad_request"
    CONTEXT_LENGTH = "context_length_exceeded"
    CONTENT_FILTER = "content_filter"
    CONTENT_POLICY = "content_policy_violation"
    UNSUPPORTED = "unsupported_parameter"
    INVALID_KEY = "invalid_api_key"
    FORBIDDEN = "permission_denied"
    NOT_FOUND = "not_found"
    MODEL_NOT_FOUND = "model_not_found"
    MODEL_NOT_PRICED = "model_not_priced"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    CONFLICT = "conflict"
    PRECONDITION = "precondition_failed"
    TOO_LARGE = "request_too_large"
    UNPROCESSABLE = "unprocessable"
    RATE_LIMITED = "rate_limit_exceeded"
    QUOTA = "insufficient_quota"
    TIMEOUT = "timeout"
    OVERLOADED = "server_is_overloaded"
    UNAVAILABLE = "service_unavailable"
    INTERNAL = "internal_error"


# code: (HTTP status, OpenAI type, Anthropic type). Anthropic says 529 where OpenAI says 503.
DIALECTS: dict[Code, tuple[int, str, str]] = {
    Code.BAD_REQUEST: (400, "invalid_request_error", "invalid_request_error"),
    Code.CONTEXT_LENGTH: (400, "invalid_request_error", "invalid_request_error"),
    Code.CONTENT_FILTER: (400, "invalid_request_error", "invalid_request_error"),
    Code.CONTENT_POLICY: (400, "invalid_request_error", "invalid_request_error"),
    Code.UNSUPPORTED: (400, "invalid_request_error", "invalid_request_error"),
    Code.INVALID_KEY: (401, "invalid_request_error", "authentication_error"),
    Code.FORBIDDEN: (403, "invalid_request_error", "permission_error"),
    Code.NOT_FOUND: (404, "invalid_request_error", "not_found_error"),
    Code.MODEL_NOT_FOUND: (404, "invalid_request_error", "not_found_error"),
    Code.MODEL_NOT_PRICED: (403, "invalid_request_error", "permission_error"),
    Code.METHOD_NOT_ALLOWED: (405, "invalid_request_error", "invalid_request_error"),
    Code.CONFLICT: (409, "invalid_request_error", "invalid_request_error"),
    Code.PRECONDITION: (412, "invalid_request_error", "invalid_request_error"),
    Code.TOO_LARGE: (413, "invalid_request_error", "request_too_large"),
    Code.UNPROCESSABLE: (422, "invalid_request_error", "invalid_request_error"),
    Code.RATE_LIMITED: (429, "rate_limit_error", "rate_limit_error"),
    Code.QUOTA: (429, "insufficient_quota", "rate_limit_error"),
    Code.TIMEOUT: (504, "server_error", "timeout_error"),
    Code.OVERLOADED: (503, "service_unavailable_error", "overloaded_error"),
    Code.UNAVAILABLE: (503, "service_unavailable_error", "overloaded_error"),
    Code.INTERNAL: (500, "server_error", "api_error"),
}


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A refusal as a value. `param` names the offending field, where there is one."""

    code: Code
    message: str
    param: str | None = None
    retry_after_ms: int | None = None

    @property
    def status(self) -> int:
        """The HTTP status in the OpenAI dialect."""
        return DIALECTS[self.code][0]


class RefusedError(Exception):
    """A refusal on its way to the edge, where one handler tells it in the caller's dialect."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def refuse(code: Code, message: str, *, param: str | None = None) -> RefusedError:
    """An error to raise at once, carrying this refusal."""
    return RefusedError(Refusal(code=code, message=message, param=param))
