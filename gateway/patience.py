"""How long one request may take, by whoever says so first: pure.

A caller speaks in headers of ours, in the body's `timeout`, or not at all; of several bounds the
earliest holds, and none passes what we allow. Invariant: nothing a caller says makes a request
live longer than it would have lived without it.
"""

import re
from collections.abc import Iterable

import msgspec

from core.errors import Code, refuse

DEADLINE_HEADER = b"x-headworks-deadline-ms"
FIRST_TOKEN_HEADER = b"x-headworks-first-token-ms"
IDLE_HEADER = b"x-headworks-idle-ms"
# What the official SDKs say of themselves: seconds without a byte until they give up.
READ_TIMEOUT_HEADER = b"x-stainless-read-timeout"
DIGITS_MAX = 12

_SECONDS = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,9})?")

Headers = Iterable[tuple[bytes, bytes]]


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Ours, in milliseconds: what holds where a caller says nothing, and the most there is."""

    deadline_ms: int
    first_token_ms: int
    idle_ms: int


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """One request's, in milliseconds: of the whole, of its first token, of each one after."""

    whole_ms: int
    first_token_ms: int
    idle_ms: int


def patience(headers: Headers, bounds: Bounds, *, tenant_ms_max: int = 0) -> Patience:
    """What the headers say. `tenant_ms_max` 0 is no bound of the tenant's.

    Raises RefusedError for one of our headers that is no positive number of milliseconds.
    """
    said = dict(headers)
    whole_ms = bounds.deadline_ms
    if tenant_ms_max:
        whole_ms = min(whole_ms, tenant_ms_max)
    whole_ms = min(whole_ms, _said_ms(said, DEADLINE_HEADER) or whole_ms)
    return Patience(
        whole_ms=whole_ms,
        first_token_ms=min(
            bounds.first_token_ms, whole_ms, _said_ms(said, FIRST_TOKEN_HEADER) or whole_ms
        ),
        idle_ms=min(bounds.idle_ms, whole_ms, _said_ms(said, IDLE_HEADER) or whole_ms),
    )


def shortened(
    given: Patience, headers: Headers, *, timeout_s: float | None, stream: bool
) -> Patience:
    """The same, with what only the body tells: its `timeout`, and whether it is a stream.

    The SDKs' read timeout counts for whole answers alone. There not a byte comes before the
    last token, so a client that waits no longer is gone by then, and would ask again beside its
    first request. A stream says something every few seconds, and may last for hours.
    """
    whole_ms = given.whole_ms
    if timeout_s is not None:
        whole_ms = min(whole_ms, _ms(timeout_s))
    hint_s = None if stream else _read_timeout_s(dict(headers).get(READ_TIMEOUT_HEADER))
    if hint_s:
        whole_ms = min(whole_ms, _ms(hint_s))
    return msgspec.structs.replace(given, whole_ms=whole_ms)


def bounded(given: Patience, ms_max: int) -> Patience:
    """The same, within what the caller may have of this model; 0 is no bound."""
    whole_ms = min(given.whole_ms, ms_max) if ms_max else given.whole_ms
    return msgspec.structs.replace(given, whole_ms=whole_ms)


def _said_ms(headers: dict[bytes, bytes], name: bytes) -> int | None:
    value = headers.get(name)
    if value is None:
        return None
    if not value.isdigit() or len(value) > DIGITS_MAX or int(value) == 0:
        header = name.decode()
        message = f"{header} is not a positive number of milliseconds."
        raise refuse(Code.BAD_REQUEST, message, param=header)
    return int(value)


def _read_timeout_s(value: bytes | None) -> float | None:
    """A hint that cannot be read is none: it is the SDK's word, not its user's."""
    if value is None or _SECONDS.fullmatch(value) is None:
        return None
    return float(value)


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))
