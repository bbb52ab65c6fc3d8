"""Idempotency keys with a store away: never a second run."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from core.idempotency import Claim, Kept
from core.metering import LedgerRefused, Reserved
from gateway.books import SPOOLED_ANSWER_BYTES_MAX, Books
from gateway.spool import Spool
from store.ledger import Ledger
from store.postgres import Postgres, PostgresConfig, StoreAwayError
from tests.support.gateway_requests import CHAT, a_body, headers_of
from tests.support.gateway_world import Caller, World
from tests.support.ledger_commands import a_reserve, a_settle
from tests.support.ledger_database import a_tenant

pytestmark = [pytest.mark.anyio, pytest.mark.services]

CLAIM = Claim(scope="POST /", key="k", fingerprint="f")


class _Away:
    """In the place of a pool whose server cannot be reached."""

    def connection(self) -> Any:
        raise StoreAwayError("away")


async def test_a_request_with_a_key_is_refused_and_nothing_is_done(
    world: World, caller: Caller
) -> None:
    claims = world.gateway.claims
    claims._postgres, there = _Away(), claims._postgres
    async with httpx.AsyncClient(base_url=world.url, timeout=30) as client:
        said = headers_of(caller) | {"idempotency-key": "k"}
        refused = await client.post(CHAT, json=a_body(CHAT), headers=said)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        served = await client.post(CHAT, json=a_body(CHAT), headers=headers_of(caller))
        assert served.status_code == 200
        claims._postgres = there
        assert (await client.post(CHAT, json=a_body(CHAT), headers=said)).status_code == 200
    assert len(world.worker.requests) == 2


@pytest.fixture
async def books(postgres_url: str, tmp_path: Path) -> Any:
    ledger = await Ledger.open(postgres_url)
    spool = Spool(tmp_path / "spool", "gw_1", bytes_max=10_000_000)
    spool.open()
    yield Books(ledger, spool)
    await ledger.close()
    await spool.close()


async def test_a_claim_never_goes_to_the_spool(books: Books) -> None:
    books.away = True
    claiming = a_reserve("r1", claim=CLAIM)
    assert await books.reserve(claiming, hard_capped=False) == LedgerRefused(reason="away")
    plain = await books.reserve(a_reserve("r2"), hard_capped=False)
    assert isinstance(plain, Reserved)


@pytest.mark.parametrize(
    ("size", "is_kept"), [(SPOOLED_ANSWER_BYTES_MAX, True), (SPOOLED_ANSWER_BYTES_MAX + 1, False)]
)
async def test_an_answer_waits_in_the_spool_with_its_settlement(
    books: Books, postgres_url: str, size: int, *, is_kept: bool
) -> None:
    pg = await Postgres.open(PostgresConfig(database_url=postgres_url, application_name="test"))
    tenant = await a_tenant(pg)
    name = f"{tenant}_1"
    await books.reserve(a_reserve(name, tenant_id=tenant, claim=CLAIM), hard_capped=False)
    books.away = True
    kept = Kept(scope="POST /", key="k", answer=b"x" * size)
    await books.settle(a_settle(name, tenant_id=tenant, kept=kept))
    await books.recover()
    async with pg.connection() as conn:
        cursor = await conn.execute(
            "SELECT answer FROM idempotency_keys WHERE tenant_id = %s", (tenant,)
        )
        assert await cursor.fetchall() == [(kept.answer if is_kept else b"",)]
    await pg.close()
