"""Differences planted in real records that are for a person: told once, left, and over."""

import asyncio

import pytest

from tests.support.ledger_database import a_tenant

pytestmark = [pytest.mark.services, pytest.mark.anyio]


async def test_usage_rows_that_are_not_right_are_told_once_and_left(case):
    breaks = {
        "misbilled": ["billed_micro = 51", "bill_limit_micro = 40"],
        "overdelivered": ["delivered_tokens = 21"],
    }
    requests = {}
    for kind, changes in breaks.items():
        for change in changes:
            requests[(await case.request())[0]] = (kind, change)
    held, _ = await case.request()
    await case.rounds()
    assert await case.differences() == []

    for request_id, (_, change) in requests.items():
        await case.run(f"UPDATE usage SET {change} WHERE request_id = %s", request_id)
    await case.run(
        "INSERT INTO reservations SELECT request_id, month, tenant_id, key_id, gateway_id, model,"
        " version, region, service_class, dialect, endpoint, stream, price_id, prompt_tokens,"
        " max_tokens, choices, amount_micro, floor_micro, 0, day, created_ms FROM usage"
        " WHERE request_id = %s",
        held,
    )
    await case.rounds(3)
    told = {request_id: kind for request_id, (kind, _) in requests.items()} | {held: "still_held"}
    assert {(r, k, n) for k, r, n in await case.differences()} == {
        (request_id, kind, None) for request_id, kind in told.items()
    }
    assert case.told() == {"misbilled": 2, "overdelivered": 1, "still_held": 1}
    assert case.count("open_differences", kind="misbilled") == 2
    for request_id in told:
        assert len(await case.entries(request_id)) == 2


async def test_an_account_that_is_not_right_is_told_once_until_it_is(case):
    breaks = [
        ("accounts SET posted_micro = 1", "accounts SET posted_micro = 0", "balance"),
        ("accounts SET credit_micro = 1", "accounts SET credit_micro = 0", "balance"),
        (r"accounts SET head = '\x00' || head", "accounts SET head = substr(head, 2)", "balance"),
        ("reservations SET reserved_micro = 1", "reservations SET reserved_micro = 1000", "held"),
    ]
    tenants = [(await case.request(settled=False))[1] for _ in breaks]
    await case.rounds()
    assert await case.differences() == []
    for tenant, (how, _, _) in zip(tenants, breaks, strict=True):
        await case.run(f"UPDATE {how} WHERE tenant_id = %s", tenant)
    await case.rounds(3)
    pairs = [(kind, tenant) for tenant, (_, _, kind) in zip(tenants, breaks, strict=True)]
    assert sorted(await case.differences()) == sorted((*pair, None) for pair in pairs)
    assert case.told() == {"balance": 3, "held": 1}
    for tenant, (_, back, _) in zip(tenants, breaks, strict=True):
        await case.run(f"UPDATE {back} WHERE tenant_id = %s", tenant)
    await case.rounds()
    assert sorted(await case.differences()) == sorted((*pair, "gone") for pair in pairs)


async def test_a_balance_that_an_entry_went_on_from_is_a_break_in_the_chain(case):
    _, tenant = await case.request()
    await case.run("UPDATE accounts SET posted_micro = posted_micro - 1")
    await case.request(tenant_id=tenant)
    await case.rounds()
    assert await case.differences() == [("chain", f"{tenant}/3", None)]


async def test_a_cap_that_counts_what_nobody_holds_is_told(case):
    _, tenant = await case.request(settled=False)
    await case.run("SELECT ledger_set_cap(%s, '', 'day', NULL, 10000)", tenant)
    await case.request(tenant_id=tenant)
    await case.rounds()
    assert await case.differences() == []
    await case.run("UPDATE cap_windows SET reserved_micro = reserved_micro - 1")
    await case.rounds()
    assert await case.differences() == [("held", tenant, None)]
    await case.run("UPDATE cap_windows SET reserved_micro = reserved_micro + 1")
    await case.rounds()
    assert await case.differences() == [("held", tenant, "gone")]


async def test_an_entry_that_was_changed_is_told_and_stays(case):
    breaks = {
        "UPDATE entries SET reason = 'changed' WHERE seq = 3": 3,
        "UPDATE entries SET chain = '' WHERE seq = 4": 4,
        "UPDATE entries SET posted_micro = posted_micro + 1 WHERE seq = 4": 4,
        "DELETE FROM entries WHERE seq = 3": 4,
    }
    tenants = [await a_tenant(case.pg) for _ in breaks]
    for tenant in tenants:
        await case.request(tenant_id=tenant)
    await case.rounds()  # verified up to here
    await case.run("ALTER TABLE entries DISABLE TRIGGER USER")
    for tenant, how in zip(tenants, breaks, strict=True):
        for _ in range(2):
            await case.request(tenant_id=tenant)
        await case.run(f"{how} AND tenant_id = %s", tenant)
    await case.rounds(3)
    told = await case.differences()
    assert {(kind, resolution) for kind, _, resolution in told} == {("chain", None)}
    for tenant, seq in zip(tenants, breaks.values(), strict=True):
        assert ("chain", f"{tenant}/{seq}", None) in told
    assert case.told() == {"chain": len(told)}
    assert await case.rows("SELECT seq FROM reconciled_accounts") == [(6,)] * 4


async def test_entries_are_verified_over_many_slices(case, monkeypatch):
    monkeypatch.setattr("control_plane.reconciler.ENTRIES_MAX", 3)
    tenants = [await a_tenant(case.pg) for _ in range(3)]
    await asyncio.gather(*(case.request(tenant_id=tenants[n % 3]) for n in range(30)))
    await case.rounds(1)
    rows = await case.rows("SELECT seq FROM reconciled_accounts")
    assert rows == [(20,)] * 3
    assert await case.differences() == []
