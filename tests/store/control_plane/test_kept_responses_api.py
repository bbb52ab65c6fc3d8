"""Whether responses are kept, through the admin API, and the job that deletes old ones."""

import secrets

import pytest

from control_plane.response_jobs import sweep_responses
from store.responses import NewResponse, keep_response, response_by_id, response_chain
from tests.support.control_plane import assert_refused
from tests.support.ledger_database import a_tenant

pytestmark = [pytest.mark.services, pytest.mark.anyio]


async def kept(plane, tenant, *, previous=None, kept_s=60, size=4):
    """A response's id; None where it is not kept."""
    name = f"resp_{secrets.token_hex(8)}"
    new = NewResponse(
        id=name,
        tenant_id=tenant,
        previous_id=previous,
        kept_s=kept_s,
        key_id="",
        nonce=b"",
        body=b"{}",
        bytes=size,
    )
    async with plane.services.postgres.transaction() as conn:
        return name if await keep_response(conn, new) else None


async def found(plane, tenant, name):
    async with plane.services.postgres.connection() as conn:
        return await response_by_id(conn, tenant, name)


async def chain(plane, tenant, name, *, count_max=10, bytes_max=1000):
    async with plane.services.postgres.connection() as conn:
        return await response_chain(conn, tenant, name, count_max=count_max, bytes_max=bytes_max)


async def test_turned_off_nothing_is_kept_and_what_was_is_deleted(plane):
    tenant, other = [await a_tenant(plane.services.postgres) for _ in range(2)]
    path = f"/tenants/{tenant}/responses"
    assert (await plane.admin("GET", path)).json()["keep"] is True
    mine, theirs = await kept(plane, tenant), await kept(plane, other)
    answer = await plane.admin("PUT", path, {"keep": False})
    assert answer.json() == {"tenant_id": tenant, "keep": False, "deleted": 1}
    assert await found(plane, tenant, mine) is None
    assert await kept(plane, tenant) is None
    assert await found(plane, other, theirs) is not None
    assert (await plane.admin("PUT", path, {"keep": True})).json()["deleted"] == 0
    assert await kept(plane, tenant) is not None


async def test_what_is_misspelt_or_unknown_is_refused(plane):
    tenant = await a_tenant(plane.services.postgres)
    path = f"/tenants/{tenant}/responses"
    assert_refused(await plane.admin("PUT", path, {"kept": False}), 422, "unprocessable", "kept")
    assert (await plane.admin("GET", "/tenants/ten_none/responses")).status_code == 404
    answer = await plane.admin("PUT", "/tenants/ten_none/responses", {"keep": True})
    assert answer.status_code == 404


async def test_keeping_one_twice_is_keeping_it_once_and_never_another_s(plane):
    tenant, other = [await a_tenant(plane.services.postgres) for _ in range(2)]
    name = await kept(plane, tenant)
    new = NewResponse(
        id=name,
        tenant_id=tenant,
        previous_id=None,
        kept_s=60,
        key_id="",
        nonce=b"",
        body=b"changed",
        bytes=7,
    )
    async with plane.services.postgres.transaction() as conn:
        assert await keep_response(conn, new)
    row = await found(plane, tenant, name)
    assert row is not None
    assert row.body == b"{}"
    assert await found(plane, other, name) is None


async def test_a_chain_ends_at_its_bounds_and_at_what_is_missing(plane):
    tenant = await a_tenant(plane.services.postgres)
    first = await kept(plane, tenant)
    second = await kept(plane, tenant, previous=first)
    third = await kept(plane, tenant, previous=second)
    assert [row.id for row in await chain(plane, tenant, third)] == [third, second, first]
    assert [row.so_far for row in await chain(plane, tenant, third)] == [4, 8, 12]
    assert [row.id for row in await chain(plane, tenant, third, count_max=2)] == [third, second]
    assert [row.id for row in await chain(plane, tenant, third, bytes_max=5)] == [third, second]
    orphan = await kept(plane, tenant, previous="resp_gone")
    (row,) = await chain(plane, tenant, orphan)
    assert row.previous_id == "resp_gone"


async def test_old_ones_are_deleted_and_others_stay(plane):
    tenant = await a_tenant(plane.services.postgres)
    await sweep_responses(plane.services)
    old = [await kept(plane, tenant, kept_s=0) for _ in range(3)]
    young = await kept(plane, tenant)
    assert await sweep_responses(plane.services) == len(old)
    assert await sweep_responses(plane.services) == 0
    assert await found(plane, tenant, young) is not None
