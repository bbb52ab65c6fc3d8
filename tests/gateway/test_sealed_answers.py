"""Kept answers where there is a key to seal them: unreadable at rest, replayed as ever."""

import base64
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest
import redis

from store.answer_cache import NAME_BYTES
from tests.gateway.test_answer_cache import asked, kept, opt_in
from tests.gateway.test_idempotency import keyed
from tests.support.gateway_requests import error_of
from tests.support.gateway_world import Caller, World, a_world
from tests.support.scripted_worker import says

pytestmark = [pytest.mark.anyio, pytest.mark.services]

OLD = f"old:{base64.b64encode(b'o' * 32).decode()}"
NEW = f"new:{base64.b64encode(b'n' * 32).decode()}"
SECRET = "a most private word"


@pytest.fixture
async def world(postgres_url: str, valkey_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with a_world(postgres_url, valkey_url, tmp_path, responses_keys=OLD) as made:
        made.worker.default = says(*SECRET.split(" "))
        yield made


async def another_gateway(world: World, keys: str) -> int:
    world.settings = msgspec.structs.replace(world.settings, responses_keys=keys)
    await world.start_gateway()
    return len(world.servers) - 1


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


async def test_a_key_s_answer_is_sealed_and_its_ring_can_be_rotated(world: World) -> None:
    caller = await world.add_caller()
    first = text_of(await keyed(world, caller))
    await world.settled(caller, 1)
    async with world.postgres.connection() as conn:
        found = await (
            await conn.execute(
                "SELECT answer FROM idempotency_keys WHERE tenant_id = %s", (caller.tenant_id,)
            )
        ).fetchone()
    assert found is not None
    stored = bytes(found[0])
    assert stored[:5] == b"\x00\x03old"
    assert not any(word.encode() in stored for word in SECRET.split(" ") if len(word) > 2)
    assert text_of(await keyed(world, caller)) == first
    rotating = await another_gateway(world, f"{NEW},{OLD}")
    assert text_of(await keyed(world, caller, gateway=rotating)) == first
    for gone in (NEW, ""):
        without = await another_gateway(world, gone)
        refused = await keyed(world, caller, gateway=without)
        assert refused.status_code == 422
        assert "cannot be read any more" in error_of(refused)["message"]
    assert len(world.worker.requests) == 1


async def test_an_answer_in_the_cache_is_sealed_and_one_that_does_not_open_is_a_miss(
    world: World, valkey_url: str
) -> None:
    caller = await world.add_caller()
    await opt_in(world, caller)
    first = text_of(await asked(world, caller))
    await kept(world)
    with redis.Redis.from_url(valkey_url) as valkey:
        (name,) = [
            key
            for key in valkey.keys("*")
            if caller.tenant_id.encode() in key and valkey.type(key) == b"string"
        ]
        stored = valkey.get(name)
        assert isinstance(stored, bytes)
        assert b"\x00\x03old" in stored
        assert b"private" not in stored
        hit = await asked(world, caller)
        assert (text_of(hit), hit.headers["x-headworks-cache"]) == (first, "hit")
        valkey.set(name, stored[:-1] + bytes([stored[-1] ^ 1]))
    miss = await asked(world, caller)
    assert (text_of(miss), miss.headers["x-headworks-cache"]) == (first, "miss")
    assert len(world.worker.requests) == 2


async def test_a_key_s_answer_put_under_another_key_or_tenant_does_not_open(world: World) -> None:
    caller, other = await world.add_caller(), await world.add_caller()
    again = {"idempotency-key": "another"}
    asking: list[tuple[Caller, dict[str, str]]] = [(caller, {}), (caller, again), (other, {})]
    for who, headers in asking:
        text_of(await keyed(world, who, headers=headers))
    await world.settled(caller, 2)
    await world.settled(other, 1)
    async with world.postgres.transaction() as conn:
        await conn.execute(
            "UPDATE idempotency_keys SET answer = (SELECT answer FROM idempotency_keys"
            " WHERE tenant_id = %s AND key <> %s)",
            (caller.tenant_id, again["idempotency-key"]),
        )
    told = [(await keyed(world, who, headers=headers)).status_code for who, headers in asking]
    assert told == [200, 422, 422]
    assert len(world.worker.requests) == 3


async def test_a_cached_answer_put_into_another_tenant_s_slot_is_a_miss(
    world: World, valkey_url: str
) -> None:
    callers = [await world.add_caller() for _ in range(2)]
    for caller in callers:
        await opt_in(world, caller)
        text_of(await asked(world, caller))
    await kept(world)
    with redis.Redis.from_url(valkey_url) as valkey:
        mine, theirs = (
            next(
                key
                for key in valkey.keys("*")
                if caller.tenant_id.encode() in key and valkey.type(key) == b"string"
            )
            for caller in callers
        )
        stored, named = valkey.get(mine), valkey.get(theirs)
        assert isinstance(stored, bytes)
        assert isinstance(named, bytes)
        valkey.set(theirs, named[:NAME_BYTES] + stored[NAME_BYTES:])
    answers = [await asked(world, caller) for caller in callers]
    assert [answer.headers["x-headworks-cache"] for answer in answers] == ["hit", "miss"]
