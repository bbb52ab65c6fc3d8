"""Limits through two gateways on one Valkey, with time stopped: exact, in every scope."""

import asyncio

import msgspec
import pytest
import redis

from core.tickets import Admitted, LimitRefused, Limits, Scope
from store.dispatch import audit
from store.keys import tenant_keys
from tests.support.dispatch_worlds import an_admit
from tests.support.dispatchers import dispatchers, until, until_idle

pytestmark = [pytest.mark.anyio, pytest.mark.services]

FROZEN_MS = "1700000000000"
KEY, MODEL = "key:key", "model:model"


@pytest.fixture
async def gateways(valkey_url):
    async with dispatchers(valkey_url) as made:
        for gateway in made:
            gateway._decider.remote.limits_now = FROZEN_MS
        yield made


async def ask_all(gateways, count, **fields):
    """Who asks at once through both, and how many passed."""
    asked = [an_admit(f"t{i}", **fields) for i in range(count)]
    answers = await asyncio.gather(*(gateways[i % 2].admit(one) for i, one in enumerate(asked)))
    passed = [one.ticket for one, a in zip(asked, answers, strict=True) if isinstance(a, Admitted)]
    return passed, [answer for answer in answers if isinstance(answer, LimitRefused)]


def limited_in(scope, limits):
    """These limits in one scope, and none in the others."""
    if scope == "tenant":
        return {"limits": limits, "scopes": (Scope(name=KEY, limits=Limits(concurrency=99)),)}
    return {"limits": Limits(), "scopes": (Scope(name=scope, limits=limits),)}


CASES = [
    ("requests", Limits(requests_per_min=10), {}),
    ("input_tokens", Limits(input_tokens_per_min=1_000), {"input_tokens": 100}),
    ("output_tokens", Limits(output_tokens_per_min=1_000), {"output_tokens": 100}),
    ("concurrency", Limits(concurrency=10), {}),
]


@pytest.mark.parametrize(("reason", "limits", "fields"), CASES, ids=[case[0] for case in CASES])
@pytest.mark.parametrize("scope", ["tenant", KEY, MODEL])
async def test_room_for_ten_is_ten_of_twenty_through_two_gateways(
    gateways, scope, reason, limits, fields
):
    passed, refused = await ask_all(gateways, 20, **limited_in(scope, limits), **fields)
    assert (len(passed), len(refused)) == (10, 10)
    assert {(one.scope, one.reason) for one in refused} == {(scope, reason)}
    assert all(one.retry_after_ms > 0 for one in refused)
    for ticket in passed:
        await gateways[1].cancel(ticket=ticket, pool=None, tenant="ten")
    again, _ = await ask_all(gateways, 20, **limited_in(scope, limits), **fields)
    assert len(again) == 10, "what was cancelled was given back, whole"
    for ticket in again:
        await gateways[0].cancel(ticket=ticket, pool=None, tenant="ten")


async def test_a_refusal_in_one_scope_consumes_nothing_in_another(gateways):
    narrow = Scope(name=KEY, limits=Limits(requests_per_min=1))
    wide = Limits(requests_per_min=10)
    passed, _ = await ask_all(gateways, 20, limits=wide, scopes=(narrow,))
    assert len(passed) == 1
    answer = await gateways[0].admit(an_admit("last", limits=wide))
    assert answer.rooms[0].requests.remaining == 8
    for ticket in (*passed, "last"):
        await gateways[0].cancel(ticket=ticket, pool=None, tenant="ten")


# litellm #18730, PR #23775; higress #2464: all of N at once pass, as tokens count at the end.
@pytest.mark.parametrize("max_tokens", [200, 64_000])
async def test_a_hundred_at_once_of_two_hundred_tokens_do_not_pass_a_thousand_a_minute(
    gateways, max_tokens
):
    limits = Limits(output_tokens_per_min=1_000)
    passed, refused = await ask_all(gateways, 100, limits=limits, output_tokens=max_tokens)
    # What is held of each answer (256 tokens at most) covers all of it here: no slack is used.
    assert 0 < 200 * len(passed) <= 1_000
    assert {one.reason for one in refused} == {"output_tokens"}
    for ticket in passed:
        gateways[0].charge_output(tenant="ten", ticket=ticket, tokens=200)
        await gateways[0].cancel(ticket=ticket, pool=None, tenant="ten")


# wso2 #2932: a limit of tokens that falls by one for each request.
async def test_a_limit_of_tokens_falls_by_tokens(gateways):
    limits = Limits(input_tokens_per_min=1_000)
    answers = [
        await gateways[i % 2].admit(an_admit(f"t{i}", limits=limits, input_tokens=300))
        for i in range(4)
    ]
    left = [answer.headroom.input_tokens.remaining for answer in answers]
    assert left == [700, 400, 100, 100]
    assert isinstance(answers[3], LimitRefused)
    for i in range(3):
        await gateways[0].cancel(ticket=f"t{i}", pool=None, tenant="ten")


# litellm #16011: slots counted by each worker, and of a worker that dies not given back.
async def test_slots_of_a_gateway_that_died_are_free_in_every_scope(valkey_url):
    scope = Scope(name=KEY, limits=Limits(concurrency=3))
    async with dispatchers(valkey_url) as (dying, living):
        passed, refused = await ask_all((dying, dying), 40, limits=Limits(), scopes=(scope,))
        assert len(passed) == 3
        refused = await living.admit(an_admit("late", scopes=(scope,)))
        assert (refused.scope, refused.reason) == (KEY, "concurrency")
        await dying.close()
        async with asyncio.timeout(5):
            late = an_admit("late", scopes=(scope,))
            while isinstance(await living.admit(late), LimitRefused):  # noqa: ASYNC110 - a client
                await asyncio.sleep(0.1)
        found = await audit(valkey_url)
        assert found.tenants[0].held == ("late",)
        await living.cancel(ticket="late", pool=None, tenant="ten")
        await until_idle(valkey_url)


async def test_without_valkey_every_scope_goes_on_from_what_was_last_known(own_valkey):
    scope = Scope(name=KEY, limits=Limits(requests_per_min=10, concurrency=2))
    fields = {"limits": Limits(requests_per_min=100), "scopes": (scope,)}
    async with dispatchers(own_valkey.embedded.url, 1) as (gateway,):
        for i in range(7):
            await gateway.admit(an_admit(f"t{i}", **fields))
            if i:
                await gateway.cancel(ticket=f"t{i}", pool=None, tenant="ten")
        await asyncio.to_thread(own_valkey.running.kill)
        await until(lambda: gateway.degraded)
        admitted = await gateway.admit(an_admit("alone", **fields))
        assert admitted.degraded
        # As of the last answer: that t6 gave its own back came after it.
        assert [room.requests.remaining for room in admitted.rooms] == [97, 7]
        refused = await gateway.admit(an_admit("third", **fields))
        assert (refused.scope, refused.reason) == (KEY, "concurrency")
        await asyncio.to_thread(own_valkey.running.start)
        await until(lambda: not gateway.degraded)
        await asyncio.sleep(0.2)
        refused = await gateway.admit(an_admit("third", **fields))
        assert (refused.scope, refused.reason) == (KEY, "concurrency"), "announced, scopes too"
        for ticket in ("t0", "alone"):
            await gateway.cancel(ticket=ticket, pool=None, tenant="ten")
        await until_idle(own_valkey.embedded.url)


async def test_a_scope_that_miscounts_is_found(valkey_url):
    scope = Scope(name=KEY, limits=Limits(concurrency=3))
    async with dispatchers(valkey_url, 1) as (gateway,):
        await gateway.admit(an_admit("t1", scopes=(scope,)))
        assert (await audit(valkey_url)).problems == ()
        with redis.Redis.from_url(valkey_url) as client:
            scopes = tenant_keys("ten")[0]
            state = msgspec.msgpack.decode(client.hget(scopes, KEY))
            client.hset(scopes, KEY, msgspec.msgpack.encode([*state[:-1], 2]))
        found = await audit(valkey_url)
        assert found.problems == (f"tenant ten: {KEY} counts 2, its tickets are 1",)
        with redis.Redis.from_url(valkey_url) as client:
            client.delete(scopes)
        assert (await audit(valkey_url)).problems == ()
