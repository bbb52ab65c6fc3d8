"""Idempotency keys: which request may answer one, and whose bills its answer takes back.

    free ─ claim ─► claimed ─ the request ends with an answer ─► answered ─ expires ─► free
                      ▲   └── it ends without one ──┐
                      └────────── claim ────────────┘     the next generation

A key is not opened again by anybody: it is open as soon as its request has ended, however that
came to be, a sweeper included. A claim is decided where the request's money is reserved, in the
same transaction, so that of any number of gateways one has it. Invariant: one key has at most
one request under way, and at most one answer.
"""

from typing import Literal, TypeAlias

import msgspec

SUPERSEDED_MAX = 100  # attempts whose bills one answer may take back

KeyRefused: TypeAlias = Literal["key_reused", "key_done", "key_open"]


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A request's wish to be the one that answers a key of its tenant's.

    `fingerprint` is of everything in the request that the answer follows from. A request that
    goes on under another id, at another target say, is the same `holder` and keeps its key.
    """

    scope: str  # method and path
    key: str  # the caller's own word
    fingerprint: str
    kept_s: int = 86_400  # how long its answer is kept
    holder: str = ""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, to be kept under the key; none in it: it was too large to keep."""

    scope: str
    key: str
    answer: bytes


class KeyRow(msgspec.Struct, frozen=True, kw_only=True):
    """A key as it stands. `answer` is None until there is one."""

    fingerprint: str
    request_id: str  # whose answer it is, or is to be
    holder: str = ""
    generation: int
    superseded: tuple[str, ...] = ()  # requests before it that may cost something
    answer: bytes | None = None
    expires_ms: int


def refused(row: KeyRow | None, claim: Claim, *, is_open: bool, now_ms: int) -> KeyRefused | None:
    """Why this claim may not have the key, in this order; `is_open`: its request has not ended."""
    if row is None or (row.expires_ms <= now_ms and not is_open):
        return None
    if row.fingerprint != claim.fingerprint:
        return "key_reused"
    if row.answer is not None:
        return "key_done"
    is_ours = claim.holder != "" and claim.holder == row.holder
    return "key_open" if is_open and not is_ours else None


def claimed(
    row: KeyRow | None, claim: Claim, request_id: str, *, may_cost: bool, now_ms: int
) -> KeyRow:
    """The key as this request has it. `may_cost`: the request before may be billed, or is."""
    expires_ms = now_ms + claim.kept_s * 1000
    if row is None or row.expires_ms <= now_ms:
        return KeyRow(
            fingerprint=claim.fingerprint,
            request_id=request_id,
            holder=claim.holder,
            generation=1,
            expires_ms=expires_ms,
        )
    superseded = (*row.superseded, row.request_id) if may_cost else row.superseded
    return msgspec.structs.replace(
        row,
        request_id=request_id,
        holder=claim.holder,
        generation=row.generation + 1,
        superseded=superseded[-SUPERSEDED_MAX:],
        expires_ms=expires_ms,
    )
