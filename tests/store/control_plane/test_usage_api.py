"""Usage rows through the admin API."""

import secrets

import pytest

from core.protocol import Usage
from tests.support.control_plane import assert_refused
from tests.support.ledger_commands import a_reserve, a_settle, an_attempt
from tests.support.ledger_database import a_tenant

pytestmark = [pytest.mark.services, pytest.mark.anyio]


async def requests_of_a_tenant(plane, count):
    tenant = await a_tenant(plane.services.postgres)
    made = []
    for _ in range(count):
        request_id = f"req_{secrets.token_hex(8)}"
        await plane.services.ledger.reserve(
            a_reserve(request_id, tenant_id=tenant, created_ms=1_000, amount_micro=1_000)
        )
        made.append(request_id)
    return tenant, made


async def test_a_request_is_found_by_its_id_open_and_settled(plane):
    tenant, (request_id,) = await requests_of_a_tenant(plane, 1)
    (row,) = (await plane.admin("GET", "/usage", request_id=request_id)).json()["usage"]
    assert (row["state"], row["tenant_id"], row["cause"]) == ("open", tenant, None)
    seen = an_attempt(Usage(prompt_tokens=10, output_tokens=20))
    await plane.services.ledger.settle(
        a_settle(request_id, tenant_id=tenant, attempts=(seen,), delivered_tokens=20)
    )
    (row,) = (await plane.admin("GET", "/usage", request_id=request_id)).json()["usage"]
    assert (row["state"], row["cause"], row["metered_output_tokens"]) == ("settled", "complete", 20)
    assert row["first_token_ms"] == 20.0


async def pages(plane, **query):
    seen, after = [], ""
    while after is not None:
        page = (await plane.admin("GET", "/usage", limit=2, after=after, **query)).json()
        seen += [row["request_id"] for row in page["usage"]]
        after = page["after"]
    return seen


async def test_requests_come_newest_first_and_none_is_lost_between_pages(plane):
    # All begin in one millisecond, as a burst's do.
    tenant, made = await requests_of_a_tenant(plane, 5)
    await requests_of_a_tenant(plane, 2)
    of_tenant = await pages(plane, tenant_id=tenant)
    assert sorted(of_tenant) == sorted(made)
    everything = await pages(plane)
    assert len(everything) == len(set(everything))
    assert set(made) <= set(everything)


async def test_without_a_filter_the_newest_of_all_are_listed(plane):
    _, made = await requests_of_a_tenant(plane, 3)
    rows = (await plane.admin("GET", "/usage", limit=1000)).json()["usage"]
    assert set(made) <= {row["request_id"] for row in rows}
    assert len((await plane.admin("GET", "/usage", limit=2)).json()["usage"]) == 2


async def test_what_has_just_ended_is_listed_and_summed_at_once(plane):
    tenant, made = await requests_of_a_tenant(plane, 3)
    for request_id in made:
        await plane.services.ledger.settle(a_settle(request_id, tenant_id=tenant))
    rows = (await plane.admin("GET", "/usage", limit=1000)).json()["usage"]
    ended = {row["request_id"] for row in rows if row["state"] == "settled"}
    assert set(made) <= ended
    period = {"from_ms": 0, "to_ms": 3_600_000}
    await plane.services.ledger.reserve(a_reserve(f"{tenant}_more", tenant_id=tenant))
    await plane.services.ledger.settle(a_settle(f"{tenant}_more", tenant_id=tenant))
    answer = await plane.admin("GET", "/usage/totals", tenant_id=tenant, **period)
    assert [total["requests"] for total in answer.json()["totals"]] == [4]


async def test_what_is_not_there_is_an_empty_list(plane):
    tenant, (request_id,) = await requests_of_a_tenant(plane, 1)
    for query in (
        {"request_id": "req_0"},
        {"tenant_id": "ten_0"},
        {"request_id": request_id, "tenant_id": "ten_0"},
    ):
        assert (await plane.admin("GET", "/usage", **query)).json()["usage"] == []
    both = {"request_id": request_id, "tenant_id": tenant}
    assert len((await plane.admin("GET", "/usage", **both)).json()["usage"]) == 1


async def test_a_bad_bound_is_refused_by_its_name(plane):
    for name, value in (("limit", -1), ("limit", "x"), ("after", "x"), ("after", "1.a b")):
        answer = await plane.admin("GET", "/usage", **{name: value})
        assert_refused(answer, 422, "unprocessable", name)
