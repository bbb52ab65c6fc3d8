"""Tenants and keys as rows, and the numbers by which gateways hear of changes."""

import asyncio

import msgspec
import pytest

from core.ids import KeyId
from core.tenancy import key_digest
from store import tenants
from store.accounts import account
from store.changes import current_change
from tests.support.registry import a_new_tenant, open_postgres

pytestmark = [pytest.mark.services, pytest.mark.anyio]

PEPPER = b"a pepper for tests"


@pytest.fixture
async def pg(postgres_url):
    async with open_postgres(postgres_url) as postgres:
        yield postgres


async def make(pg, **changes):
    new = a_new_tenant(**changes)
    async with pg.transaction() as conn:
        assert await tenants.create_tenant(conn, new)
    return new


async def make_key(pg, tenant_id, text):
    digest = key_digest(PEPPER, text)
    key = KeyId(f"key_{text}")
    async with pg.transaction() as conn:
        await tenants.create_key(
            conn, key_id=key, tenant_id=tenant_id, name="k", public="hw_abc", digest=digest
        )
    return key, digest


async def test_a_tenant_is_read_as_it_was_made_and_has_an_account(pg):
    new = await make(pg)
    async with pg.connection() as conn:
        found = await tenants.tenant_by_id(conn, new.id)
        opened = await account(conn, new.id)
    assert found is not None
    assert opened is not None
    fields = msgspec.structs.asdict(new)
    assert found.limits == fields.pop("allowance").limits
    assert {name: getattr(found, name) for name in fields} == fields
    assert opened.hard_cap_micro == new.hard_cap_micro


async def test_a_taken_name_makes_nothing(pg):
    first = await make(pg)
    second = a_new_tenant(name=first.name)
    async with pg.transaction() as conn:
        assert not await tenants.create_tenant(conn, second)
        assert await tenants.tenant_id_by_name(conn, first.name) == first.id
        assert await tenants.tenant_by_id(conn, second.id) is None
        assert await account(conn, second.id) is None


async def test_a_change_replaces_what_may_change_and_raises_the_version(pg):
    new = await make(pg)
    async with pg.transaction() as conn:
        before = await tenants.tenant_for_change(conn, new.id)
        assert before is not None
        after = await tenants.change_tenant(
            conn,
            msgspec.structs.replace(
                before, output_policy="refuse", weight=5, hard_cap_micro=None, disabled=True
            ),
        )
    assert after.version > before.version
    async with pg.connection() as conn:
        assert await tenants.tenant_by_id(conn, new.id) == after


async def test_two_changers_of_one_tenant_do_not_lose_each_others_change(pg):
    new = await make(pg, weight=1)

    async def heavier():
        async with pg.transaction() as conn:
            tenant = await tenants.tenant_for_change(conn, new.id)
            await tenants.change_tenant(
                conn, msgspec.structs.replace(tenant, weight=tenant.weight + 1)
            )

    await asyncio.gather(*(heavier() for _ in range(5)))
    async with pg.connection() as conn:
        assert (await tenants.tenant_by_id(conn, new.id)).weight == 6


async def test_pages_follow_each_other_in_order_of_name(pg):
    for name in ("zz-c", "zz-a", "zz-b"):
        await make(pg, name=name)
    async with pg.connection() as conn:
        first = await tenants.tenants_page(conn, after="zz", limit=2)
        rest = await tenants.tenants_page(conn, after=first[-1].name, limit=2)
        only = await tenants.tenants_page(conn, name="zz-b", limit=2)
    assert [t.name for t in first] == ["zz-a", "zz-b"]
    assert [t.name for t in rest] == ["zz-c"]
    assert [t.name for t in only] == ["zz-b"]


async def test_a_key_is_found_by_its_digest_alone(pg):
    new = await make(pg)
    key, digest = await make_key(pg, new.id, "one")
    async with pg.connection() as conn:
        found = await tenants.key_by_digest(conn, digest)
        assert await tenants.key_by_digest(conn, bytes(32)) is None
    assert found is not None
    assert (found[0].id, found[0].revoked, found[1].id) == (key, False, new.id)


async def test_revoking_keeps_the_first_time_and_raises_the_version_each_time(pg):
    new = await make(pg)
    key, digest = await make_key(pg, new.id, "two")
    async with pg.transaction() as conn:
        first = await tenants.revoke_key(conn, key)
    async with pg.transaction() as conn:
        second = await tenants.revoke_key(conn, key)
        assert await tenants.revoke_key(conn, "key_none") is None
    assert first.revoked_ms is not None
    assert first.revoked_ms == second.revoked_ms
    assert second.version > first.version
    async with pg.connection() as conn:
        found = await tenants.key_by_digest(conn, digest)
        rows = await tenants.keys_of_tenant(conn, new.id, limit=10)
    assert found is not None
    assert found[0].revoked
    assert [row.id for row in rows] == [key]


async def test_changes_since_tells_exactly_what_changed(pg):
    async with pg.connection() as conn:
        since = await current_change(conn, "tenancy")
    quiet = await make(pg)
    async with pg.connection() as conn:
        between = (await tenants.changes_since(conn, since)).version
    loud = await make(pg)
    key, _ = await make_key(pg, quiet.id, "three")
    async with pg.connection() as conn:
        changes = await tenants.changes_since(conn, between)
        nothing = await tenants.changes_since(conn, changes.version)
    assert [tenant.id for tenant in changes.tenants] == [loud.id]
    assert [row.id for row in changes.keys] == [key]
    assert (nothing.keys, nothing.tenants, nothing.version) == ((), (), changes.version)


async def test_a_long_list_of_changes_comes_in_bounded_parts_without_a_gap(pg):
    async with pg.connection() as conn:
        since = await current_change(conn, "tenancy")
    made = [await make(pg) for _ in range(5)]
    keys = [(await make_key(pg, tenant.id, f"part {tenant.id}"))[0] for tenant in made]
    seen_tenants, seen_keys = set(), set()
    async with pg.connection() as conn:
        for _ in range(20):
            part = await tenants.changes_since(conn, since, limit=2)
            assert len(part.keys) <= 2
            assert len(part.tenants) <= 2
            seen_tenants |= {tenant.id for tenant in part.tenants}
            seen_keys |= {key.id for key in part.keys}
            if part.version == since:
                break
            since = part.version
    assert seen_tenants == {tenant.id for tenant in made}
    assert seen_keys == set(keys)


async def test_a_change_not_yet_committed_is_not_skipped(pg):
    # The trap of sequences: number 1 becomes visible after number 2 was already told.
    new, other = await make(pg), await make(pg)
    async with pg.connection() as conn:
        since = await current_change(conn, "tenancy")
    second_done = asyncio.Event()

    async def change_other():
        async with pg.transaction() as conn:
            tenant = await tenants.tenant_for_change(conn, other.id)
            await tenants.change_tenant(conn, msgspec.structs.replace(tenant, weight=7))
        second_done.set()

    async with pg.transaction() as conn:
        tenant = await tenants.tenant_for_change(conn, new.id)
        await tenants.change_tenant(conn, msgspec.structs.replace(tenant, weight=7))
        later = asyncio.create_task(change_other())
        await asyncio.sleep(0.1)
        assert not second_done.is_set()
        async with pg.connection() as reader:
            assert (await tenants.changes_since(reader, since)).version == since
    await later
    async with pg.connection() as conn:
        changes = await tenants.changes_since(conn, since)
    assert [tenant.id for tenant in changes.tenants] == [new.id, other.id]
