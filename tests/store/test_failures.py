"""The fleet's retry budget and its suspects: the functions decide as their twins, for everyone."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.deaths import DeathRules, Deaths
from core.retries import RetryBudget, RetryRules
from store.failures import FailureRules, Failures
from store.keys import DEATH_KEYS, RETRY_KEYS
from store.scripts import failure_functions

pytestmark = [pytest.mark.anyio, pytest.mark.services]

START_MS = 1_700_000_000_000
RETRIES = RetryRules(window_ms=1_000, permille=200, floor=3)
DEATHS = DeathRules(deaths=2, refuse_ms=60_000, kept_max=3)
RULES = FailureRules(retries=RETRIES, deaths=DEATHS)


@pytest.fixture
def call(valkey_url):
    functions = failure_functions(RETRIES, DEATHS)
    with redis.Redis.from_url(valkey_url) as client:
        client.function_load(functions.spend_retry.library.text, replace=True)

        def call(name, keys, *args):
            function = getattr(functions, name).name
            return client.fcall(function.decode(), len(keys), *keys, *args)

        call.forget = lambda: client.delete(*RETRY_KEYS, *DEATH_KEYS)
        yield call


def test_the_budget_is_the_same_in_valkey_as_in_its_twin(call):
    steps = st.lists(
        st.tuples(st.integers(-300, 1_500), st.integers(0, 30), st.integers(0, 3)), max_size=25
    )

    @settings(suppress_health_check=[HealthCheck.too_slow])
    @given(steps)
    def same(history):
        call.forget()
        twin, now_ms = RetryBudget(RETRIES), START_MS
        for wait_ms, requests, wanted in history:
            now_ms += wait_ms
            told = call("spend_retry", RETRY_KEYS, now_ms, requests, wanted)
            assert told == twin.spend(requests=requests, wanted=wanted, now_ms=now_ms)

    same()


def test_suspects_are_the_same_in_valkey_as_in_the_twin(call):
    names = st.sampled_from(["fp_a", "fp_b", "fp_c", "fp_d", "fp_e"])
    steps = st.lists(
        st.tuples(
            st.sampled_from(["record", "record", "record", "absolve"]),
            st.integers(0, 30_000),
            names,
            st.sampled_from(["boot_1", "boot_2", "boot_3"]),
        ),
        max_size=25,
    )

    @settings(suppress_health_check=[HealthCheck.too_slow])
    @given(steps)
    def same(history):
        call.forget()
        twin, now_ms = Deaths(DEATHS), START_MS
        for what, wait_ms, name, boot_id in history:
            now_ms += wait_ms
            if what == "record":
                told = call("record_death", DEATH_KEYS, now_ms, name, boot_id)
                assert told == twin.record(name, boot_id, now_ms)
            else:
                call("absolve_death", DEATH_KEYS, "", name)
                twin.absolve(name)
            listed = msgspec.msgpack.decode(call("list_deaths", DEATH_KEYS, now_ms))
            expected = [[x.fingerprint, x.deaths, x.left_ms] for x in twin.listed(now_ms)]
            assert listed == expected

    same()


@asynccontextmanager
async def gateways(url, count=2):
    made = [Failures(url, RULES) for _ in range(count)]
    for one in made:
        one.start()
        await one._client.connected.wait()
    try:
        yield made
    finally:
        for one in made:
            await one.close()


async def test_gateways_share_one_budget(valkey_url):
    async with gateways(valkey_url) as (one, other):
        allowed = [await gateway.may_retry() for gateway in (one, other) * 3]
        assert allowed == [True] * 3 + [False] * 3
        for _ in range(20):
            other.began()
        await other.poll()
        allowed = [await gateway.may_retry() for gateway in (one, other) * 3]
        assert allowed.count(True) in {3, 4, 5, 6}, "a fifth of twenty, and what slid out"


async def test_a_request_that_two_replicas_died_under_is_refused_everywhere(valkey_url):
    async with gateways(valkey_url) as (one, other):
        await one.record_death("fp", "boot_1")
        await one.record_death("fp", "boot_1")
        await other.poll()
        assert (other.has_suspects, other.deaths("fp"), other.refused_ms("fp")) == (True, 1, None)
        await other.record_death("fp", "boot_2")
        await one.poll()
        for gateway in (one, other):
            left_ms = gateway.refused_ms("fp")
            assert left_ms is not None
            assert 50_000 < left_ms <= 60_000
        assert one.refused_ms("another") is None
        await one.absolve("fp")  # too late
        await other.poll()
        assert other.refused_ms("fp") is not None


async def test_one_that_was_answered_since_is_no_suspect(valkey_url):
    async with gateways(valkey_url) as (one, other):
        await one.record_death("fp", "boot_1")
        await other.poll()
        await other.absolve("fp")
        assert not other.has_suspects
        await one.poll()
        for gateway in (one, other):
            await gateway.record_death("fp", "boot_2")
            assert gateway.refused_ms("fp") is None


async def test_without_valkey_a_gateway_goes_by_what_it_has_seen_itself(own_valkey):
    async with gateways(own_valkey.embedded.url, 1) as (one,):
        own_valkey.running.stop()
        assert [await one.may_retry() for _ in range(4)] == [True] * 3 + [False]
        await one.record_death("fp", "boot_1")
        await one.record_death("fp", "boot_2")
        await one.poll()
        assert one.refused_ms("fp") is not None
        await one.record_death("other", "boot_1")
        await one.absolve("other")
        assert one.deaths("other") == 0
        own_valkey.running.start()
        async with gateways(own_valkey.embedded.url, 1) as (other,), asyncio.timeout(10):
            await one._client.connected.wait()
            await one.poll()
            await other.poll()
            assert None not in {one.refused_ms("fp"), other.refused_ms("fp")}
