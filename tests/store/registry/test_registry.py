"""Models, deployments, routes, and the view of them that gateways route from."""

import time

import pytest

from core.fleet import ReplicaState
from core.pricing import Terms
from store import fleet, registry
from store.changes import current_change
from store.registry import DesiredState, VersionState
from store.routing_view import routing_view
from tests.support.registry import (
    a_deployment,
    a_price,
    a_register,
    a_version,
    open_postgres,
)

pytestmark = [pytest.mark.services, pytest.mark.anyio]


@pytest.fixture
async def pg(fresh_postgres_url):
    async with open_postgres(fresh_postgres_url) as postgres:
        yield postgres


async def view_of(pg, region="local", last=None):
    async with pg.connection() as conn:
        return await routing_view(conn, region, last=last)


async def test_registering_the_same_content_twice_is_one_version(pg):
    arguments = {"version": "v9", "model": "m", "family": "llama", "context_tokens": 64}
    for is_new in (True, False):
        async with pg.transaction() as conn:
            assert is_new == await registry.register_version(
                conn, **arguments, state=VersionState.STAGED, manifest={"is_new": is_new}
            )
    async with pg.connection() as conn:
        found = await registry.model_version(conn, "v9")
        listed = await registry.model_versions_page(conn, model="m", limit=5)
    assert found is not None
    assert (found.state, found.manifest) == (VersionState.STAGED, {"is_new": True})
    assert listed == [found]


async def test_a_state_changes_and_an_unknown_version_has_none(pg):
    async with pg.transaction() as conn:
        await a_version(conn)
        assert await registry.set_version_state(conn, "v1", VersionState.RETIRED)
        assert not await registry.set_version_state(conn, "v0", VersionState.RETIRED)
        assert (await registry.model_version(conn, "v1")).state is VersionState.RETIRED


async def test_a_taken_deployment_name_makes_nothing(pg):
    async with pg.transaction() as conn:
        await a_deployment(conn)
        assert not await registry.create_deployment(
            conn, name="smol-a", version="v1", region="elsewhere"
        )
        assert (await registry.deployment(conn, "smol-a")).region == "local"
        assert [d.name for d in await registry.deployments_page(conn, limit=5)] == ["smol-a"]


async def test_each_write_of_a_route_has_a_higher_version_even_its_deletion(pg):
    async with pg.transaction() as conn:
        await a_deployment(conn)
    versions = []
    for _ in range(2):
        async with pg.transaction() as conn:
            versions.append(
                await registry.put_route(
                    conn, model="smol", deployment="smol-a", max_output_tokens=0
                )
            )
    async with pg.transaction() as conn:
        assert await registry.version_in_use(conn, "v1")
        versions.append(await registry.delete_route(conn, "smol"))
        assert not await registry.version_in_use(conn, "v1")
    async with pg.transaction() as conn:
        assert await registry.delete_route(conn, "smol") is None
    assert versions == sorted(set(versions))


async def test_a_route_is_in_the_view_with_its_prices_past_and_to_come(pg):
    now_ms = time.time_ns() // 1_000_000
    hour_ms = 3_600_000

    async def priced(effective_ms, last=None):
        """Whether a new price's start is priced in the view after it, and which view that is."""
        async with pg.transaction() as conn:
            price = await a_price(conn, effective_ms=effective_ms)
        view = await view_of(pg, last=last)
        found = view.prices.resolve(Terms(), "smol", service_class="batch", at_ms=effective_ms)
        return found == price, view

    async with pg.transaction() as conn:
        await a_deployment(conn)
        await registry.put_route(conn, model="smol", deployment="smol-a", max_output_tokens=100)
    empty = await view_of(pg)
    assert empty.prices.resolve(Terms(), "smol", service_class="batch", at_ms=now_ms) is None
    to_come, view = await priced(now_ms + hour_ms, last=empty)
    in_force, view = await priced(now_ms - hour_ms // 2, last=view)
    before, view = await priced(1, last=view)
    assert (to_come, in_force, before) == (True, True, True)
    assert (await view_of(pg, last=view)).prices is view.prices  # nothing new: not read again
    await priced(now_ms - 2 * hour_ms, last=view)
    view = await view_of(pg)
    # A price that another took over from more than an hour ago is not carried along.
    assert view.prices.resolve(Terms(), "smol", service_class="batch", at_ms=1) is None
    (model,) = view.models
    assert (model.model, model.version, model.deployment) == ("smol", "v1", "smol-a")
    assert (model.pool, model.max_output_tokens) == ("smol-a@local", 100)
    assert (model.context_tokens, model.family) == (2048, "llama")


async def test_a_view_is_of_one_region(pg):
    async with pg.transaction() as conn:
        await a_deployment(conn, region="far")
        await registry.put_route(conn, model="smol", deployment="smol-a", max_output_tokens=0)
        await a_price(conn)
        await fleet.put_replica(conn, a_register(region="far"))
    assert (await view_of(pg)).models == ()
    far = await view_of(pg, "far")
    assert [model.pool for model in far.models] == ["smol-a@far"]
    assert list(far.replicas) == ["smol-a@far"]


async def test_every_pool_of_a_model_is_in_the_view_be_it_empty(pg):
    async with pg.transaction() as conn:
        await a_deployment(conn)
        await registry.put_route(conn, model="smol", deployment="smol-a", max_output_tokens=0)
        await a_price(conn)
    view = await view_of(pg)
    assert view.replicas == {"smol-a@local": ()}
    async with pg.connection() as conn:
        assert view.version == await current_change(conn, "routing")


@pytest.mark.parametrize("state", list(ReplicaState))
async def test_only_a_ready_replica_is_told_as_ready(pg, state):
    async with pg.transaction() as conn:
        await a_deployment(conn)
        await registry.put_route(conn, model="smol", deployment="smol-a", max_output_tokens=0)
        await a_price(conn)
        await fleet.put_replica(conn, a_register(state=state, can_resume=False))
    ((replica,),) = (await view_of(pg)).replicas.values()
    assert replica.ready == (state is ReplicaState.READY)
    assert (replica.replica, replica.boot_id, replica.url) == (
        "rep-0",
        "boot_1",
        "http://127.0.0.1:8100",
    )
    assert (replica.kv_blocks, replica.sequences, replica.block_tokens) == (64, 8, 16)
    assert not replica.can_resume


async def test_a_draining_deployment_has_no_ready_replica(pg):
    async with pg.transaction() as conn:
        await a_deployment(conn)
        await registry.put_route(conn, model="smol", deployment="smol-a", max_output_tokens=0)
        await a_price(conn)
        await fleet.put_replica(conn, a_register())
        assert await registry.set_desired_state(conn, "smol-a", DesiredState.DRAINING)
        assert not await registry.set_desired_state(conn, "smol-b", DesiredState.DRAINING)
        told = await fleet.drain_now(conn, "rep-0")
        assert told == fleet.DrainNow(desired_state="draining", reason="", left_ms=None)
        assert await fleet.drain_now(conn, "rep-9") is None
    ((replica,),) = (await view_of(pg)).replicas.values()
    assert not replica.ready


async def test_a_deployment_nobody_is_routed_to_is_not_in_the_view(pg):
    async with pg.transaction() as conn:
        await a_deployment(conn)
        await fleet.put_replica(conn, a_register())
    assert (await view_of(pg)).replicas == {}
