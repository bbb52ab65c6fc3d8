"""Safety policies through the admin API: versions, who has which, and what is refused."""

import asyncio
import secrets
import time

import pytest

from control_plane.safety_job import forget_old_hits
from core.safety.policy import Policy
from store import safety
from store.tenants import changes_since
from tests.support.control_plane import assert_refused
from tests.support.reconciler_case import a_case

pytestmark = [pytest.mark.services, pytest.mark.anyio]

DAY_MS = 86_400_000
RULE = {
    "name": "words",
    "stages": ["input", "output"],
    "detector": {"type": "terms", "terms": ["secret"]},
    "action": "mask",
}


def a_name(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(4)}"


def put(plane, name, *rules):
    return plane.admin("PUT", f"/safety-policies/{name}", {"rules": list(rules)})


async def a_tenant(plane) -> str:
    tenant = await plane.made("/tenants", {"name": a_name("tenant")})
    return tenant["id"]


async def test_each_change_is_a_version_and_no_change_is_none(plane):
    name = a_name("policy")
    first = (await put(plane, name, RULE)).json()
    assert first["version"] == 1
    assert first["hold_chars"] == 5
    assert first["rules"][0]["on_fault"] == "closed"
    assert (await put(plane, name, RULE)).json() == first
    digits = RULE | {"detector": {"type": "pattern", "pattern": r"\d{30}"}}
    second = (await put(plane, name, digits)).json()
    assert (second["version"], second["hold_chars"]) == (2, 30)
    assert (await plane.admin("GET", f"/safety-policies/{name}")).json() == second
    older = await plane.admin("GET", f"/safety-policies/{name}", version=1)
    assert older.json() == first
    missing = await plane.admin("GET", f"/safety-policies/{name}", version=3)
    assert_refused(missing, 404, "not_found")
    listed = (await plane.admin("GET", "/safety-policies", limit=1000)).json()
    assert second in listed["policies"]
    assert first not in listed["policies"]


@pytest.mark.parametrize(("change", "param"), [
    ({"detector": {"type": "pattern", "pattern": "(a+)+$"}}, "rules[0].detector.pattern"),
    ({"detector": {"type": "pattern", "pattern": "(?:a{99}){99}"}}, "rules[0].detector.pattern"),
    ({"detector": {"type": "pattern", "pattern": r"(a)\1"}}, "rules[0].detector.pattern"),
    ({"detector": {"type": "terms", "terms": ["\u200b"]}}, "rules[0].detector.terms[0]"),
    ({"colour": "red"}, "rules[0].colour"),
    ({"action": "forget"}, "rules[0].action"),
])  # fmt: skip
async def test_a_policy_that_could_blow_up_or_says_what_we_do_not_know_is_refused(
    plane, change, param
):
    name = a_name("policy")
    refused = await put(plane, name, RULE | change)
    assert_refused(refused, 422, "unprocessable", param)
    assert_refused(await plane.admin("GET", f"/safety-policies/{name}"), 404, "not_found")


async def test_a_name_that_is_none_is_refused(plane):
    assert_refused(await put(plane, "No Such", RULE), 422, "unprocessable", "name")


async def test_a_tenant_has_the_newest_version_or_the_one_it_was_given(plane):
    name, tenant, other = a_name("policy"), await a_tenant(plane), await a_tenant(plane)
    await put(plane, name, RULE)
    given = await plane.admin("PUT", f"/tenants/{tenant}/safety", {"policy": name})
    assert given.json()["assignment"] == {"policy": name, "version": None, "keep_text": False}
    pinned = {"policy": name, "version": 1, "keep_text": True}
    await plane.admin("PUT", f"/tenants/{other}/safety", pinned)
    read = (await plane.admin("GET", f"/tenants/{other}/safety")).json()
    assert read == {"tenant_id": other, "assignment": pinned}
    await put(plane, name, RULE | {"replacement": "#"})
    services = plane.services
    async with services.postgres.connection() as conn:
        changes = await changes_since(conn, 0, limit=100_000)
    holds = {row.id: row.safety for row in changes.tenants}
    assert (holds[tenant].version, holds[other].version) == (2, 1)
    assert (holds[tenant].keep_text, holds[other].keep_text) == (False, True)
    assert isinstance(holds[tenant].policy, Policy)


async def test_gateways_are_told_of_each_change_by_the_tenants_version(plane):
    name, tenants = a_name("policy"), [await a_tenant(plane) for _ in range(3)]

    async def versions():
        async with plane.services.postgres.connection() as conn:
            changes = await changes_since(conn, 0, limit=100_000)
        return {row.id: row.version for row in changes.tenants if row.id in tenants}

    await put(plane, name, RULE)
    before = await versions()
    for tenant in tenants:
        await plane.admin("PUT", f"/tenants/{tenant}/safety", {"policy": name})
    given = await versions()
    await put(plane, name, RULE | {"action": "block"})
    changed = await versions()
    await plane.admin("DELETE", f"/tenants/{tenants[0]}/safety")
    await plane.admin("DELETE", f"/tenants/{tenants[0]}/safety")
    after = await versions()
    assert all(before[each] < given[each] < changed[each] for each in tenants)
    assert len(set(changed.values())) == 3  # pages are read by number: two of one would be lost
    assert after[tenants[0]] > changed[tenants[0]]
    assert after[tenants[1]] == changed[tenants[1]]


async def test_what_there_is_not_is_refused(plane):
    tenant = await a_tenant(plane)
    unknown = await plane.admin("PUT", f"/tenants/{tenant}/safety", {"policy": a_name("no")})
    assert_refused(unknown, 422, "unprocessable", "policy")
    nobody = await plane.admin("PUT", "/tenants/ten_none/safety", {"policy": a_name("no")})
    assert_refused(nobody, 404, "not_found")
    odd = await plane.admin("PUT", f"/tenants/{tenant}/safety", {"policy": "p", "mode": 1})
    assert_refused(odd, 422, "unprocessable", "mode")
    assert (await plane.admin("GET", f"/tenants/{tenant}/safety")).json()["assignment"] is None


def a_hit(tenant, n=0, days_ago=0, text=None):
    return safety.NewHit(
        at_ms=time.time_ns() // 1_000_000 - days_ago * DAY_MS,
        tenant_id=tenant,
        request_id=f"req_{n}",
        policy="p",
        policy_version=1,
        rule="words",
        stage="output",
        action="mask",
        choice=0,
        chars=6,
        text=text,
    )


async def record(plane, *hits):
    async with plane.services.postgres.transaction() as conn:
        await safety.record_hits(conn, hits)


async def test_hits_are_listed_newest_first(plane):
    tenant = await a_tenant(plane)
    await record(plane, a_hit(tenant, 0, text="secret"), a_hit(tenant, 1), a_hit(tenant, 2))
    first = (await plane.admin("GET", "/safety-hits", tenant=tenant, limit=2)).json()
    assert [hit["request_id"] for hit in first["hits"]] == ["req_2", "req_1"]
    rest = await plane.admin("GET", "/safety-hits", tenant=tenant, before=first["before"])
    assert [hit["text"] for hit in rest.json()["hits"]] == ["secret"]
    one = (await plane.admin("GET", "/safety-hits", request_id="req_1", tenant=tenant)).json()
    assert len(one["hits"]) == 1


async def left(case) -> list[str]:
    async with case.pg.connection() as conn:
        return [hit.request_id for hit in await safety.hits_page(conn, limit=100)]


async def test_old_hits_are_forgotten_in_batches_and_young_ones_are_not(case):
    kept_days = case.services.settings.safety_hits_days
    old = [a_hit("t", n, days_ago=kept_days + 1, text="x") for n in range(4)]
    young = [a_hit("t", n, days_ago=kept_days - 1) for n in range(4, 6)]
    # One that was late to be recorded is young before older ones, and stays.
    await record(case, young[0], *old, young[1])
    async with case.pg.transaction() as conn:
        assert await safety.forget_hits(conn, kept_days=kept_days, limit=3) == 2
    twice = await asyncio.gather(*(forget_old_hits(case.services) for _ in range(2)))
    assert sum(twice) == 2
    assert await left(case) == ["req_5", "req_4"]


async def test_all_hits_are_kept_where_no_time_is_said(fresh_postgres_url, valkey_url):
    async with a_case(fresh_postgres_url, valkey_url, safety_hits_days=0) as case:
        await record(case, a_hit("t", days_ago=10_000))
        assert await forget_old_hits(case.services) == 0
        assert await left(case) == ["req_0"]
