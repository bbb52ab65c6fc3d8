"""The sweeper: it ends what dead gateways left open, and nothing of the living."""

import asyncio
import secrets

import pytest

from core.money import EndCause
from store.accounts import account
from store.leases import Sweeper, SweeperConfig, SweepReport, assert_lease, retire_lease
from store.ledger import LedgerAwayError, NotReservedError
from store.ledger_audit import audit
from store.migrate import upgrade
from store.postgres import Postgres, PostgresConfig, StoreAwayError
from store.usage import usage_of
from tests.support.ledger_commands import (
    a_reserve,
    a_settle,
    a_usage,
    a_witness,
)
from tests.support.ledger_database import a_tenant, an_impatient_ledger

pytestmark = [pytest.mark.anyio, pytest.mark.services]

LEASE_MS = 200
LEASE_S = LEASE_MS / 1000
GRACE_MS = 600


def a_sweeper(pg, **changes):
    bounds = {"contact_gap_s": 5.0, "grace_ms": GRACE_MS, "lease_ms": LEASE_MS} | changes
    return Sweeper(pg, SweeperConfig(**bounds))


async def a_gateway(pg) -> str:
    gateway_id = f"gw_{secrets.token_hex(12)}"
    await alive(pg, gateway_id)
    return gateway_id


async def alive(pg, gateway_id):
    async with pg.transaction() as conn:
        await assert_lease(conn, gateway_id, "local", LEASE_MS)


@pytest.fixture
async def held(pg, ledger):
    """A gateway that holds one reservation, and then says no more."""
    tenant = await a_tenant(pg)
    gateway_id = await a_gateway(pg)
    request_id = f"req_{tenant}"
    await ledger.reserve(a_reserve(request_id, tenant_id=tenant, gateway_id=gateway_id))
    yield gateway_id, tenant, request_id
    # Nothing is left for the next test's sweeper.
    await ledger.release(request_id, tenant, ended_ms=9_000)


async def row_of(pg, request_id):
    async with pg.connection() as conn:
        row = await usage_of(conn, request_id)
        assert row is not None
        return row


async def test_a_living_gateway_is_left_alone(pg, held):
    gateway_id, _, request_id = held
    sweeper = a_sweeper(pg)
    for _ in range(8):
        await alive(pg, gateway_id)
        assert await sweeper.sweep() == SweepReport()
        await asyncio.sleep(LEASE_S / 4)
    assert (await row_of(pg, request_id)).state == "open"


async def test_the_journals_last_word_settles_as_soon_as_the_lease_is_over(pg, ledger, held):
    gateway_id, tenant, request_id = held
    sweeper = a_sweeper(pg, grace_ms=60_000)
    await ledger.reconcile(a_witness(request_id, cause="aborted"))
    assert await sweeper.sweep() == SweepReport()
    await asyncio.sleep(LEASE_S * 1.2)
    assert await sweeper.sweep() == SweepReport(lost=1, gateways=(gateway_id,))
    row = await row_of(pg, request_id)
    assert (row.cause, row.settled_by, row.billed_micro) == (EndCause.LOST, "sweeper", 50)
    assert row.ended_ms is not None
    async with pg.connection() as conn:
        balances = await account(conn, tenant)
        assert balances is not None
        assert (balances.posted_micro, balances.reserved_micro) == (50, 0)


async def test_without_a_journal_it_waits_a_grace_and_then_frees_the_money(pg, ledger, held):
    gateway_id, _, request_id = held
    sweeper = a_sweeper(pg)
    await sweeper.sweep()
    await asyncio.sleep(LEASE_S * 1.2)
    assert await sweeper.sweep() == SweepReport(waiting=1, gateways=(gateway_id,))
    await asyncio.sleep(GRACE_MS / 1000)
    assert await sweeper.sweep() == SweepReport(not_started=1, gateways=(gateway_id,))
    assert (await row_of(pg, request_id)).billed_micro == 0
    # The journal comes at last.
    settled = await ledger.reconcile(a_witness(request_id))
    assert settled is not None
    assert (settled.cause, settled.billed_micro) == (EndCause.LOST, 50)


async def test_a_checkpoint_is_billed_after_the_grace(pg, ledger, held):
    sweeper = a_sweeper(pg)
    word = a_witness(held[2], source="checkpoint", usage=a_usage(10, 0, 5), final=False, cause="")
    await ledger.reconcile(word)
    await sweeper.sweep()
    await asyncio.sleep(LEASE_S * 1.2)
    assert (await sweeper.sweep()).waiting == 1
    await asyncio.sleep(GRACE_MS / 1000)
    assert (await sweeper.sweep()).lost == 1
    assert (await row_of(pg, held[2])).metered_output_tokens == 5


async def test_a_gateway_that_was_only_cut_off_has_the_last_word(pg, ledger, held):
    gateway_id, tenant, request_id = held
    sweeper = a_sweeper(pg, grace_ms=0)
    await sweeper.sweep()
    await asyncio.sleep(LEASE_S * 1.2)
    assert (await sweeper.sweep()).not_started == 1
    await alive(pg, gateway_id)
    settled = await ledger.settle(a_settle(request_id, tenant_id=tenant))
    assert (settled.cause, settled.billed_micro) == (EndCause.COMPLETE, 50)
    row = await row_of(pg, request_id)
    assert (row.settled_by, row.delivered_tokens, row.ended_ms) == ("gateway", 20, 2_000)


async def test_what_a_retired_gateway_left_is_ended_at_once(pg, held):
    sweeper = a_sweeper(pg, grace_ms=60_000, lease_ms=60_000)
    async with pg.transaction() as conn:
        await retire_lease(conn, held[0])
    assert await sweeper.sweep() == SweepReport(not_started=1, gateways=(held[0],))


async def test_a_gateway_without_a_lease_counts_from_its_reservation(pg, ledger):
    tenant = await a_tenant(pg)
    asked = a_reserve(f"req_{tenant}", tenant_id=tenant, gateway_id="gw_never")
    await ledger.reserve(asked)
    sweeper = a_sweeper(pg, grace_ms=0)
    assert await sweeper.sweep() == SweepReport()
    await asyncio.sleep(LEASE_S * 1.2)
    assert await sweeper.sweep() == SweepReport(not_started=1, gateways=("gw_never",))


async def test_a_sweeper_counts_silence_only_from_its_own_contact(pg, held):
    await asyncio.sleep(LEASE_S * 1.5)
    sweeper = a_sweeper(pg, grace_ms=0)
    assert await sweeper.sweep() == SweepReport(), "it has only just begun to listen"
    await asyncio.sleep(LEASE_S * 1.2)
    assert (await sweeper.sweep()).not_started == 1


async def test_a_sweeper_that_slept_listens_for_a_full_lease_again(pg, held):
    sweeper = a_sweeper(pg, grace_ms=0, contact_gap_s=LEASE_S)
    await sweeper.sweep()
    await asyncio.sleep(LEASE_S * 1.2)
    assert await sweeper.sweep() == SweepReport()
    ended = 0
    for _ in range(100):
        await asyncio.sleep(LEASE_S / 8)
        ended += (await sweeper.sweep()).not_started
        if ended:
            break
    assert ended == 1


async def test_two_sweepers_do_it_once(pg, ledger):
    tenant = await a_tenant(pg)
    gateway_id = await a_gateway(pg)
    requests = [f"req_{tenant}_{n}" for n in range(30)]
    for request_id in requests:
        await ledger.reserve(a_reserve(request_id, tenant_id=tenant, gateway_id=gateway_id))
        await ledger.reconcile(a_witness(request_id))
    sweepers = [a_sweeper(pg) for _ in range(3)]
    for sweeper in sweepers:
        await sweeper.sweep()
    await asyncio.sleep(LEASE_S * 1.2)
    await asyncio.gather(*(sweeper.sweep() for sweeper in sweepers))
    async with pg.connection() as conn:
        balances = await account(conn, tenant)
        assert balances is not None
        assert (balances.posted_micro, balances.reserved_micro) == (1_500, 0)
        assert balances.entries == 60
        assert (await audit(conn)).violations == ()


async def test_a_sweep_does_so_much_and_leaves_the_rest_to_the_next(pg, ledger):
    tenant = await a_tenant(pg)
    gateway_id = await a_gateway(pg)
    for n in range(5):
        await ledger.reserve(
            a_reserve(f"req_{tenant}_{n}", tenant_id=tenant, gateway_id=gateway_id)
        )
    sweeper = a_sweeper(pg, grace_ms=0, sweep_max=3)
    await sweeper.sweep()
    await asyncio.sleep(LEASE_S * 1.2)
    assert (await sweeper.sweep()).not_started == 3
    assert (await sweeper.sweep()).not_started == 2


async def test_old_refusals_and_gateways_are_forgotten(pg, ledger):
    tenant = await a_tenant(pg, hard_cap_micro=10)
    gateway_id = await a_gateway(pg)
    asked = a_reserve(f"req_{tenant}", tenant_id=tenant, gateway_id=gateway_id)
    refused = await ledger.reserve(asked)
    await a_sweeper(pg).sweep()
    assert await ledger.reserve(asked) == refused
    await a_sweeper(pg, refusals_kept_s=0, gateways_kept_s=0).sweep()
    async with pg.connection() as conn:
        cursor = await conn.execute(
            "SELECT (SELECT count(*) FROM refusals), (SELECT count(*) FROM gateways)"
        )
        assert await cursor.fetchone() == (0, 0)


async def test_the_sweepers_word_and_the_gateways_race_to_one_effect(pg, ledger):
    tenant = await a_tenant(pg)
    gateway_id = await a_gateway(pg)
    requests = [f"req_{tenant}_{n}" for n in range(40)]
    for request_id in requests:
        await ledger.reserve(a_reserve(request_id, tenant_id=tenant, gateway_id=gateway_id))
    sweeper = a_sweeper(pg, grace_ms=0)
    await sweeper.sweep()
    await asyncio.sleep(LEASE_S * 1.2)
    await asyncio.gather(
        sweeper.sweep(),
        *(ledger.settle(a_settle(request_id, tenant_id=tenant)) for request_id in requests),
        *(ledger.reconcile(a_witness(request_id)) for request_id in requests),
    )
    async with pg.connection() as conn:
        balances = await account(conn, tenant)
        assert balances is not None
        assert (balances.posted_micro, balances.reserved_micro) == (2_000, 0)
        assert (await audit(conn)).violations == ()
    assert {(await row_of(pg, request_id)).cause for request_id in requests} == {EndCause.COMPLETE}


@pytest.mark.slow
async def test_after_postgres_was_away_gateways_have_a_full_lease_to_speak(own_postgres):
    url = own_postgres.create_database("leases")
    await asyncio.to_thread(upgrade, url)
    pg = await Postgres.open(
        PostgresConfig(
            database_url=url, application_name="test", connect_timeout_s=1, acquire_timeout_s=1.0
        )
    )
    ledger = an_impatient_ledger(url)
    tenant = await a_tenant(pg)
    gateway_id = await a_gateway(pg)
    await ledger.reserve(a_reserve("req_1", tenant_id=tenant, gateway_id=gateway_id))
    sweeper = a_sweeper(pg, grace_ms=0, contact_gap_s=60.0)
    unaware = a_sweeper(pg, grace_ms=0, contact_gap_s=60.0)
    await sweeper.sweep()
    await unaware.sweep()
    await asyncio.to_thread(own_postgres.running.stop)
    with pytest.raises(StoreAwayError):
        await sweeper.sweep()
    await asyncio.sleep(LEASE_S * 2)
    await asyncio.to_thread(own_postgres.running.start)
    assert await sweeper.sweep() == SweepReport()
    # This one never failed to reach it, but sees that it has been restarted.
    assert await unaware.sweep() == SweepReport()
    await asyncio.sleep(LEASE_S * 1.2)
    assert (await sweeper.sweep()).not_started == 1
    await ledger.close()
    await pg.close()


async def test_a_reserve_that_nobody_waited_for_can_be_released(pg, ledger, postgres_url):
    # What a gateway does after LedgerAwayError: release until answered.
    tenant = await a_tenant(pg)
    asked = a_reserve(f"req_{tenant}", tenant_id=tenant)
    brief = an_impatient_ledger(postgres_url, answer_timeout_s=0.2)
    async with pg.transaction() as conn:
        await conn.execute("SELECT FROM accounts WHERE tenant_id = %s FOR UPDATE", (tenant,))
        with pytest.raises(LedgerAwayError):
            await brief.reserve(asked)
    assert (await ledger.release(asked.request_id, tenant, ended_ms=1)).billed_micro == 0
    with pytest.raises(NotReservedError):
        await ledger.settle(a_settle(asked.request_id, tenant_id="ten_other"))
    async with pg.connection() as conn:
        balances = await account(conn, tenant)
        assert balances is not None
        assert balances.reserved_micro == 0
    await brief.close()
