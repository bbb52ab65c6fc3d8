"""`Idempotency-Key`: what a caller claims, and what it is told of a key in use. Pure.

The key is the caller's own word; it counts for one tenant, method and path. What must be equal
for a repeat to be one is the body as JSON, however it is written, and the headers of ours and
of the dialect that an answer follows from; not whether it is streamed, for a kept answer can
be told either way, and not how long the caller waits.
"""

import hashlib
from collections.abc import Iterable

import msgspec

from core.errors import Code, Refusal, RefusedError, refuse
from core.idempotency import Claim, KeyRefused

HEADER = b"idempotency-key"
KEY_CHARS_MAX = 255
REPLAYED = {"x-headworks-replayed": "true"}

# Of the answer, and not of how it is told or waited for.
_ANSWERING = frozenset({b"anthropic-version", b"anthropic-beta"})
_OURS = b"x-headworks-"
_WAITING = frozenset(
    {
        b"x-headworks-deadline-ms",
        b"x-headworks-first-token-ms",
        b"x-headworks-idle-ms",
        b"x-headworks-cache",
        b"x-headworks-cache-ttl-s",
    }
)
_TOLD = ("stream", "stream_options", "timeout")

_NAME = "Idempotency-Key"

REFUSALS: dict[KeyRefused, Refusal] = {
    "key_open": Refusal(
        code=Code.CONFLICT,
        message=f"A request with this {_NAME} is still under way.",
        param=_NAME,
        retry_after_ms=1_000,
    ),
    # Somebody was faster than we: whoever comes again has that answer.
    "key_done": Refusal(
        code=Code.CONFLICT,
        message=f"A request with this {_NAME} has just been answered. Please repeat it.",
        param=_NAME,
        retry_after_ms=100,
    ),
    "key_reused": Refusal(
        code=Code.UNPROCESSABLE,
        message=f"This {_NAME} was used for another request.",
        param=_NAME,
    ),
}
UNKEPT = Refusal(
    code=Code.UNPROCESSABLE,
    message=f"The request with this {_NAME} was answered, and its answer was too large to keep.",
    param=_NAME,
)
UNREADABLE = Refusal(
    code=Code.UNPROCESSABLE,
    message=f"The request with this {_NAME} was answered, and its answer cannot be read any more.",
    param=_NAME,
)
AWAY = Refusal(
    code=Code.UNAVAILABLE,
    message=f"The {_NAME} cannot be checked at the moment, and nothing was done. Please retry.",
    param=_NAME,
)

_json = msgspec.json.Encoder(order="sorted")

Headers = Iterable[tuple[bytes, bytes]]


def key_of(headers: Headers) -> str | None:
    """The header's, if it is there. Raises RefusedError for a bad one."""
    said = {value for name, value in headers if name == HEADER}
    if not said:
        return None
    if len(said) > 1:
        raise _bad("is given twice")
    try:
        key = said.pop().decode()
    except UnicodeDecodeError:
        raise _bad("is not UTF-8") from None
    if not key.strip() or not key.isprintable():
        raise _bad("must be of printable characters")
    if len(key) > KEY_CHARS_MAX:
        raise _bad(f"must be at most {KEY_CHARS_MAX} characters")
    return key


def claim_of(
    key: str, headers: Headers, *, scope: str, body: bytes, kept_s: int, holder: str
) -> Claim:
    """What a request with this key claims. `body` is JSON."""
    return Claim(
        scope=scope,
        key=key,
        fingerprint=_fingerprint(headers, body),
        kept_s=kept_s,
        holder=holder,
    )


def told_of(
    claim: Claim, *, fingerprint: str, answer: bytes | None, is_open: bool
) -> bytes | Refusal | None:
    """A kept answer, why there is none to be had, or None: the key may be claimed."""
    if fingerprint != claim.fingerprint:
        return REFUSALS["key_reused"]
    if answer is not None:
        return answer or UNKEPT
    return REFUSALS["key_open"] if is_open else None


def _fingerprint(headers: Headers, body: bytes) -> str:
    value = msgspec.json.decode(body)
    assert type(value) is dict, "it has been parsed"
    asked = {name: of for name, of in value.items() if name not in _TOLD}
    said = sorted(
        (name.decode("latin-1"), text.decode("latin-1"))
        for name, text in headers
        if name in _ANSWERING or (name.startswith(_OURS) and name not in _WAITING)
    )
    return hashlib.sha256(_json.encode([asked, said])).hexdigest()


def _bad(why: str) -> RefusedError:
    return refuse(Code.BAD_REQUEST, f"{_NAME}: {why}", param=_NAME)
