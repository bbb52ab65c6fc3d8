"""Books between a spool on a real disk and Postgres behind a fault proxy: nothing lost or doubled.

Whatever the fault, a hard-capped tenant is refused and held nothing, another is served, every
call ends within its bound, and after the fault each request is in the books exactly once.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psycopg
import pytest

from core.ledger import release
from core.money import EndCause
from gateway.books import AWAY, Books
from gateway.spool import Record, Spool
from store.accounts import account, set_hard_cap
from store.ledger import Ledger
from store.ledger_audit import audit
from tests.support.disks import files_of_at_most
from tests.support.fault_proxy import FaultProxy, Link, Moment, Passage, Way
from tests.support.ledger_commands import a_reserve, a_settle, a_witness
from tests.support.ledger_database import an_impatient_ledger
from tests.support.postgres_faults import READY, timed
from tests.support.till import Till, a_till

pytestmark = [pytest.mark.anyio, pytest.mark.services]

ANSWER_S = 0.3
SLACK_S = 0.6  # a busy machine's


@pytest.fixture
async def till(postgres_url: str, tmp_path: Path) -> AsyncIterator[Till]:
    async with a_till(postgres_url, tmp_path, answer_s=ANSWER_S) as till:
        yield till


def too_slow(proxy: FaultProxy) -> None:
    proxy.set(to_client=Passage(latency_s=2 * ANSWER_S))


def deaf(proxy: FaultProxy) -> None:
    proxy.set(to_server=Passage(stalled=True))


def mute(proxy: FaultProxy) -> None:
    proxy.set(to_client=Passage(stalled=True))


def gone(proxy: FaultProxy) -> None:
    proxy.refuse()
    proxy.reset()


def does_it_and_dies(proxy: FaultProxy) -> None:
    proxy.refuse()
    proxy.trap(Way.TO_CLIENT, Moment(before=READY), Link.reset)


@pytest.mark.parametrize("fault", [too_slow, deaf, mute, gone, does_it_and_dies])
async def test_the_capped_are_refused_and_the_others_served_and_booked_once(till, fault):
    open_before = [await till.begin(), await till.begin(till.capped)]
    fault(till.proxy)
    took_s = await till.refusal_of_the_capped()
    assert took_s < ANSWER_S * 1.1 + SLACK_S
    assert till.books.away
    names = []
    for _ in range(10):
        name, took_s = await timed(till.request())
        assert took_s < SLACK_S, "on disk at once"
        names.append(name)
    assert await till.refusal_of_the_capped() < SLACK_S
    for tenant, name in zip((till.free, till.capped), open_before, strict=True):
        await till.books.settle(a_settle(name, tenant_id=tenant))
    await till.books.recover()
    assert till.books.away, "nothing changes while it is away"
    till.proxy.heal()
    await till.well_again()
    assert await till.billed(till.free) == dict.fromkeys([open_before[0], *names], 50)
    billed = await till.billed(till.capped)
    assert billed[open_before[1]] == 50
    assert sum(billed.values()) == 2 * 50, "what was refused is not billed"
    assert till.books.refused_words == 0
    assert await till.request(till.capped) in await till.billed(till.capped)


async def test_a_reservation_whose_answer_was_lost_is_neither_held_nor_held_twice(till):
    for tenant in (till.capped, till.free):
        does_it_and_dies(till.proxy)
        if tenant == till.capped:
            await till.refusal_of_the_capped()
        else:
            await till.request()
        async with till.pg.connection() as conn:
            row = await account(conn, tenant)
        assert row is not None
        assert row.reserved_micro == 100, "the server did it"
        till.proxy.heal()
        await till.well_again()
    assert list((await till.billed(till.free)).values()) == [50]
    assert sum((await till.billed(till.capped)).values()) == 50


async def test_new_work_goes_to_a_ledger_that_is_back_whatever_still_waits(till, postgres_url):
    """The load never pauses, so the spool never would be empty; the capped must not wait for it."""
    till.ledger = await Ledger.open(till.proxy.via(postgres_url))  # with a gateway's patience
    till.books = Books(till.ledger, till.spool)
    gone(till.proxy)
    till.books.away = True  # it was noticed
    names = [await till.request()]
    late = await till.begin()
    over = asyncio.Event()

    async def keep_on(tenant: str) -> list[str]:
        mine = []
        while not over.is_set():
            mine.append(await till.request(tenant))
        return mine

    streams = [asyncio.create_task(keep_on(till.free)) for _ in range(4)]
    await asyncio.sleep(0.1)
    till.proxy.heal()
    await till.reachable()
    await till.books.recover()
    await till.request(till.capped)
    await till.books.settle(a_settle(late, tenant_id=till.free))  # after its beginning, wherever
    over.set()
    for stream in streams:
        names += await stream
    await till.well_again()
    assert await till.billed(till.free) == dict.fromkeys([*names, late], 50)
    assert till.books.refused_words == 0
    await till.ledger.close()


async def test_an_account_that_somebody_keeps_locked_is_no_reason_to_refuse_another(
    till, postgres_url
):
    till.ledger = an_impatient_ledger(
        till.proxy.via(postgres_url), answer_timeout_s=ANSWER_S, lock_timeout_ms=20
    )
    till.books = Books(till.ledger, till.spool)
    async with await psycopg.AsyncConnection.connect(postgres_url) as other:
        await other.execute("SELECT FROM accounts WHERE tenant_id = %s FOR UPDATE", (till.free,))
        locked = asyncio.create_task(till.request())
        while not locked.done():
            await till.request(till.capped)
            await asyncio.sleep(0.01)
        assert not till.books.away
        assert till.spool.size_bytes > 0
        await till.request(till.capped)
        assert await till.books.recover() == 0
        await till.request(till.capped)
    await till.well_again()
    assert await till.billed(till.free) == {await locked: 50}
    await till.ledger.close()


@pytest.mark.parametrize("way", Way)
async def test_a_replay_cut_at_any_byte_is_made_up_for(till, way):
    names = [await till.request()]
    sprung = 0
    for at in range(1, 6_000, 750):
        till.books.away = True  # for the last thing that was heard
        names += await asyncio.gather(*(till.request() for _ in range(3)))
        trap = till.proxy.trap(way, Moment(after_bytes=at), Link.reset)
        await till.well_again()
        sprung += trap.sprung.is_set()
        till.proxy.heal()
    assert sprung > 3
    assert await till.billed(till.free) == dict.fromkeys(names, 50)


async def test_a_replay_that_stops_in_the_middle_is_resumed(till):
    gone(till.proxy)
    names = [await till.request() for _ in range(20)]
    size = till.spool.size_bytes
    till.proxy.heal()
    await till.reachable()
    last = names[-1].encode()
    trap = till.proxy.trap(Way.TO_SERVER, Moment(after=last), gone_from_here(till.proxy))
    assert await till.books.recover() == 0
    assert trap.sprung.is_set()
    assert till.books.away
    assert 0 < till.spool.size_bytes < size, "what was taken is not kept"
    till.proxy.heal()
    await till.well_again()
    assert await till.billed(till.free) == dict.fromkeys(names, 50)


def gone_from_here(proxy: FaultProxy) -> Callable[[Link], None]:
    def act(link: Link) -> None:
        proxy.refuse()
        link.reset()

    return act


async def test_words_are_told_in_the_order_in_which_they_were_said(till):
    """Reservation, witnesses and end; a release that must come before a late reservation."""
    gone(till.proxy)
    name = await till.begin()
    witness = a_witness(name, source="checkpoint", final=False, cause="")
    await till.spool.append(Record(witness=witness))
    await till.books.settle(a_settle(name, tenant_id=till.free))
    never = f"{till.free}_never"
    await till.books.settle(release(never, till.free, 1))
    till.proxy.heal()
    await till.well_again()
    assert await till.billed(till.free) == {name: 50}
    held = await till.books.reserve(a_reserve(never, tenant_id=till.free), hard_capped=False)
    assert held.reason == "not_open"


async def test_what_the_ledger_refuses_of_served_work_is_kept_for_a_person(till, tmp_path):
    gone(till.proxy)
    served = await till.request()
    async with till.pg.transaction() as conn:  # by whoever still reaches it
        await set_hard_cap(conn, till.free, 10)
    till.proxy.heal()
    await till.well_again()
    assert await till.billed(till.free) == {}
    assert till.books.refused_words == 2
    lines = [json.loads(line) for line in (tmp_path / "gw_1.rejected").read_text().splitlines()]
    assert [next(iter(line["record"])) for line in lines] == ["reserve", "settle"]
    assert {line["record"][word]["request_id"] for line in lines for word in line["record"]} == {
        served
    }
    assert "hard_cap" in lines[0]["reason"]


@pytest.mark.parametrize("first", ["ledger", "disk"])
async def test_an_end_that_no_disk_took_is_told_when_either_is_back(till, first):
    names = [await till.begin() for _ in range(3)]
    gone(till.proxy)
    with files_of_at_most(10):
        for name in names:
            await till.books.settle(a_settle(name, tenant_id=till.free))
        assert till.spool.size_bytes == 0
        if first == "ledger":
            till.proxy.heal()
            await till.well_again()
            assert await till.billed(till.free) == dict.fromkeys(names, 50)
    if first == "disk":
        await till.books.recover()
        assert till.spool.size_bytes > 0
        till.proxy.heal()
        await till.well_again()
        assert await till.billed(till.free) == dict.fromkeys(names, 50)


async def test_a_full_spool_refuses_new_work_and_takes_every_end(till, tmp_path):
    spool = Spool(tmp_path, "gw_small", bytes_max=40_000)
    spool.open()
    till.books = Books(till.ledger, spool)
    till.spool = spool
    before = [await till.begin() for _ in range(5)]
    gone(till.proxy)
    begun = []
    while True:
        name = f"{till.free}_more_{len(begun)}"
        asked = a_reserve(name, tenant_id=till.free)
        if await till.books.reserve(asked, hard_capped=False) == AWAY:
            break
        begun.append(name)
    assert len(begun) > 5
    for name in [*before, *begun]:
        await till.books.settle(a_settle(name, tenant_id=till.free))
    assert spool.size_bytes <= 40_000
    till.proxy.heal()
    await till.well_again()
    assert await till.billed(till.free) == dict.fromkeys([*before, *begun], 50)
    await spool.close()


async def test_a_gateway_cut_off_alone_has_the_last_word_on_what_the_sweeper_ended(till):
    """The others reach Postgres: to them this gateway is silent, and they end what it has open."""
    name = await till.begin()
    gone(till.proxy)
    await till.books.settle(a_settle(name, tenant_id=till.free))
    async with till.pg.transaction() as conn:
        cursor = await conn.execute(
            "SELECT cause FROM ledger_expire(%s, 1000, %s)", ([name], [EndCause.COMPLETE.value])
        )
        assert await cursor.fetchall() == [("not_started",)]
    till.proxy.heal()
    await till.well_again()
    async with till.pg.connection() as conn:
        row = await account(conn, till.free)
        report = await audit(conn)
    assert report.violations == ()
    assert row is not None
    assert (row.posted_micro, row.reserved_micro) == (50, 0)
