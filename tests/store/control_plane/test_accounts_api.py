"""Accounts through the admin API: balances, terms, entries."""

import secrets

import pytest

from store import tenants
from tests.support.control_plane import assert_refused
from tests.support.ledger_commands import a_reserve, a_settle
from tests.support.ledger_database import a_tenant

pytestmark = [pytest.mark.services, pytest.mark.anyio]


@pytest.fixture
async def tenant(plane):
    return await a_tenant(plane.services.postgres)


async def spend_50(plane, tenant):
    request_id = f"req_{secrets.token_hex(8)}"
    await plane.services.ledger.reserve(a_reserve(request_id, tenant_id=tenant))
    await plane.services.ledger.settle(a_settle(request_id, tenant_id=tenant))
    return request_id


async def credit(plane, tenant, amount):
    body = {"id": secrets.token_hex(8), "amount_micro": amount, "reason": "paid"}
    return await plane.made(f"/tenants/{tenant}/credits", body)


async def test_an_account_is_read_with_its_balances_and_caps(plane, tenant):
    await spend_50(plane, tenant)
    await plane.services.ledger.reserve(a_reserve("req_open", tenant_id=tenant, amount_micro=7))
    cap = (await plane.admin("PUT", f"/tenants/{tenant}/caps/total", {"soft_micro": 9})).json()
    answer = await plane.admin("GET", f"/tenants/{tenant}/account")
    assert answer.json() == {
        "tenant_id": tenant,
        "prepaid": False,
        "credit_micro": 0,
        "hard_cap_micro": None,
        "posted_micro": 50,
        "reserved_micro": 7,
        "room_micro": None,
        "entries": 3,
        "caps": [cap],
    }


async def test_the_room_is_what_the_nearest_hard_limit_leaves(plane, tenant):
    await credit(plane, tenant, 1_000)
    await spend_50(plane, tenant)
    path = f"/tenants/{tenant}"
    body = {"prepaid": False, "hard_cap_micro": 700}
    assert (await plane.admin("PUT", f"{path}/account", body)).json()["room_micro"] == 650
    await plane.admin("PUT", f"{path}/caps/day", {"hard_micro": 90})
    assert (await plane.admin("GET", f"{path}/account")).json()["room_micro"] == 40
    await plane.admin("PUT", f"{path}/caps/day", {"soft_micro": 90})
    body = {"prepaid": True, "hard_cap_micro": None}
    assert (await plane.admin("PUT", f"{path}/account", body)).json()["room_micro"] == 950


async def test_prepaid_begins_with_what_was_used_paid_for(plane, tenant):
    await spend_50(plane, tenant)
    path, body = f"/tenants/{tenant}/account", {"prepaid": True, "hard_cap_micro": None}
    refused = await plane.admin("PUT", path, body)
    assert_refused(refused, 409, "conflict", "prepaid")
    assert "50 micro-units are spent" in refused.json()["error"]["message"]
    assert "give a credit of 50 first" in refused.json()["error"]["message"]
    assert not (await plane.admin("GET", path)).json()["prepaid"]
    await credit(plane, tenant, 50)
    made = (await plane.admin("PUT", path, body)).json()
    assert (made["prepaid"], made["credit_micro"], made["room_micro"]) == (True, 50, 0)


async def test_gateways_hear_of_new_terms(plane, tenant):
    for body, hard_capped in [
        ({"prepaid": True, "hard_cap_micro": None}, True),
        ({"prepaid": False, "hard_cap_micro": None}, False),
        ({"prepaid": False, "hard_cap_micro": 5}, True),
    ]:
        async with plane.services.postgres.connection() as conn:
            since = (await tenants.changes_since(conn, 0, limit=10_000)).version
        answer = await plane.admin("PUT", f"/tenants/{tenant}/account", body)
        assert answer.status_code == 200, answer.text
        async with plane.services.postgres.connection() as conn:
            (told,) = (await tenants.changes_since(conn, since)).tenants
        assert (told.id, told.hard_capped) == (tenant, hard_capped)
        assert told.hard_cap_micro == body["hard_cap_micro"]


async def test_terms_are_given_whole_or_refused(plane, tenant):
    for body, param in [
        ({"prepaid": True}, "hard_cap_micro"),
        ({"hard_cap_micro": 5}, "prepaid"),
        ({"prepaid": 1, "hard_cap_micro": 5}, "prepaid"),
        ({"prepaid": True, "hard_cap_micro": -1}, "hard_cap_micro"),
        ({"prepaid": True, "hard_cap_micro": 5, "credit_micro": 5}, "credit_micro"),
    ]:
        answer = await plane.admin("PUT", f"/tenants/{tenant}/account", body)
        assert_refused(answer, 422, "unprocessable", param)


async def test_entries_come_newest_first_in_pages_without_a_gap(plane, tenant):
    request_id = await spend_50(plane, tenant)
    entry = await credit(plane, tenant, 9)
    seen, before = [], 2**63 - 1
    while before is not None:
        answer = await plane.admin("GET", f"/tenants/{tenant}/entries", before=before, limit=2)
        seen += answer.json()["entries"]
        before = answer.json()["before"]
    assert [row["seq"] for row in seen] == [3, 2, 1]
    assert seen[0] == entry
    assert [(row["kind"], row["request_id"], row["author"]) for row in seen] == [
        ("credit", "", "admin"),
        ("settle", request_id, ""),
        ("reserve", request_id, ""),
    ]
    assert [(row["posted_micro"], row["reserved_micro"]) for row in seen] == [
        (50, 0),
        (50, 0),
        (0, 100),
    ]


async def test_the_account_of_nobody_is_not_found(plane):
    body = {"prepaid": False, "hard_cap_micro": None}
    for answer in [
        await plane.admin("GET", "/tenants/ten_0/account"),
        await plane.admin("PUT", "/tenants/ten_0/account", body),
        await plane.admin("GET", "/tenants/ten_0/entries"),
    ]:
        assert_refused(answer, 404, "not_found")


async def test_new_terms_are_in_the_audit_log(plane, tenant):
    body = {"prepaid": True, "hard_cap_micro": 5}
    await plane.admin("PUT", f"/tenants/{tenant}/account", body)
    (seen,) = (await plane.admin("GET", "/audit-log", subject=tenant)).json()["records"]
    assert (seen["action"], seen["detail"], seen["actor"]) == ("account.terms", body, "admin")
