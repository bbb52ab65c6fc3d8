"""What processes say to the ledger about one request.

    reserve ──► Reserved | LedgerRefused      hold the worst case, before a worker hears of it
    top_up  ──► Reserved | LedgerRefused      hold more, for an answer that is outgrowing it
    settle  ──► Settled                       the end cause and totals: post the bill, free the rest
    reconcile ► Settled                       a witness's absolute totals, any order, any number

Two-phase as in TigerBeetle's transfers: a reservation ends in exactly one of settled,
released, expired. A bill over the reservation is posted as a separate overage entry where
there is no hard cap, and cut to the reservation where there is one.
"""

import msgspec

from core.money import EndCause
from core.protocol import ServiceClass, Usage


class Reserve(msgspec.Struct, frozen=True, kw_only=True):
    """Hold `amount_micro` and open the request's usage row, in one transaction."""

    request_id: str
    gateway_id: str
    tenant_id: str
    key_id: str
    amount_micro: int
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


class Reserved(msgspec.Struct, frozen=True, kw_only=True):
    """Held. Reserving the same id with the same fields again answers the same."""

    reserved_micro: int  # in all, for this request


class LedgerRefused(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing was held. An id that was refused stays refused."""

    reason: str  # hard_cap | no_account | no_price | id_reused | not_open | away
    reserved_micro: int = 0  # of the account, for an explainable message
    posted_micro: int = 0
    hard_cap_micro: int = 0


class TopUp(msgspec.Struct, frozen=True, kw_only=True):
    """Raise a reservation to `total_micro`: absolute, so repeating it is harmless."""

    request_id: str
    tenant_id: str
    total_micro: int


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


class Witness(msgspec.Struct, frozen=True, kw_only=True):
    """Absolute totals of one attempt from one source; final = journal over checkpoint."""

    request_id: str
    attempt: int
    source: str  # gateway | journal | checkpoint
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
