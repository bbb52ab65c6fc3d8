"""What a provider's refusal means: from a status, its headers and body, or an event of a stream.

A 400 is the caller's only where it plainly is: the provider names a field, calls the request
invalid in its dialect's word, or says that the prompt does not fit. Every other 4xx is about
our account there or our translation, and says nothing about the caller.
"""

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import msgspec

from core.errors import Code, Refusal
from gateway.providers.faults import AWAY, Fault, FaultError, FaultKind, away, busy, late

RETRY_AFTER_MS_MAX = 120_000  # the SDKs do not wait for longer
MESSAGE_CHARS_MAX = 500

CAPACITY = frozenset({429, 503, 529})
TIMEOUTS = frozenset({408, 504, 522, 524})  # the last two are Cloudflare's
INVALID = frozenset({400, 413, 422})
KEY_DEAD = frozenset({401, 403})
SERVER_ERROR = 500

_UNPAID = frozenset({"insufficient_quota", "billing_error", "credit_balance_exhausted"})
_BUSY = frozenset(
    {"overloaded_error", "rate_limit_error", "rate_limit_exceeded", "server_is_overloaded"}
    | {"service_unavailable_error", "slow_down", "429", "503", "529"}
)
_LATE = frozenset({"timeout_error", "timeout", "504", "408"})
_POLICY = frozenset({"content_filter", "content_policy_violation", "ResponsibleAIPolicyViolation"})
_TOO_LONG = re.compile(
    r"maximum context length|context[ _](length|limit|window)|(prompt|input) is too long"
    r"|too many (input )?tokens",
    re.IGNORECASE,
)
# Names of accounts and keys, as providers put them into messages.
_PRIVATE = re.compile(r"\b(?:sk|org|proj|user|key|req)[-_][A-Za-z0-9*_-]{6,}")
# Addresses, which may open what only its owner may see, and images that are told back: of no log.
_ADDRESS = re.compile(r"\b(?:https?://|data:)\S+", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]+")


class _Told(NamedTuple):
    """An error envelope of either dialect. Codes may be numbers."""

    words: frozenset[str]  # its type and code
    message: str
    param: str | None


def refused(
    status: int, headers: Mapping[str, str], body: bytes, *, now_s: float = 0.0
) -> FaultError:
    """Of an answer that is not 200. `now_s` is Unix time, for a retry-after that is a date."""
    told = _read(body)
    detail = f"status {status}: {', '.join(sorted(told.words))} {_logged(told.message)}".strip()
    if told.words & _UNPAID:
        return _ours(detail)
    if status in CAPACITY:
        return busy(detail, retry_after_ms(headers, now_s=now_s))
    if status in TIMEOUTS:
        return late(detail)
    if status >= SERVER_ERROR:
        return away(detail)
    if status in INVALID:
        return _invalid(status, told, detail)
    return _ours(detail, key_dead=status in KEY_DEAD)


def told_error(event: Any) -> FaultError:
    """Of an error within an answer that began well."""
    told = _envelope(event)
    detail = f"error event: {', '.join(sorted(told.words))} {_logged(told.message)}".strip()
    if told.words & _BUSY:
        return busy(detail)
    if told.words & _LATE:
        return late(detail)
    if told.words & _POLICY or _TOO_LONG.search(told.message):
        return _invalid(400, told, detail)
    return away(detail)


def retry_after_ms(headers: Mapping[str, str], *, now_s: float) -> int | None:
    """How long the provider asks to be left alone, bounded; None where it does not say.

    `headers` has lower-case names. In milliseconds, seconds, or as an HTTP date.
    """
    exact = _number(headers.get("retry-after-ms", ""))
    if exact is None:
        text = headers.get("retry-after", "")
        seconds = _number(text)
        if seconds is None:
            seconds = _seconds_until(text, now_s)
        exact = None if seconds is None else seconds * 1000
    return None if exact is None else int(min(max(exact, 0.0), RETRY_AFTER_MS_MAX))


def _invalid(status: int, told: _Told, detail: str) -> FaultError:
    kind: FaultKind = "refused"
    code = Code.TOO_LARGE if status == 413 else Code.BAD_REQUEST  # noqa: PLR2004 - HTTP's own
    if told.words & _POLICY:
        kind, code = "content_policy", Code.CONTENT_POLICY
    elif "context_length_exceeded" in told.words or _TOO_LONG.search(told.message):
        kind, code = "context_window", Code.CONTEXT_LENGTH
    elif code is Code.BAD_REQUEST and told.param is None and not _is_invalid(told):
        return FaultError(Fault(kind="error", refusal=AWAY, detail=detail))
    message = _shown(told.message) or "The request was refused by the model's provider."
    param = told.param if kind == "refused" else None  # how we sized it, no field tells
    refusal = Refusal(code=code, message=message, param=param)
    return FaultError(Fault(kind=kind, refusal=refusal, detail=detail))


def _is_invalid(told: _Told) -> bool:
    return "invalid_request_error" in told.words


def _ours(detail: str, *, key_dead: bool = False) -> FaultError:
    fault = Fault(kind="error", refusal=AWAY, detail=detail, ours=True, key_dead=key_dead)
    return FaultError(fault)


def _read(body: bytes) -> _Told:
    try:
        return _envelope(msgspec.json.decode(body))
    except (msgspec.MsgspecError, RecursionError):
        return _Told(frozenset(), "", None)


def _envelope(body: Any) -> _Told:
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, str):
        return _Told(frozenset(), error, None)
    if not isinstance(error, dict):
        return _Told(frozenset(), "", None)
    words = frozenset(
        str(error[name])[:64] for name in ("type", "code") if isinstance(error.get(name), str | int)
    )
    message, param = error.get("message"), error.get("param")
    return _Told(
        words,
        message if isinstance(message, str) else "",
        param[:256] if isinstance(param, str) else None,
    )


def _shown(message: str) -> str:
    text = _CONTROL.sub(" ", _PRIVATE.sub("…", message[: 4 * MESSAGE_CHARS_MAX])).strip()
    return text if len(text) <= MESSAGE_CHARS_MAX else text[:MESSAGE_CHARS_MAX] + "…"


def _logged(message: str) -> str:
    return _shown(_ADDRESS.sub("…", message[: 4 * MESSAGE_CHARS_MAX]))


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if number == number and abs(number) != float("inf") else None  # noqa: PLR0124 - NaN


def _seconds_until(text: str, now_s: float) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp() - now_s
    except (ValueError, TypeError, OverflowError):
        return None
