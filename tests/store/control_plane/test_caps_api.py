"""Caps through the admin API: what they count from, what is refused, and who hears of it."""

import asyncio
import datetime as dt
import secrets

import pytest

from core.metering import LedgerRefused, Reserved
from core.tenancy import key_digest
from store import tenants
from tests.support.control_plane import PEPPER, assert_refused
from tests.support.ledger_commands import a_reserve, a_settle
from tests.support.ledger_database import a_tenant

pytestmark = [pytest.mark.services, pytest.mark.anyio]

FOR_GOOD = "0001-01-01"


@pytest.fixture
async def tenant(plane):
    return await a_tenant(plane.services.postgres)


async def a_key(plane, tenant):
    return await plane.made(f"/tenants/{tenant}/keys", {"name": "k"})


async def reserved(plane, tenant, amount, key="key_1"):
    """A request that holds so much; its id, or the refusal."""
    asked = a_reserve(
        f"req_{secrets.token_hex(8)}", tenant_id=tenant, amount_micro=amount, key_id=key
    )
    answer = await plane.services.ledger.reserve(asked)
    return asked.request_id if isinstance(answer, Reserved) else answer


async def billed_50(plane, tenant, key="key_1"):
    """A request that ended: ten tokens read, twenty written."""
    request_id = await reserved(plane, tenant, 100, key)
    settled = await plane.services.ledger.settle(a_settle(request_id, tenant_id=tenant))
    assert settled.billed_micro == 50
    return request_id


async def test_a_cap_set_amid_its_window_counts_what_that_holds_already(plane, tenant):
    await billed_50(plane, tenant)
    await reserved(plane, tenant, 30)
    answer = await plane.admin("PUT", f"/tenants/{tenant}/caps/day", {"hard_micro": 100})
    assert answer.status_code == 200, answer.text
    cap = answer.json()
    today = dt.datetime.now(dt.UTC).date()
    assert cap == {
        "key_id": "",
        "period": "day",
        "soft_micro": None,
        "hard_micro": 100,
        "since": str(today),
        "starts": str(today),
        "posted_micro": 50,
        "reserved_micro": 30,
        "soft_passed_ms": None,
    }
    assert await reserved(plane, tenant, 21) == LedgerRefused(
        reason="hard_cap",
        limit="account.day",
        posted_micro=50,
        reserved_micro=30,
        hard_cap_micro=100,
        fits_micro=20,
    )
    assert isinstance(await reserved(plane, tenant, 20), str)


async def test_a_window_is_a_day_a_month_or_for_good(plane, tenant):
    for period in ("day", "month", "total"):
        await plane.admin("PUT", f"/tenants/{tenant}/caps/{period}", {"soft_micro": 7})
    listed = (await plane.admin("GET", f"/tenants/{tenant}/caps")).json()["caps"]
    today = dt.datetime.now(dt.UTC).date()
    assert [(cap["period"], cap["starts"]) for cap in listed] == [
        ("day", str(today)),
        ("month", str(today.replace(day=1))),
        ("total", FOR_GOOD),
    ]


async def test_a_cap_that_is_changed_goes_on_counting(plane, tenant):
    path = f"/tenants/{tenant}/caps/month"
    await plane.admin("PUT", path, {"hard_micro": 100, "soft_micro": 80})
    await billed_50(plane, tenant)
    changed = (await plane.admin("PUT", path, {"hard_micro": 60, "soft_micro": 40})).json()
    assert (changed["posted_micro"], changed["hard_micro"]) == (50, 60)
    assert changed["soft_passed_ms"] is not None
    (listed,) = (await plane.admin("GET", f"/tenants/{tenant}/caps")).json()["caps"]
    assert listed == changed


async def test_a_keys_cap_counts_and_binds_that_key_alone(plane, tenant):
    one, other = [(await a_key(plane, tenant))["id"] for _ in range(2)]
    await billed_50(plane, tenant, one)
    await billed_50(plane, tenant, other)
    cap = (await plane.admin("PUT", f"/keys/{one}/caps/total", {"hard_micro": 60})).json()
    assert (cap["key_id"], cap["posted_micro"]) == (one, 50)
    refused = await reserved(plane, tenant, 11, one)
    assert (refused.limit, refused.fits_micro) == ("key.total", 10)
    assert isinstance(await reserved(plane, tenant, 11, other), str)
    of_one = (await plane.admin("GET", f"/keys/{one}/caps")).json()["caps"]
    of_other = (await plane.admin("GET", f"/keys/{other}/caps")).json()["caps"]
    of_all = (await plane.admin("GET", f"/tenants/{tenant}/caps")).json()["caps"]
    assert (of_one, of_other, of_all) == ([cap], [], [cap])


async def test_a_cap_taken_away_binds_nobody_and_begins_anew(plane, tenant):
    key = (await a_key(plane, tenant))["id"]
    for path in (f"/tenants/{tenant}/caps/total", f"/keys/{key}/caps/total"):
        await plane.admin("PUT", path, {"hard_micro": 0})
        assert isinstance(await reserved(plane, tenant, 1, key), LedgerRefused)
        gone = await plane.admin("DELETE", path)
        assert (gone.status_code, gone.json()) == (200, {"caps": []})
        assert_refused(await plane.admin("DELETE", path), 404, "not_found")
        assert isinstance(await reserved(plane, tenant, 1, key), str)
    again = await plane.admin("PUT", f"/tenants/{tenant}/caps/total", {"hard_micro": 9})
    assert again.json()["reserved_micro"] == 2


async def test_gateways_hear_which_tenants_and_keys_are_under_a_hard_limit(plane, tenant):
    key = await a_key(plane, tenant)
    digest = key_digest(PEPPER.encode(), key["key"])

    async def flags():
        """As looked up, having checked that the poll tells the same."""
        async with plane.services.postgres.connection() as conn:
            found_key, found_tenant = await tenants.key_by_digest(conn, digest)
            polled = await tenants.changes_since(conn, since)
        for row in (found_key, found_tenant):
            told = [r for r in (*polled.keys, *polled.tenants) if r.id == row.id]
            assert told in ([], [row])
        heard.update(row.id for row in (*polled.keys, *polled.tenants))
        return found_tenant.hard_capped, found_key.hard_capped

    async def change(method, path, body=None):
        nonlocal since
        heard.clear()
        async with plane.services.postgres.connection() as conn:
            since = (await tenants.changes_since(conn, 0, limit=10_000)).version
        answer = await plane.admin(method, path, body)
        assert answer.status_code == 200, answer.text

    since, heard = 0, set()
    assert await flags() == (False, False)
    for path, name, capped in [
        (f"/tenants/{tenant}/caps/month", tenant, (True, False)),
        (f"/keys/{key['id']}/caps/day", key["id"], (False, True)),
    ]:
        for method, body, seen in [
            ("PUT", {"soft_micro": 5}, (False, False)),
            ("PUT", {"hard_micro": 5}, capped),
            ("DELETE", None, (False, False)),
        ]:
            await change(method, path, body)
            assert await flags() == seen
            assert heard == {name}


async def test_what_is_not_a_cap_is_refused_by_its_field(plane, tenant):
    path = f"/tenants/{tenant}/caps/day"
    for body, param in [
        ({}, "hard_micro"),
        ({"hard_micro": None, "soft_micro": None}, "hard_micro"),
        ({"hard_micro": 5, "soft_micro": 6}, "soft_micro"),
        ({"hard_micro": -1}, "hard_micro"),
        ({"hard_micro": "5"}, "hard_micro"),
        ({"hard_micro": 1.5}, "hard_micro"),
        ({"hard_micro": 2**60}, "hard_micro"),
        ({"hard_micro": 5, "period": "day"}, "period"),
    ]:
        assert_refused(await plane.admin("PUT", path, body), 422, "unprocessable", param)
    assert (await plane.admin("GET", f"/tenants/{tenant}/caps")).json() == {"caps": []}


async def test_caps_of_nobody_or_for_no_period_are_not_found(plane, tenant):
    body = {"hard_micro": 5}
    for path in ("/tenants/ten_0/caps", "/keys/key_0/caps"):
        assert_refused(await plane.admin("GET", path), 404, "not_found")
        assert_refused(await plane.admin("PUT", f"{path}/day", body), 404, "not_found")
        assert_refused(await plane.admin("DELETE", f"{path}/day"), 404, "not_found")
    answer = await plane.admin("PUT", f"/tenants/{tenant}/caps/week", body)
    assert_refused(answer, 404, "not_found", "period")


async def test_setting_and_taking_away_are_in_the_audit_log(plane, tenant):
    key = (await a_key(plane, tenant))["id"]
    for subject, path in [(tenant, f"/tenants/{tenant}"), (key, f"/keys/{key}")]:
        await plane.admin("PUT", f"{path}/caps/day", {"hard_micro": 5})
        await plane.admin("DELETE", f"{path}/caps/day")
        records = (await plane.admin("GET", "/audit-log", subject=subject)).json()["records"]
        assert [r["action"] for r in records if r["action"] != "key.create"] == [
            "cap.remove",
            "cap.set",
        ]
        assert records[1]["detail"]["hard_micro"] == 5


async def test_a_cap_set_amid_a_crowd_counts_each_request_once(plane, tenant):
    ended, held, is_set = 0, 0, asyncio.Event()

    async def go_on(rounds_after=3):
        nonlocal ended, held
        while rounds_after:
            rounds_after -= is_set.is_set()
            await billed_50(plane, tenant)
            ended += 1
            await reserved(plane, tenant, 7)
            held += 1

    crowd = [asyncio.create_task(go_on()) for _ in range(8)]
    while ended < 20:  # noqa: ASYNC110 - what is waited for is the crowd's own
        await asyncio.sleep(0.01)
    answer = await plane.admin("PUT", f"/tenants/{tenant}/caps/day", {"hard_micro": 10**9})
    assert 0 < answer.json()["posted_micro"] <= 50 * ended
    is_set.set()
    await asyncio.gather(*crowd)
    (cap,) = (await plane.admin("GET", f"/tenants/{tenant}/caps")).json()["caps"]
    assert (cap["posted_micro"], cap["reserved_micro"]) == (50 * ended, 7 * held)
    account = (await plane.admin("GET", f"/tenants/{tenant}/account")).json()
    assert (account["posted_micro"], account["reserved_micro"]) == (50 * ended, 7 * held)
