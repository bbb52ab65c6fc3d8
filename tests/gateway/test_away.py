"""Postgres or Valkey away in the middle: nothing hangs, nothing is lost, all is settled after."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from core.ids import KeyId
from core.metering import RequestTimings, Reserve, Settle
from core.money import EndCause
from gateway.spool import Record, Spool
from store.leases import assert_lease
from store.ledger_audit import audit
from store.migrate import upgrade
from tests.support.gateway_requests import CHAT, a_body, error_of, headers_of, post, text_of
from tests.support.gateway_world import (
    PRICE,
    Caller,
    World,
    a_world,
    until,
    until_answered,
)
from tests.support.openai_grammar import check_openai_chat_stream
from tests.support.postgres_faults import a_proxy, timed
from tests.support.scripted_worker import answers, whole_text
from tests.support.services import PostgresServer, ValkeyServer

pytestmark = [pytest.mark.anyio, pytest.mark.services]

LEDGER_S = 5.0  # the ledger's patience
SLACK_S = 2.0  # a busy machine's


@pytest.fixture
async def lonely(
    own_postgres: PostgresServer, valkey_url: str, tmp_path: Path
) -> AsyncIterator[World]:
    """A world whose Postgres the test may stop."""
    url = own_postgres.create_database("own")
    await asyncio.to_thread(upgrade, url)
    async with a_world(url, valkey_url, tmp_path) as made:
        yield made


async def stop(server: PostgresServer | ValkeyServer) -> None:
    await asyncio.to_thread(server.running.kill)


async def start(server: PostgresServer | ValkeyServer) -> None:
    await asyncio.to_thread(server.running.start)


async def is_ready(world: World) -> bool:
    async with httpx.AsyncClient(base_url=world.url) as client:
        return (await client.get("/health/ready")).status_code == 200


async def test_postgres_away_in_mid_stream(lonely: World, own_postgres: PostgresServer) -> None:
    world = lonely
    free, capped = await world.add_caller(), await world.add_caller(hard_cap_micro=10**9)
    for caller in (free, capped):
        assert (await post(world, caller)).status_code == 200
    world.worker.default = answers(40, gap_s=0.02)
    streams = [asyncio.create_task(post(world, caller, stream=True)) for caller in (free, capped)]
    await until(lambda: len(world.worker.requests) == 4)
    await stop(own_postgres)
    new, refused = await asyncio.gather(post(world, free), post(world, capped))
    assert text_of(CHAT, new) == whole_text(40)
    assert refused.status_code == 503
    assert "budget cannot be checked" in error_of(refused)["message"]
    for response in await asyncio.gather(*streams):
        told = check_openai_chat_stream(response.content, include_usage=False)
        assert told.texts == [whole_text(40)]
    await until(lambda: world.gateway._books.spool_bytes > 0)
    assert world.gateway._books.away
    assert not await is_ready(world)
    assert (await post(world, Caller("", KeyId(""), "hw_aaaaaaaa_" + "a" * 32))).status_code == 401
    await start(own_postgres)
    rows = await world.settled(free, 3)
    assert [row.metered_output_tokens for row in rows] == [5, 40, 40]
    assert {row.cause for row in rows} == {EndCause.COMPLETE}
    assert await world.balance(free) == (sum(row.billed_micro for row in rows), 0)
    rows = await world.settled(capped, 2)
    assert await world.balance(capped) == (sum(row.billed_micro for row in rows), 0)
    await until(lambda: not world.gateway._books.away)
    assert world.gateway._books.spool_bytes == 0
    await until_answered(lambda: is_ready(world))
    assert (await post(world, capped)).status_code == 200
    await world.settled(capped, 3)
    await world.dispatcher_is_empty()


async def test_a_black_hole_is_noticed_within_the_bound_and_then_costs_nobody_any_time(
    postgres_url: str, valkey_url: str, tmp_path: Path
) -> None:
    async with (
        a_proxy(postgres_url) as proxy,
        a_world(postgres_url, valkey_url, tmp_path, database_url=proxy.via(postgres_url)) as world,
    ):
        free, capped = await world.add_caller(), await world.add_caller(hard_cap_micro=10**9)
        for caller in (free, capped):
            assert (await post(world, caller)).status_code == 200
        proxy.black_hole()
        (answer, took_s), (refused, capped_s) = await asyncio.gather(
            timed(post(world, free)), timed(post(world, capped))
        )
        assert (answer.status_code, refused.status_code) == (200, 503)
        assert max(took_s, capped_s) < LEDGER_S * 1.1 + SLACK_S
        (answer, took_s), (refused, capped_s) = await asyncio.gather(
            timed(post(world, free)), timed(post(world, capped))
        )
        assert (answer.status_code, refused.status_code) == (200, 503)
        assert max(took_s, capped_s) < SLACK_S
        proxy.heal()
        rows = await world.settled(free, 3)
        assert await world.balance(free) == (sum(row.billed_micro for row in rows), 0)
        await until(lambda: not world.gateway._books.away)
        assert (await post(world, capped)).status_code == 200
        async with world.postgres.connection() as conn:
            assert (await audit(conn)).violations == ()
        await world.dispatcher_is_empty()


async def test_a_gateway_that_ends_while_postgres_is_away_leaves_its_words_to_the_next(
    lonely: World, own_postgres: PostgresServer
) -> None:
    world = lonely
    caller = await world.add_caller()
    assert (await post(world, caller)).status_code == 200
    await world.settled(caller, 1)
    await stop(own_postgres)
    assert (await post(world, caller)).status_code == 200
    await world.stop_gateway()
    await start(own_postgres)
    await world.start_gateway()
    rows = await world.settled(caller, 2)
    assert {row.cause for row in rows} == {EndCause.COMPLETE}
    assert (await world.balance(caller))[1] == 0


async def test_valkey_away_in_mid_stream(
    postgres_url: str, own_valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with a_world(postgres_url, own_valkey.embedded.url, tmp_path) as world:
        caller = await world.add_caller()
        world.worker.default = answers(40, gap_s=0.02)
        first = asyncio.create_task(post(world, caller, stream=True))
        await until(lambda: world.worker.requests)
        await stop(own_valkey)
        assert text_of(CHAT, await post(world, caller)) == whole_text(40)
        assert check_openai_chat_stream((await first).content, include_usage=False).texts == [
            whole_text(40)
        ]
        assert not await is_ready(world)
        late = asyncio.create_task(post(world, caller, stream=True))
        await start(own_valkey)
        assert check_openai_chat_stream((await late).content, include_usage=False).texts == [
            whole_text(40)
        ]
        await until_answered(lambda: is_ready(world))
        assert text_of(CHAT, await post(world, caller)) == whole_text(40)
        rows = await world.settled(caller, 4)
        assert {row.cause for row in rows} == {EndCause.COMPLETE}
        await world.dispatcher_is_empty()


async def test_a_dead_incarnations_spool_is_adopted(
    postgres_url: str, valkey_url: str, tmp_path: Path
) -> None:
    async with a_world(postgres_url, valkey_url, tmp_path) as world:
        caller = await world.add_caller()
        await world.stop_gateway()
        spool = Spool(Path(world.settings.spool_dir), "gw_dead", bytes_max=1_000_000)
        spool.open()
        await spool.append(Record(reserve=_reserve(world, caller)))
        await spool.append(Record(settle=_settle(caller)))
        os.close(spool._lock_file)
        async with world.postgres.transaction() as conn:
            await assert_lease(conn, "gw_dead", "local", 1, spool_bytes=spool.size_bytes)
        await world.start_gateway()
        (row,) = await world.settled(caller, 1)
        assert (row.request_id, row.gateway_id) == ("req_local_dead", "gw_dead")
        assert row.cause is EndCause.CLIENT_CANCELLED

        async def nothing_waits() -> bool:
            async with world.postgres.connection() as conn:
                cursor = await conn.execute("SELECT sum(spool_bytes) FROM gateways")
                return await cursor.fetchone() == (0,)

        await until_answered(nothing_waits)


def _reserve(world: World, caller: Caller) -> Reserve:
    return Reserve(
        request_id="req_local_dead",
        gateway_id="gw_dead",
        tenant_id=caller.tenant_id,
        key_id=caller.key_id,
        amount_micro=10,
        price_id=PRICE.id,
        model="tiny",
        version=world.manifest.version,
        region="local",
        service_class="standard",
        dialect="openai",
        endpoint="chat_completions",
        stream=True,
        prompt_tokens=3,
        max_tokens=5,
        created_ms=1_700_000_000_000,
    )


def _settle(caller: Caller) -> Settle:
    return Settle(
        request_id="req_local_dead",
        tenant_id=caller.tenant_id,
        cause=EndCause.CLIENT_CANCELLED,
        attempts=(),
        delivered_tokens=0,
        timings=RequestTimings(),
        ended_ms=1_700_000_001_000,
    )


async def test_keys_are_served_from_the_cache_and_unknown_ones_are_not_guessed(
    lonely: World, own_postgres: PostgresServer
) -> None:
    world = lonely
    known, unknown = await world.add_caller(), await world.add_caller()
    assert (await post(world, known)).status_code == 200
    await stop(own_postgres)
    async with httpx.AsyncClient(base_url=world.url, timeout=30) as client:
        listed = await client.get("/v1/models", headers=headers_of(known))
        assert listed.status_code == 200
        refused = await client.post(CHAT, json=a_body(CHAT), headers=headers_of(unknown))
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
    await start(own_postgres)
    await world.settled(known, 1)
