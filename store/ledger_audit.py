"""Whether the ledger is what it should be: each rule is a query that lists its exceptions.

A read of everything, in one snapshot. It changes nothing and repairs nothing.
"""

import msgspec

from core.money import EndCause
from store.ledger import BILLING_CAUSES
from store.postgres import Connection
from store.queries import load
from store.rows import struct_row

EXCEPTIONS_MAX = 20  # listed for each rule

_sql = load("ledger_audit")

# Rule: the statement that lists its exceptions.
_RULES = {
    "an account's balances are the sum of its entries": "balance",
    "entries follow one another without a gap": "sequence",
    "the hash chain covers every entry": "chain",
    "what is reserved is what open requests hold": "reserved",
    "what is posted is what requests cost": "posted",
    "a request is adjusted by what operators said": "adjusted",
    "an account knows its caps": "caps",
    "a cap has counted what its requests hold and cost": "windows",
    "a request is open or ended": "open_pairs",
    "a request is kept in its month": "months",
    "every ended request has one end cause": "end_cause",
    "metered is what the witnesses say": "metered",
    "billed is the end cause's policy applied to metered": "billed",
    "no request costs less than nothing": "cost",
    "nothing is delivered that was not metered": "delivered",
}


class LapsedGateway(msgspec.Struct, frozen=True, kw_only=True):
    """A silent gateway that still holds reservations. The sweeper should have ended them."""

    gateway_id: str
    reservations: int
    silent_ms: int


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """A rule, and what breaks it."""

    rule: str
    subject: str  # tenant, request or entry
    problem: str


class LedgerAudit(msgspec.Struct, frozen=True, kw_only=True):
    """At most EXCEPTIONS_MAX violations of each rule."""

    open_reservations: int
    oldest_open_ms: int
    lapsed_gateways: tuple[LapsedGateway, ...]
    unconfirmed_attempts: int  # ended, and no journal has its last word yet
    violations: tuple[Violation, ...]


async def audit(conn: Connection) -> LedgerAudit:
    """Read it all."""
    async with conn.transaction():
        await conn.execute(_sql["one_snapshot"])
        cursor = await conn.execute(_sql["open_reservations"])
        held = await cursor.fetchone()
        cursor = await conn.execute(_sql["unconfirmed"])
        unconfirmed = await cursor.fetchone()
        assert held is not None
        assert unconfirmed is not None
        return LedgerAudit(
            open_reservations=held[0],
            oldest_open_ms=held[1],
            lapsed_gateways=await _lapsed(conn),
            unconfirmed_attempts=unconfirmed[0],
            violations=await _violations(conn),
        )


async def _lapsed(conn: Connection) -> tuple[LapsedGateway, ...]:
    async with conn.cursor(row_factory=struct_row(LapsedGateway)) as cursor:
        await cursor.execute(_sql["lapsed_gateways"], {"limit": EXCEPTIONS_MAX})
        return tuple(await cursor.fetchall())


async def _violations(conn: Connection) -> tuple[Violation, ...]:
    parameters = {
        "limit": EXCEPTIONS_MAX,
        "causes": [cause.value for cause in EndCause],
        "billing_causes": BILLING_CAUSES,
    }
    found = []
    for rule, statement in _RULES.items():
        cursor = await conn.execute(_sql[statement], parameters)
        found += [
            Violation(rule=rule, subject=subject, problem=problem)
            for subject, problem in await cursor.fetchall()
        ]
    return tuple(found)
