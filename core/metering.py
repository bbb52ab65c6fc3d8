"""What processes say to the ledger about one request.

    reserve ──► Reserved | LedgerRefused      hold the worst case, before a worker hears of it
    top_up  ──► Reserved | LedgerRefused      hold more, for an answer that is outgrowing it
    settle  ──► Settled                       the end cause and totals: post the bill, free the rest
    reconcile ► Settled                       a witness's absolute totals, any order, any number
    adjust  ──► Adjusted | LedgerRefused      an operator's credit, refund, adjustment, new price

Two-phase as in TigerBeetle's transfers: a reservation ends in exactly one of settled,
released, expired. A bill over the reservation is posted as a separate overage entry where
there is no hard cap, and cut to the reservation where there is one.
"""

from enum import StrEnum

import msgspec

from core.idempotency import Claim, Kept
from core.money import EndCause
from core.protocol import ServiceClass, Usage


class Reserve(msgspec.Struct, frozen=True, kw_only=True):
    """Hold `amount_micro`, or as much of it as there is room for but at least `floor_micro`."""

    request_id: str
    gateway_id: str
    tenant_id: str
    key_id: str
    amount_micro: int
    floor_micro: int | None = None  # None: all or nothing
    price_id: str
    model: str  # public name asked for
    version: str
    region: str
    service_class: ServiceClass
    dialect: str  # openai | anthropic
    endpoint: str
    stream: bool
    prompt_tokens: int
    max_tokens: int  # for each choice
    choices: int = 1
    created_ms: int
    claim: Claim | None = None  # of an idempotency key: had together with the money


class Reserved(msgspec.Struct, frozen=True, kw_only=True):
    """Held: perhaps less than was asked for, where a floor was given.

    The same words again get the same answer.
    """

    reserved_micro: int  # in all, for this request


class LedgerRefused(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing was held or changed. An id that was refused a reservation stays refused.

    Reasons: key_reused, key_done, key_open, hard_cap, no_account, no_price, id_reused, not_open,
    away; of an operator's command also no_request, too_much. A claim on an idempotency key is the
    first three, and not remembered. With `hard_cap`, `limit` names what stood in the way: credit,
    account.total, account.day, account.month, key.total, key.day or key.month; the sums are its
    own, and `fits_micro` is what would have fitted under all of them.
    """

    reason: str
    limit: str = ""
    reserved_micro: int = 0
    posted_micro: int = 0
    hard_cap_micro: int = 0
    fits_micro: int = 0


class TopUp(msgspec.Struct, frozen=True, kw_only=True):
    """Raise a reservation to `total_micro`, or as near as there is room, from `floor_micro` on.

    Totals are absolute, so repeating it is harmless.
    """

    request_id: str
    tenant_id: str
    total_micro: int
    floor_micro: int | None = None  # None: all or nothing


class AttemptTotals(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt's totals as one witness knows them. The gateway's are what it accepted."""

    attempt: int
    replica_id: str
    usage: Usage


class RequestTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds as the gateway saw them; None where the request never got so far."""

    queue_ms: float | None = None  # arm to placement
    prefill_ms: float | None = None  # as the engine reports
    first_token_ms: float | None = None  # request received to first token (TTFT)
    inter_token_ms: float | None = None  # mean gap between tokens (ITL)
    total_ms: float | None = None


class Settle(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway's final word. `delivered_tokens` were written to the client's socket."""

    request_id: str
    tenant_id: str
    cause: EndCause
    attempts: tuple[AttemptTotals, ...]
    delivered_tokens: int
    timings: RequestTimings
    ended_ms: int
    kept: Kept | None = None  # the whole answer, for the key that the request has claimed


class Witness(msgspec.Struct, frozen=True, kw_only=True):
    """Absolute totals of one attempt from one source; final = journal over checkpoint."""

    request_id: str
    attempt: int
    source: str  # journal | checkpoint: a gateway's last word comes with its Settle
    usage: Usage
    final: bool
    cause: str = ""  # the engine's, on a final journal entry
    replica_id: str = ""
    at_ms: int = 0


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """The request's money after this call."""

    billed_micro: int
    metered: Usage
    cause: EndCause


class AdjustmentKind(StrEnum):
    """What an operator may do to an account."""

    CREDIT = "credit"  # prepaid money comes in, or goes back
    REFUND = "refund"  # a request's bill, or part of it, is given back
    ADJUSTMENT = "adjustment"  # any amount, for or against the tenant
    REPRICE = "reprice"  # a request as if it had been billed at another price


class Adjust(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's correction. The same id with the same words has one effect."""

    id: str
    tenant_id: str
    kind: AdjustmentKind
    amount_micro: int = 0  # signed; a refund's is above 0, a reprice has none
    request_id: str = ""  # of a refund or reprice
    price_id: str = ""  # of a reprice
    reason: str
    author: str


class Adjusted(msgspec.Struct, frozen=True, kw_only=True):
    """The entry that was written, and the account's balances after it."""

    entry: int
    delta_micro: int  # of what is posted; of the credit, for a credit
    posted_micro: int
    credit_micro: int
