"""Many callers at once: nothing over a hard cap, nothing lost, nothing done twice."""

import asyncio
import random

import pytest

from core.metering import LedgerRefused, Reserved
from core.money import EndCause
from store.accounts import account
from store.ledger import (
    BILLING_CAUSES,
    Ledger,
    LedgerAwayError,
    LedgerRejectedError,
    NotReservedError,
)
from store.ledger_audit import audit
from store.postgres import Postgres
from store.queries import load
from store.usage import usage_of
from tests.support.ledger_commands import (
    a_reserve,
    a_settle,
    a_top_up,
    a_usage,
    a_witness,
    an_attempt,
)
from tests.support.ledger_database import a_tenant, an_impatient_ledger

pytestmark = [pytest.mark.anyio, pytest.mark.services]

CALLERS = 200


async def watch_caps(pg: Postgres, caps: dict[str, int | None], stop: asyncio.Event) -> int:
    """Look at the accounts as often as one can; returns how often."""
    looks = 0
    while not stop.is_set():
        async with pg.connection() as conn:
            for tenant, cap in caps.items():
                found = await account(conn, tenant)
                assert found is not None
                assert found.reserved_micro >= 0
                if cap is not None:
                    assert found.reserved_micro + found.posted_micro <= cap
        looks += 1
    return looks


async def one_request(ledger: Ledger, tenant: str, name: str, dice: random.Random) -> str:
    amount = dice.randint(50, 120)
    held = await ledger.reserve(a_reserve(name, tenant_id=tenant, amount_micro=amount))
    if isinstance(held, LedgerRefused):
        assert held.reason == "hard_cap"
        return "refused"
    await asyncio.sleep(dice.random() * 0.02)
    if dice.random() < 0.3:
        await ledger.top_up(a_top_up(name, tenant_id=tenant, total_micro=amount + 10))
    if dice.random() < 0.2:
        await ledger.release(name, tenant, ended_ms=2_000)
        return "released"
    # 10 for the prompt and at most 90 for the answer, which may be over the reservation.
    usage = a_usage(10, 0, dice.randint(0, 45))
    word = a_settle(name, tenant_id=tenant, attempts=(an_attempt(usage),), delivered_tokens=0)
    first = await ledger.settle(word)
    assert await ledger.settle(word) == first
    assert await ledger.reconcile(a_witness(name, usage=usage)) == first
    return "settled"


async def test_a_crowd_never_exceeds_a_cap(pg, ledger):
    caps = {await a_tenant(pg, hard_cap_micro=cap): cap for cap in (2_000, 5_000, None)}
    tenants = list(caps)
    dice = random.Random(4)
    stop = asyncio.Event()
    watching = asyncio.create_task(watch_caps(pg, caps, stop))
    ends = await asyncio.gather(
        *(
            one_request(ledger, tenants[n % 3], f"crowd_{tenants[n % 3]}_{n}", dice)
            for n in range(CALLERS)
        )
    )
    stop.set()
    assert await watching > 3
    assert {"refused", "settled", "released"} <= set(ends)
    async with pg.connection() as conn:
        assert (await audit(conn)).violations == ()
        for tenant in tenants:
            found = await account(conn, tenant)
            assert found is not None
            assert found.reserved_micro == 0


async def test_late_words_at_once_share_the_room_that_a_cap_leaves(pg, ledger):
    tenant = await a_tenant(pg, hard_cap_micro=300)
    lost = [f"{tenant}_{n}" for n in range(4)]
    for request_id in lost[:3]:
        await ledger.reserve(a_reserve(request_id, tenant_id=tenant))
    async with pg.transaction() as conn:
        await conn.execute(
            load("leases")["expire"], {"request_ids": lost, "billing_causes": BILLING_CAUSES}
        )
    # 50 are left to three bills of 40, and the fourth is not known.
    await ledger.reserve(a_reserve(f"{tenant}_next", tenant_id=tenant, amount_micro=250))
    words = [a_witness(request_id, usage=a_usage(10, 0, 15)) for request_id in lost]

    async def told() -> list[int | None]:
        answers = await asyncio.gather(*map(ledger.reconcile, words))
        return [answer and answer.billed_micro for answer in answers]

    assert await told() == [40, 10, 0, None]
    async with pg.connection() as conn:
        found = await account(conn, tenant)
        assert (found.posted_micro, found.reserved_micro) == (50, 250)
    await ledger.release(f"{tenant}_next", tenant, ended_ms=2_000)
    assert await told() == [40, 10, 0, None]
    async with pg.connection() as conn:
        assert (await audit(conn)).violations == ()


async def test_a_batch_mixes_tenants_and_kinds(pg, ledger):
    one, other = await a_tenant(pg), await a_tenant(pg, hard_cap_micro=100)
    await ledger.reserve(a_reserve(f"{one}_1", tenant_id=one))
    answers = await asyncio.gather(
        ledger.settle(a_settle(f"{one}_1", tenant_id=one)),
        ledger.reserve(a_reserve(f"{one}_2", tenant_id=one)),
        ledger.reserve(a_reserve(f"{other}_1", tenant_id=other)),
        ledger.reserve(a_reserve(f"{other}_2", tenant_id=other, amount_micro=1)),
        ledger.reserve(a_reserve("nobody_1", tenant_id="ten_nobody")),
        ledger.reconcile(a_witness("unknown_1")),
    )
    assert answers[0].cause is EndCause.COMPLETE
    assert answers[1] == answers[2] == Reserved(reserved_micro=100)
    assert answers[3].reason == "hard_cap"
    assert answers[4].reason == "no_account"
    assert answers[5] is None


async def test_the_same_words_at_once_have_one_effect(pg, ledger):
    tenant = await a_tenant(pg, hard_cap_micro=150)
    asked = a_reserve(f"{tenant}_1", tenant_id=tenant)
    answers = await asyncio.gather(*(ledger.reserve(asked) for _ in range(20)))
    assert set(map(repr, answers)) == {repr(Reserved(reserved_micro=100))}
    async with pg.connection() as conn:
        assert (await account(conn, tenant)).entries == 1


async def test_witnesses_that_race_with_the_request_itself_are_all_counted(
    pg, ledger, postgres_url
):
    # The journal reaches the control plane while the gateway still reserves or settles.
    tenant = await a_tenant(pg)
    other = await Ledger.open(postgres_url)
    requests = [f"{tenant}_{n}" for n in range(60)]

    async def from_gateway(request_id: str) -> None:
        await ledger.reserve(a_reserve(request_id, tenant_id=tenant))
        await ledger.settle(a_settle(request_id, tenant_id=tenant))

    async def from_journal(request_id: str, n: int) -> None:
        await asyncio.sleep(n % 10 / 1000)
        await other.reconcile(a_witness(request_id, usage=a_usage(10, 0, 25)))

    async with asyncio.TaskGroup() as both:
        for n, request_id in enumerate(requests):
            both.create_task(from_gateway(request_id))
            both.create_task(from_journal(request_id, n))
    await other.close()
    async with pg.connection() as conn:
        assert (await audit(conn)).violations == ()
        found = await account(conn, tenant)
        assert found is not None
        assert found.posted_micro == 50 * len(requests)
        rows = [await usage_of(conn, request_id) for request_id in requests]
        assert {row.metered_output_tokens for row in rows} == {25}


async def test_one_bad_command_does_not_spoil_its_batch(pg, ledger):
    tenant = await a_tenant(pg)
    asked = [a_reserve(f"{tenant}_{n}", tenant_id=tenant) for n in range(9)]
    asked[4] = a_reserve(f"{tenant}_4", tenant_id=tenant, model="nul \x00 byte")
    answers = await asyncio.gather(
        *(ledger.reserve(command) for command in asked), return_exceptions=True
    )
    assert isinstance(answers.pop(4), LedgerRejectedError)
    assert answers == [Reserved(reserved_micro=100)] * 8


async def test_nonsense_is_refused_before_it_is_sent(ledger):
    with pytest.raises(ValueError, match="cannot reserve"):
        await ledger.reserve(a_reserve(amount_micro=-1))
    with pytest.raises(ValueError, match="reported twice"):
        await ledger.settle(a_settle(attempts=(an_attempt(), an_attempt())))
    with pytest.raises(ValueError, match="no tokens"):
        await ledger.settle(a_settle(attempts=(an_attempt(a_usage(1, 2, 3)),)))
    with pytest.raises(ValueError, match="no tokens"):
        await ledger.reconcile(a_witness(usage=a_usage(1, 0, -1)))


async def test_settling_what_was_never_reserved_is_an_error(pg, ledger):
    tenant = await a_tenant(pg)
    with pytest.raises(NotReservedError):
        await ledger.settle(a_settle(f"{tenant}_1", tenant_id=tenant))


async def test_a_locked_account_holds_up_nobody_else(pg, ledger):
    locked, free = await a_tenant(pg), await a_tenant(pg)
    async with pg.transaction() as conn:
        await conn.execute("SELECT FROM accounts WHERE tenant_id = %s FOR UPDATE", (locked,))
        stuck = [
            asyncio.create_task(ledger.reserve(a_reserve(f"{locked}_{n}", tenant_id=locked)))
            for n in range(3)
        ]
        async with asyncio.timeout(2):
            for n in range(5):
                await ledger.reserve(a_reserve(f"{free}_{n}", tenant_id=free))
        assert not any(task.done() for task in stuck)
        # Once known to be locked, it costs the others nothing at all.
        later = asyncio.create_task(ledger.reserve(a_reserve(f"{locked}_9", tenant_id=locked)))
        await ledger.reserve(a_reserve(f"{free}_9", tenant_id=free))
        assert not later.done()
    answers = await asyncio.gather(*stuck, later)
    assert answers == [Reserved(reserved_micro=100)] * 4
    assert not ledger._lanes[0]._diverted


async def test_an_account_locked_for_too_long_is_answered_away(pg, postgres_url):
    tenant = await a_tenant(pg)
    ledger = an_impatient_ledger(postgres_url, answer_timeout_s=1.0)
    started = asyncio.get_running_loop().time()
    async with pg.transaction() as conn:
        await conn.execute("SELECT FROM accounts WHERE tenant_id = %s FOR UPDATE", (tenant,))
        with pytest.raises(LedgerAwayError):
            await ledger.reserve(a_reserve(f"{tenant}_1", tenant_id=tenant))
    assert asyncio.get_running_loop().time() - started < 1.5
    await ledger.close()


async def test_a_full_queue_refuses_at_once(pg, postgres_url):
    tenant = await a_tenant(pg)
    ledger = an_impatient_ledger(postgres_url, queue_max=10)
    answers = await asyncio.gather(
        *(ledger.reserve(a_reserve(f"{tenant}_{n}", tenant_id=tenant)) for n in range(12)),
        return_exceptions=True,
    )
    assert [type(answer) for answer in answers] == [Reserved] * 10 + [LedgerAwayError] * 2
    await ledger.close()


async def test_a_caller_that_gave_up_is_not_sent(pg, ledger):
    tenant = await a_tenant(pg)
    gave_up = asyncio.create_task(ledger.reserve(a_reserve(f"{tenant}_1", tenant_id=tenant)))
    await asyncio.sleep(0)
    gave_up.cancel()
    await ledger.reserve(a_reserve(f"{tenant}_2", tenant_id=tenant))
    async with pg.connection() as conn:
        assert await usage_of(conn, f"{tenant}_1") is None


async def test_closing_finishes_what_was_asked(pg, postgres_url):
    tenant = await a_tenant(pg)
    ledger = await Ledger.open(postgres_url)
    asked = [
        asyncio.create_task(ledger.reserve(a_reserve(f"{tenant}_{n}", tenant_id=tenant)))
        for n in range(50)
    ]
    await asyncio.sleep(0)
    await ledger.close()
    assert await asyncio.gather(*asked) == [Reserved(reserved_micro=100)] * 50
    with pytest.raises(LedgerAwayError, match="closed"):
        await ledger.reserve(a_reserve("late", tenant_id=tenant))


async def test_lanes_share_the_accounts_out(pg, postgres_url):
    ledger = await Ledger.open(postgres_url, lanes=3)
    tenants = [await a_tenant(pg) for _ in range(6)]
    answers = await asyncio.gather(
        *(
            ledger.reserve(a_reserve(f"{tenant}_{n}", tenant_id=tenant))
            for tenant in tenants
            for n in range(5)
        )
    )
    assert answers == [Reserved(reserved_micro=100)] * 30
    await ledger.close()
