"""What a gateway asks Postgres for a key, and for what changed: by how many round trips."""

from contextlib import asynccontextmanager

import pytest

from core.allowance import Allowance
from core.ids import KeyId
from core.safety.policy import Pattern, Policy, Rule
from core.tenancy import key_digest
from gateway.sources import PostgresSource
from store import tenants
from store.limits import say, say_of_models
from store.postgres import Postgres, PostgresConfig
from store.safety import Assignment, assign_policy, put_policy
from tests.support.registry import a_new_tenant, open_postgres
from tests.support.round_trips import counting

pytestmark = [pytest.mark.services, pytest.mark.anyio]

PEPPER = b"a pepper for tests"
POLICY = Policy(
    rules=(Rule(name="r", stages=("input",), detector=Pattern(pattern="x"), action="mask"),)
)

HELD = Assignment(policy="shared", version=None, keep_text=False)


@asynccontextmanager
async def one_connection(url):
    """A pool that opens no other one beside what is counted."""
    config = PostgresConfig(database_url=url, application_name="test", connections_max=1)
    postgres = await Postgres.open(config)
    try:
        yield postgres
    finally:
        await postgres.close()


async def make(postgres, count=3):
    """Tenants under one policy, with limits and a key each; by digest their keys and ids."""
    made = {}
    async with postgres.transaction() as conn:
        await put_policy(conn, "shared", POLICY, 0)
        for _ in range(count):
            new = a_new_tenant(allowance=Allowance(requests_per_min=7))
            await tenants.create_tenant(conn, new)
            digest = key_digest(PEPPER, new.id)
            key = KeyId(f"key_{new.id}")
            await tenants.create_key(
                conn, key_id=key, tenant_id=new.id, name="k", public="hw_abc", digest=digest
            )
            await say(conn, "key", key, Allowance(concurrency=3))
            await say_of_models(conn, "tenant", new.id, {"m": Allowance(concurrency=1)})
            await assign_policy(conn, new.id, HELD)
            made[digest] = (key, new.id)
    return made


async def test_a_key_never_seen_is_one_round_trip_with_all_that_belongs_to_it(postgres_url):
    async with open_postgres(postgres_url) as postgres:
        made = await make(postgres)
    async with counting(postgres_url) as (trips, url), one_connection(url) as postgres:
        source = PostgresSource(postgres, "local")
        await source.changes(None)  # connects
        took = []
        for _ in range(4):
            for digest, (key_id, tenant_id) in made.items():
                trips.count = 0
                found = await source.key_by_digest(digest)
                took.append(trips.count)
                assert found is not None
                key, tenant = found
                assert (key.id, key.allowance.concurrency, tenant.id) == (key_id, 3, tenant_id)
                assert len(tenant.salt) == 16
                assert (
                    tenant.limits.requests_per_min,
                    tenant.model_allowances["m"].concurrency,
                ) == (7, 1)
                assert tenant.safety is not None
                assert tenant.safety.policy == POLICY
        # Once on a connection the driver has a statement prepared that is asked often.
        assert sorted(took) == [1] * (len(took) - 1) + [2]
        trips.count = 0
        assert await source.key_by_digest(bytes(32)) is None
        assert trips.count == 1


async def test_changes_are_one_round_trip_and_a_page_more_for_each_page(postgres_url):
    async with counting(postgres_url) as (trips, url), one_connection(url) as postgres:
        source = PostgresSource(postgres, "local", changes_max=10)
        cursor = (await source.changes(None)).cursor
        trips.count = 0
        nothing = await source.changes(cursor)
        assert (trips.count, nothing.tenants, nothing.cursor) == (1, (), cursor)
        made = await make(postgres)
        trips.count = 0
        changes = await source.changes(cursor)
        assert trips.count == 1
        assert {(key.id, key.tenant_id) for key in changes.keys} == set(made.values())
        assert len(changes.tenants) == 3
        first, *others = [tenant.safety.policy for tenant in changes.tenants if tenant.safety]
        assert first == POLICY
        assert len(others) == 2
        assert all(policy is first for policy in others), "one policy is read once"
        await make(postgres, 12)
        trips.count = 0
        changes = await source.changes(changes.cursor)
        assert trips.count == 2
        assert len({tenant.id for tenant in changes.tenants}) == 12
