"""A server killed, out of connections, and replaced by its standby: pool and ledger together."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator

import psycopg
import pytest

from store.ledger import Ledger
from store.migrate import upgrade
from store.postgres import Postgres, PostgresConfig, ReadOnlyError, StoreAwayError
from tests.support.fault_proxy import FaultProxy
from tests.support.ledger_commands import a_reserve
from tests.support.ledger_database import a_tenant, an_impatient_ledger
from tests.support.ledger_faults import assert_exact, one_request, under_load, until_answered
from tests.support.postgres_faults import Standby, a_proxy, timed
from tests.support.services import PostgresServer, open_directory

pytestmark = [pytest.mark.anyio, pytest.mark.services]

CONNECTIONS = 12
ANSWER_S = 0.6
SLACK_S = 0.6  # a busy machine's


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """For all of these tests, each of which leaves it running."""
    with open_directory("mistreated-postgres") as directory:
        server = PostgresServer(
            directory,
            max_connections=str(CONNECTIONS),
            superuser_reserved_connections="0",
            synchronous_commit="remote_apply",  # local while there is no standby
        )
        server.running.start()
        yield server
        server.running.stop()


@pytest.fixture
async def url(server: PostgresServer) -> str:
    url = server.create_database(f"ledger_{secrets.token_hex(6)}")
    await asyncio.to_thread(upgrade, url)
    return url


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[FaultProxy]:
    async with a_proxy(url) as proxy:
        yield proxy


@pytest.fixture
async def pg(url: str, proxy: FaultProxy) -> AsyncIterator[Postgres]:
    pg = await Postgres.open(
        PostgresConfig(
            database_url=proxy.via(url),
            application_name="pool",
            connections_max=2,
            connect_timeout_s=1,
            acquire_timeout_s=1.0,
        )
    )
    yield pg
    await pg.close()


@pytest.fixture
async def ledger(url: str, proxy: FaultProxy) -> AsyncIterator[Ledger]:
    ledger = an_impatient_ledger(proxy.via(url), answer_timeout_s=ANSWER_S, try_timeout_s=0.4)
    yield ledger
    await ledger.close()


async def test_a_killed_server_loses_and_doubles_nothing(server, pg, ledger):
    tenants = [await a_tenant(pg) for _ in range(2)]

    async def die_and_rise() -> None:
        await asyncio.sleep(0.2)
        await asyncio.to_thread(server.running.kill)
        answer, took_s = await timed(read(pg))
        assert isinstance(answer, StoreAwayError)
        assert took_s < 1 + SLACK_S
        await asyncio.sleep(0.3)
        assert ledger.away
        await asyncio.to_thread(server.running.start)
        await until_answered(lambda: ledger.reserve(a_reserve("after", tenant_id="ten_nobody")))

    done, unanswered = await under_load(ledger, tenants, die_and_rise)
    assert unanswered > 0, "a second is longer than anyone waits"
    assert not ledger.away
    await assert_exact(pg, tenants, done)


async def test_a_server_out_of_connections_is_away_until_some_are_free(
    server, url, proxy, pg, ledger
):
    tenant = await a_tenant(pg)
    await one_request(ledger, tenant, f"{tenant}_1")
    proxy.reset()
    others = [await psycopg.AsyncConnection.connect(url) for _ in range(await free_places(url))]
    with pytest.raises(psycopg.OperationalError, match="too many clients"):
        await psycopg.AsyncConnection.connect(url)
    answer, took_s = await timed(ledger.reserve(a_reserve(f"{tenant}_2", tenant_id=tenant)))
    assert isinstance(answer, StoreAwayError)
    assert took_s < ANSWER_S * 1.1 + SLACK_S
    assert ledger.away
    answer, took_s = await timed(read(pg))
    assert isinstance(answer, StoreAwayError)
    assert took_s < 1 + SLACK_S
    for other in others:
        await other.close()
    await one_request(ledger, tenant, f"{tenant}_2")
    await read_soon(pg)
    await assert_exact(pg, [tenant], 2)


async def free_places(url: str) -> int:
    """How many more connections the server takes."""
    taken: list[psycopg.AsyncConnection] = []
    async with asyncio.timeout(10):
        while len(taken) < CONNECTIONS:
            try:
                taken.append(await psycopg.AsyncConnection.connect(url))
            except psycopg.OperationalError:
                break
    for other in taken:
        await other.close()
    await asyncio.sleep(0.1)
    return len(taken)


async def read(pg: Postgres) -> None:
    async with pg.connection() as conn:
        await conn.execute("SELECT 1")


async def read_soon(pg: Postgres) -> None:
    async with asyncio.timeout(5):
        while isinstance((await timed(read(pg)))[0], StoreAwayError):  # noqa: ASYNC110 - as it says
            await asyncio.sleep(0.05)


async def test_a_standby_that_takes_over_has_everything_that_was_answered(
    server, url, proxy, pg, ledger
):
    tenants = [await a_tenant(pg) for _ in range(2)]
    with open_directory("standby") as directory:
        standby = Standby(server, directory)
        standby.running.start()
        try:
            await be_followed(server)

            async def fail_over() -> None:
                await asyncio.sleep(0.2)
                await asyncio.to_thread(server.running.kill)
                proxy.upstream = ("127.0.0.1", standby.embedded.port)
                await read_soon(pg)  # a standby can be read
                answer, _ = await timed(a_tenant(pg))
                assert isinstance(answer, ReadOnlyError)
                answer, took_s = await timed(ledger.reserve(a_reserve(tenant_id=tenants[0])))
                assert isinstance(answer, StoreAwayError)
                assert took_s < ANSWER_S * 1.1 + SLACK_S
                assert ledger.away, "a standby is as good as nobody"
                await asyncio.to_thread(standby.promote)

            done, unanswered = await under_load(ledger, tenants, fail_over)
            assert unanswered > 0
            tenants.append(await a_tenant(pg))
            await one_request(ledger, tenants[2], "after")
            await assert_exact(pg, tenants, done + 1)
        finally:
            standby.running.stop()
            server.running.stop()
            server.running.start()  # for the other tests
            await be_alone(server)


async def be_followed(server: PostgresServer) -> None:
    """From now on a commit is answered when the standby has it."""
    async with await admin(server) as conn:
        await conn.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        await conn.execute("SELECT pg_reload_conf()")
        async with asyncio.timeout(10):
            while True:
                cursor = await conn.execute("SELECT sync_state FROM pg_stat_replication")
                if await cursor.fetchall() == [("sync",)]:
                    return
                await asyncio.sleep(0.02)


async def be_alone(server: PostgresServer) -> None:
    async with await admin(server) as conn:
        await conn.execute("ALTER SYSTEM RESET synchronous_standby_names")
        await conn.execute("SELECT pg_reload_conf()")


async def admin(server: PostgresServer) -> psycopg.AsyncConnection:
    return await psycopg.AsyncConnection.connect(server.embedded.maintenance_url, autocommit=True)
