"""The ledger when Postgres or the way to it fails: answered in time, and each word done once."""

import asyncio
from collections.abc import AsyncIterator

import psycopg
import pytest

from core.metering import Reserved
from store.ledger import Ledger, LedgerAwayError
from store.postgres import Postgres
from tests.support.fault_proxy import FaultProxy, Moment, Passage, Trap, Way
from tests.support.ledger_commands import a_reserve, a_settle, a_top_up
from tests.support.ledger_database import a_tenant, an_impatient_ledger
from tests.support.ledger_faults import assert_exact, one_request, under_load
from tests.support.postgres_faults import a_proxy, timed

pytestmark = [pytest.mark.anyio, pytest.mark.services]

ANSWER_S = 0.6  # within which every call ends, give or take a tenth
TRY_S = 0.3
CONNECT_S = 1  # an impatient ledger's
SLACK_S = 0.6  # a busy machine's


@pytest.fixture
async def proxy(postgres_url: str) -> AsyncIterator[FaultProxy]:
    async with a_proxy(postgres_url) as proxy:
        yield proxy


@pytest.fixture
async def shaky(postgres_url: str, proxy: FaultProxy) -> AsyncIterator[Ledger]:
    """A ledger beyond the proxy, with little patience."""
    ledger = an_impatient_ledger(
        proxy.via(postgres_url),
        answer_timeout_s=ANSWER_S,
        try_timeout_s=TRY_S,
        retry_pause_max_s=0.05,
    )
    yield ledger
    proxy.heal()
    await ledger.close()


@pytest.fixture
async def tenant(pg: Postgres, shaky: Ledger) -> str:
    """With one request done, so that the ledger is connected."""
    tenant = await a_tenant(pg)
    await one_request(shaky, tenant, f"{tenant}_first")
    return tenant


async def is_away_in_time(ledger: Ledger, tenant: str, name: str) -> None:
    answer, took_s = await timed(ledger.reserve(a_reserve(name, tenant_id=tenant)))
    assert isinstance(answer, LedgerAwayError)
    assert took_s < ANSWER_S * 1.1 + SLACK_S


async def test_a_slow_network_only_slows_within_the_bound(shaky, proxy, tenant, pg):
    proxy.set(
        to_server=Passage(latency_s=0.03, jitter_s=0.02),
        to_client=Passage(latency_s=0.03, jitter_s=0.02),
    )
    done, unanswered = await under_load(shaky, [tenant], lambda: asyncio.sleep(0.3))
    assert unanswered == 0
    await assert_exact(pg, [tenant], done + 1)


@pytest.mark.parametrize("way", Way)
async def test_a_network_too_slow_is_away_until_it_is_well(shaky, proxy, tenant, pg, way):
    async def slow() -> None:
        proxy.set(**{way.value: Passage(latency_s=2 * ANSWER_S)})
        await is_away_in_time(shaky, tenant, f"{tenant}_slow")
        proxy.heal()

    done, unanswered = await under_load(shaky, [tenant], slow)
    assert unanswered > 0
    await one_request(shaky, tenant, f"{tenant}_slow")
    await assert_exact(pg, [tenant], done + 2)


async def test_a_black_hole_is_away_in_time_and_soon_at_once(shaky, proxy, tenant, pg):
    names = [f"{tenant}_hole{n}" for n in range(3)]

    async def vanish() -> None:
        proxy.black_hole()
        for name in names[:2]:
            await is_away_in_time(shaky, tenant, name)
        async with asyncio.timeout(5):  # a new connection fails too, and then a while passes
            while not await says_so_at_once(shaky, tenant, names[2]):
                pass
        assert shaky.away
        proxy.heal()

    done, unanswered = await under_load(shaky, [tenant], vanish)
    assert unanswered > 0
    assert not shaky.away
    for name in names:
        await one_request(shaky, tenant, name)
    await assert_exact(pg, [tenant], done + 1 + len(names))


async def says_so_at_once(ledger: Ledger, tenant: str, name: str) -> bool:
    answer, took_s = await timed(ledger.reserve(a_reserve(name, tenant_id=tenant)))
    assert isinstance(answer, LedgerAwayError)
    return took_s < 0.05 and "for a while" in str(answer)


async def cut_often(proxy: FaultProxy, cut) -> None:
    for _ in range(12):
        await asyncio.sleep(0.02)
        cut(proxy)


async def no_way_in(proxy: FaultProxy) -> None:
    proxy.refuse()
    proxy.reset()
    await asyncio.sleep(0.3)
    proxy.heal()


@pytest.mark.parametrize("how", ["reset", "closed", "refused"])
async def test_what_is_over_soon_is_repaired_before_anyone_notices(
    postgres_url, proxy, tenant, pg, how
):
    ledger = await Ledger.open(proxy.via(postgres_url))
    tenants = [await a_tenant(pg) for _ in range(3)]
    trouble = {
        "reset": lambda: cut_often(proxy, FaultProxy.reset),
        "closed": lambda: cut_often(proxy, FaultProxy.close_links),
        "refused": lambda: no_way_in(proxy),
    }
    done, unanswered = await under_load(ledger, tenants, trouble[how])
    assert unanswered == 0
    await assert_exact(pg, tenants, done)
    await ledger.close()


async def test_a_goodbye_whose_end_comes_late_is_not_waited_for(shaky, proxy, tenant, pg):
    async def dismiss() -> None:
        proxy.set(to_client=Passage(close_delay_s=30))
        async with pg.connection() as conn:
            await conn.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name = 'impatient'"
            )
        await asyncio.sleep(TRY_S)

    done, unanswered = await under_load(shaky, [tenant], dismiss)
    assert unanswered == 0
    await assert_exact(pg, [tenant], done + 1)


async def test_words_that_arrive_after_they_were_given_up_change_nothing(shaky, proxy, tenant, pg):
    held, late = f"{tenant}_held", f"{tenant}_late"
    await shaky.reserve(a_reserve(held, tenant_id=tenant))
    old = proxy.links[0]
    old.set(to_server=Passage(stalled=True))
    words = await asyncio.gather(
        timed(shaky.reserve(a_reserve(late, tenant_id=tenant))),
        timed(shaky.top_up(a_top_up(held, tenant_id=tenant))),
    )
    assert [answer for answer, _ in words] == [
        Reserved(reserved_micro=100),
        Reserved(reserved_micro=200),
    ]
    assert len(proxy.links) == 2, "answered on a second connection"
    await shaky.settle(a_settle(held, tenant_id=tenant))
    await shaky.release(late, tenant, ended_ms=2_000)
    old.heal()  # a partition ends, and what was sent before it arrives now
    async with asyncio.timeout(5):
        while not old.ended:  # noqa: ASYNC110 - a link has no such event
            await asyncio.sleep(0.01)
    async with pg.connection() as conn:
        cursor = await conn.execute(
            "SELECT kind FROM entries WHERE request_id = ANY (%s) ORDER BY kind", ([held, late],)
        )
        assert await cursor.fetchall() == [
            ("release",), ("reserve",), ("reserve",), ("settle",), ("top_up",),
        ]  # fmt: skip
    assert await shaky.reserve(a_reserve(late, tenant_id=tenant)) == Reserved(reserved_micro=100)


def heard(proxy: FaultProxy, sqlstate: bytes) -> Trap:
    """Whether the server says it to anyone."""
    return proxy.trap(Way.TO_CLIENT, Moment(after=sqlstate), lambda _: None)


LOCK = "SELECT FROM accounts WHERE tenant_id = %s FOR UPDATE"


async def it_waits_for_a_lock(pg: Postgres) -> None:
    async with asyncio.timeout(5):
        while True:
            async with pg.connection() as conn:
                cursor = await conn.execute(
                    "SELECT FROM pg_stat_activity WHERE datname = current_database()"
                    " AND application_name = 'impatient' AND wait_event_type = 'Lock'"
                )
                if await cursor.fetchall():
                    return
            await asyncio.sleep(0.01)


async def test_a_deadlock_with_another_session_is_tried_again(postgres_url, proxy, pg):
    first, second = sorted([await a_tenant(pg), await a_tenant(pg)])
    # So patient with locks that it gets into the deadlock; and the first to look for one.
    ledger = an_impatient_ledger(
        proxy.via(f"{postgres_url}?options=-c%20deadlock_timeout%3D500ms"), lock_timeout_ms=2_000
    )
    await ledger.reserve(a_reserve(f"{first}_1", tenant_id=first))
    told = heard(proxy, b"40P01")
    other = await psycopg.AsyncConnection.connect(postgres_url)
    await other.execute("SET deadlock_timeout = '10s'")
    await other.execute(LOCK, (second,))
    batch = asyncio.gather(
        ledger.settle(a_settle(f"{first}_1", tenant_id=first)),
        ledger.reserve(a_reserve(f"{second}_1", tenant_id=second)),
    )
    await it_waits_for_a_lock(pg)  # for the second: it has the first already
    await other.execute(LOCK, (first,))  # granted once the ledger has given way
    await asyncio.wait_for(told.sprung.wait(), 5)
    await other.rollback()
    settled, held = await batch
    assert (settled.billed_micro, held) == (50, Reserved(reserved_micro=100))
    await ledger.settle(a_settle(f"{second}_1", tenant_id=second))
    await assert_exact(pg, [first, second], 2)
    await other.close()
    await ledger.close()


async def test_an_account_let_go_does_not_wait_for_one_that_is_not(postgres_url, pg):
    kept, let_go = sorted([await a_tenant(pg), await a_tenant(pg)])
    ledger = an_impatient_ledger(postgres_url, lock_timeout_ms=20, siding_lock_timeout_ms=300)
    others = [await psycopg.AsyncConnection.connect(postgres_url) for _ in range(2)]
    for other, tenant in zip(others, (kept, let_go), strict=True):
        await other.execute(LOCK, (tenant,))
    waiting = asyncio.create_task(one_request(ledger, kept, f"{kept}_1"))
    other_one = asyncio.create_task(timed(one_request(ledger, let_go, f"{let_go}_1")))
    await asyncio.sleep(0.2)  # both are in the siding
    await others[1].rollback()
    unanswered, took_s = await other_one
    assert unanswered == 0
    assert took_s < 1 + SLACK_S
    await others[0].rollback()
    assert await waiting == 0
    await assert_exact(pg, [kept, let_go], 2)
    for other in others:
        await other.close()
    await ledger.close()


async def test_a_serialization_failure_is_tried_again(postgres_url, proxy, pg):
    tenant = await a_tenant(pg)
    isolation = "default_transaction_isolation%3Drepeatable%5C%20read"
    ledger = an_impatient_ledger(
        proxy.via(f"{postgres_url}?options=-c%20{isolation}"), lock_timeout_ms=2_000
    )
    await one_request(ledger, tenant, f"{tenant}_1")
    told = heard(proxy, b"40001")
    other = await psycopg.AsyncConnection.connect(postgres_url)
    await other.execute("UPDATE accounts SET hard_cap_micro = NULL WHERE tenant_id = %s", (tenant,))
    request = asyncio.create_task(one_request(ledger, tenant, f"{tenant}_2"))
    await it_waits_for_a_lock(pg)  # on the row as it was when it began
    await other.commit()
    assert await request == 0
    assert told.sprung.is_set()
    await assert_exact(pg, [tenant], 2)
    await other.close()
    await ledger.close()


async def test_a_session_that_takes_no_writes_any_more_is_left_for_another(
    shaky, proxy, tenant, pg
):
    told = heard(proxy, b"25006")
    await shaky._lanes[0]._main._conn.execute("SET default_transaction_read_only = on")
    assert await one_request(shaky, tenant, f"{tenant}_1") == 0
    assert told.sprung.is_set()
    await assert_exact(pg, [tenant], 2)


async def test_a_server_without_room_on_its_disk_is_away_until_there_is(shaky, tenant, pg):
    async with pg.transaction() as conn:
        await conn.execute(
            "CREATE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION 'No space left on device' USING ERRCODE = '53100'; END $$"
        )
        await conn.execute(
            "CREATE TRIGGER no_room BEFORE INSERT ON entries EXECUTE FUNCTION no_room()"
        )
    try:
        await is_away_in_time(shaky, tenant, f"{tenant}_1")
    finally:
        async with pg.transaction() as conn:
            await conn.execute("DROP FUNCTION no_room CASCADE")
    assert await one_request(shaky, tenant, f"{tenant}_1") == 0
    await assert_exact(pg, [tenant], 2)


async def test_a_black_hole_does_not_keep_a_ledger_from_closing(shaky, proxy, tenant):
    proxy.black_hole()
    waiting = [
        asyncio.create_task(timed(shaky.reserve(a_reserve(f"{tenant}_{n}", tenant_id=tenant))))
        for n in range(3)
    ]
    await asyncio.sleep(0)
    _, took_s = await timed(shaky.close())
    assert took_s < ANSWER_S * 1.1 + TRY_S + CONNECT_S + SLACK_S
    assert all(isinstance(answer, LedgerAwayError) for answer, _ in await asyncio.gather(*waiting))
    with pytest.raises(LedgerAwayError, match="closed"):
        await shaky.reserve(a_reserve(tenant_id=tenant))


async def test_a_ledger_opens_without_a_server_and_fails_fast_when_it_stays_away():
    ledger = an_impatient_ledger(
        "postgresql://nobody@127.0.0.1:1/none", answer_timeout_s=0.3, try_timeout_s=0.2
    )
    with pytest.raises(LedgerAwayError):
        await ledger.reserve(a_reserve())
    await asyncio.sleep(0.3)
    assert ledger.away
    assert await says_so_at_once(ledger, "ten_1", "req_2")
    await ledger.close()
