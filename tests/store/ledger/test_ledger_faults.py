"""Postgres cut off, restarted, killed and frozen under load: every word has exactly one effect."""

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

import psutil
import pytest

from core.metering import Reserved
from core.money import EndCause
from store.ledger import Ledger, LedgerAwayError
from store.ledger_audit import audit
from store.migrate import upgrade
from store.postgres import Postgres, PostgresConfig, StoreAwayError
from tests.support.ledger_commands import a_reserve, a_settle
from tests.support.ledger_database import a_tenant, an_impatient_ledger
from tests.support.services import PostgresServer

pytestmark = [pytest.mark.anyio, pytest.mark.services]

Answer = TypeVar("Answer")


async def until_answered(ask: Callable[[], Awaitable[Answer]]) -> tuple[Answer, int]:
    """Repeat the same words until they are answered; also how often they were not."""
    for unanswered in range(100):
        try:
            return await ask(), unanswered
        except LedgerAwayError:
            await asyncio.sleep(0.05)
    raise AssertionError("never answered")


async def one_request(ledger: Ledger, tenant: str, name: str) -> int:
    asked = a_reserve(name, tenant_id=tenant)
    held, first = await until_answered(lambda: ledger.reserve(asked))
    assert held == Reserved(reserved_micro=100)
    word = a_settle(name, tenant_id=tenant)
    settled, second = await until_answered(lambda: ledger.settle(word))
    assert (settled.billed_micro, settled.cause) == (50, EndCause.COMPLETE)
    return first + second


async def a_stream_of_requests(
    ledger: Ledger, tenant: str, stop: asyncio.Event, name: str
) -> tuple[int, int]:
    done = unanswered = 0
    while not stop.is_set():
        unanswered += await one_request(ledger, tenant, f"{tenant}_{name}_{done}")
        done += 1
    return done, unanswered


async def under_load(
    ledger: Ledger, tenants: list[str], meanwhile: Callable[[], Awaitable[None]]
) -> tuple[int, int]:
    """Requests done, and words that had to be repeated, while something happens."""
    stop = asyncio.Event()
    streams = [
        asyncio.create_task(a_stream_of_requests(ledger, tenants[n % len(tenants)], stop, str(n)))
        for n in range(20)
    ]
    await meanwhile()
    await asyncio.sleep(0.1)
    stop.set()
    ended = await asyncio.gather(*streams)
    return sum(done for done, _ in ended), sum(unanswered for _, unanswered in ended)


async def assert_exact(pg: Postgres, tenants: list[str], requests: int) -> None:
    async with pg.connection() as conn:
        report = await audit(conn)
        assert report.violations == ()
        assert report.open_reservations == 0
        cursor = await conn.execute(
            "SELECT request_id, kind FROM entries WHERE tenant_id = ANY (%s)", (tenants,)
        )
        effects = Counter(await cursor.fetchall())
    assert set(effects.values()) == {1}
    assert len(effects) == 2 * requests


async def cut_lane(pg: Postgres) -> int:
    async with pg.connection() as conn:
        cursor = await conn.execute(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
            " WHERE application_name IN ('headworks ledger', 'impatient')"
            " AND datname = current_database()"
        )
        row = await cursor.fetchone()
        assert row is not None
        return int(row[0])


def freeze_all(pid: int) -> list[psutil.Process]:
    """Stop a server and its children, each of which is a group of its own."""
    server = psutil.Process(pid)
    processes = [server, *server.children(recursive=True)]
    for process in processes:
        process.suspend()
    return processes


def thaw(processes: list[psutil.Process]) -> None:
    for process in processes:
        process.resume()


@pytest.fixture(scope="module")
def mistreated_postgres(tmp_path_factory):
    """One server for all of these tests, each of which leaves it running."""
    server = PostgresServer(tmp_path_factory.mktemp("mistreated-postgres"))
    server.running.start()
    yield server
    server.running.stop()


@pytest.fixture
async def shaky(mistreated_postgres):
    """A server to mistreat, with a database on it."""
    url = mistreated_postgres.create_database(f"ledger_{secrets.token_hex(6)}")
    await asyncio.to_thread(upgrade, url)
    pg = await Postgres.open(
        PostgresConfig(
            database_url=url, application_name="test", connect_timeout_s=1, acquire_timeout_s=1.0
        )
    )
    yield mistreated_postgres, url, pg
    await pg.close()


async def test_a_connection_cut_mid_batch_loses_and_doubles_nothing(pg, ledger):
    tenants = [await a_tenant(pg) for _ in range(3)]
    cuts = 0

    async def cut_often() -> None:
        nonlocal cuts
        while cuts < 12:
            await asyncio.sleep(0.02)
            cuts += await cut_lane(pg)

    done, unanswered = await under_load(ledger, tenants, cut_often)
    assert unanswered == 0, "a cut is repaired before anyone notices"
    await assert_exact(pg, tenants, done)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_server_away_for_seconds_loses_and_doubles_nothing(shaky, how):
    server, url, pg = shaky
    tenants = [await a_tenant(pg) for _ in range(2)]
    ledger = an_impatient_ledger(url, answer_timeout_s=0.7, try_timeout_s=0.5)

    async def bounce() -> None:
        await asyncio.sleep(0.3)
        await asyncio.to_thread(getattr(server.running, how))
        await asyncio.sleep(2)
        assert ledger.away
        await asyncio.to_thread(server.running.start)
        await until_answered(lambda: ledger.reserve(a_reserve("after", tenant_id="ten_nobody")))
        assert not ledger.away

    done, unanswered = await under_load(ledger, tenants, bounce)
    assert unanswered > 0, "two seconds are longer than anyone waits"
    await assert_exact(pg, tenants, done)
    await ledger.close()


@pytest.mark.slow
async def test_a_short_absence_is_waited_out(shaky):
    server, url, pg = shaky
    tenants = [await a_tenant(pg)]
    ledger = await Ledger.open(url)

    async def bounce() -> None:
        await asyncio.sleep(0.2)
        await asyncio.to_thread(server.running.stop)
        await asyncio.to_thread(server.running.start)

    done, unanswered = await under_load(ledger, tenants, bounce)
    assert unanswered == 0
    await assert_exact(pg, tenants, done)
    await ledger.close()


@pytest.mark.slow
async def test_a_frozen_server_is_given_up_in_time_and_replayed(shaky):
    server, url, pg = shaky
    tenants = [await a_tenant(pg)]
    ledger = an_impatient_ledger(url, answer_timeout_s=0.7, try_timeout_s=0.5)
    waits_s = []

    async def freeze() -> None:
        await asyncio.sleep(0.2)
        frozen = freeze_all(server.running.pid)
        try:
            for _ in range(3):
                started = asyncio.get_running_loop().time()
                with pytest.raises(LedgerAwayError):
                    await ledger.reserve(a_reserve("frozen", tenant_id=tenants[0]))
                waits_s.append(asyncio.get_running_loop().time() - started)
        finally:
            thaw(frozen)

    done, unanswered = await under_load(ledger, tenants, freeze)
    assert unanswered > 0
    assert max(waits_s) < 1.2
    await until_answered(lambda: ledger.reserve(a_reserve("frozen", tenant_id=tenants[0])))
    await ledger.release("frozen", tenants[0], ended_ms=2_000)
    await assert_exact(pg, tenants, done + 1)
    await ledger.close()


@pytest.mark.slow
async def test_reads_and_transactions_say_away_within_their_bounds(shaky):
    server, _, pg = shaky
    async with pg.connection() as conn:
        await conn.execute("SELECT 1")
    await asyncio.to_thread(server.running.stop)
    started = asyncio.get_running_loop().time()
    with pytest.raises(StoreAwayError):
        async with pg.connection() as conn:
            await conn.execute("SELECT 1")
    with pytest.raises(StoreAwayError):
        async with pg.transaction() as conn:
            await conn.execute("SELECT 1")
    assert asyncio.get_running_loop().time() - started < 4
    await asyncio.to_thread(server.running.start)
    async with pg.connection() as conn:
        await conn.execute("SELECT 1")


@pytest.mark.slow
async def test_a_frozen_server_ends_a_transaction_within_its_bound(shaky):
    server, url, _ = shaky
    config = PostgresConfig(
        database_url=url, application_name="brief", connect_timeout_s=1, transaction_timeout_s=0.5
    )
    pg = await Postgres.open(config)
    async with pg.transaction() as conn:
        await conn.execute("SELECT 1")
    frozen = freeze_all(server.running.pid)
    try:
        started = asyncio.get_running_loop().time()
        with pytest.raises(StoreAwayError):
            async with pg.transaction() as conn:
                await conn.execute("SELECT 1")
        assert asyncio.get_running_loop().time() - started < 1
    finally:
        thaw(frozen)
    async with pg.transaction() as conn:
        await conn.execute("SELECT 1")
    await pg.close()


async def test_a_ledger_opens_without_a_server_and_fails_fast_when_it_stays_away():
    ledger = an_impatient_ledger(
        "postgresql://nobody@127.0.0.1:1/none", answer_timeout_s=0.3, try_timeout_s=0.2
    )
    with pytest.raises(LedgerAwayError):
        await ledger.reserve(a_reserve())
    await asyncio.sleep(0.3)
    assert ledger.away
    started = asyncio.get_running_loop().time()
    with pytest.raises(LedgerAwayError, match="for a while"):
        await ledger.reserve(a_reserve())
    assert asyncio.get_running_loop().time() - started < 0.05
    await ledger.close()
