"""Gathers what `check` judges: the books, each replica's own word, the dispatcher's accounts.

The parts are asked side by side and each within its bound; one that is away becomes findings
with the reason, so that a check tells most just when most is wrong.
"""

import asyncio

import msgspec

from control_plane import findings
from control_plane.findings import AskedReplica, Item, Report, Rules
from control_plane.services import Services
from core.fleet import ReplicaState
from store import fleet, ledger_audit
from store.audit import Books, read_books
from store.dispatch_audit import DispatchAudit
from store.postgres import StoreAwayError

REPLICAS_MAX = 1000
SECOND_LOOK_S = 1.0
NOT_RUNNING = (ReplicaState.STOPPED, ReplicaState.LOST)


async def audit(services: Services, *, quiescent: bool) -> Report:
    """Never raises for a part that is away."""
    settings = services.settings
    rules = Rules(
        quiescent=quiescent, lease_ms=settings.lease_ms, request_ms_max=settings.request_ms_max
    )
    books, replicas, dispatch = await asyncio.gather(
        _books(services), _replicas(services), services.announcer.audit()
    )
    items = [
        *_book_items(books, rules),
        *_replica_items(books, replicas, rules),
        *_dispatch_items(dispatch, rules),
    ]
    return findings.report(items, rules)


async def _books(services: Services) -> Books | str:
    """A reason where there are none."""
    try:
        async with services.books.connection() as conn:
            books = await read_books(conn)
            if books.ledger.violations:
                await asyncio.sleep(SECOND_LOOK_S)
                again = findings.lasting(books.ledger, await ledger_audit.audit(conn))
                books = msgspec.structs.replace(books, ledger=again)
    except StoreAwayError as error:
        return f"Postgres: {error}"
    return books


async def _replicas(services: Services) -> list[AskedReplica] | str:
    """Those that should be running, each with its answer."""
    try:
        async with services.postgres.connection() as conn:
            rows = await fleet.replicas_page(conn, limit=REPLICAS_MAX)
    except StoreAwayError as error:
        return f"Postgres: {error}"
    running = [row for row in rows if row.state not in NOT_RUNNING]
    answers = await services.replicas.loads([row.url for row in running])
    return [
        AskedReplica(replica_id=row.replica_id, boot_id=row.boot_id, answer=answer)
        for row, answer in zip(running, answers, strict=True)
    ]


def _book_items(books: Books | str, rules: Rules) -> list[Item]:
    if isinstance(books, str):
        return findings.unasked(findings.BOOK_ITEMS, books)
    return findings.book_items(books, rules)


def _replica_items(
    books: Books | str, replicas: list[AskedReplica] | str, rules: Rules
) -> list[Item]:
    if isinstance(replicas, str):
        return findings.unasked(findings.REPLICA_ITEMS, replicas)
    known = None if isinstance(books, str) else books
    return [findings.kv_blocks(replicas, rules), findings.journals(known, replicas, rules)]


def _dispatch_items(seen: DispatchAudit | str, rules: Rules) -> list[Item]:
    if isinstance(seen, str):
        return findings.unasked(findings.DISPATCH_ITEMS, seen)
    return [findings.tickets(seen, rules), findings.dispatcher_accounts(seen, rules)]
