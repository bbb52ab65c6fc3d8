"""Bindings: the function decides as its twin, for all gateways; without Valkey the draw counts."""

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.bindings import BindingRules
from core.bindings import Bindings as Twin
from store.bindings import Bindings
from store.keys import binding_keys
from store.scripts import bind_function

pytestmark = [pytest.mark.anyio, pytest.mark.services]

RULES = BindingRules(idle_ms=60_000)
TARGETS = st.sampled_from(["a", "b", "far/m"])


def test_the_function_decides_as_its_twin(valkey_url):
    function = bind_function(RULES)
    step = st.tuples(st.sampled_from("xy"), TARGETS, st.sets(TARGETS), st.booleans())
    with redis.Redis.from_url(valkey_url) as client:
        client.function_load(function.library.text, replace=True)

        @settings(suppress_health_check=[HealthCheck.too_slow])
        @given(st.lists(step, max_size=20))
        def same(history):
            twin, now_ms = Twin(RULES), 0
            client.delete(*binding_keys("x"), *binding_keys("y"))
            for name, drawn, allowed, lapses in history:
                if lapses:
                    now_ms += RULES.idle_ms
                    client.delete(*binding_keys("x"), *binding_keys("y"))
                keys = binding_keys(name)
                told = client.fcall(function.name.decode(), len(keys), *keys, drawn, *allowed)
                assert told.decode() == twin.bind(name, drawn, allowed, now_ms)
                assert 0 < client.pttl(keys[0]) <= RULES.idle_ms

        same()


async def test_what_one_gateway_bound_another_keeps_while_it_is_allowed(valkey_url):
    first, second = (Bindings(valkey_url, RULES) for _ in range(2))
    for side in (first, second):
        side.start()
        await side._client.connected.wait()
    try:
        assert await first.bind("kept", "b", ["a", "b"], unbound="a") == "a"
        assert await second.bind("kept", "b", ["a", "b"], unbound="b") == "a"
        assert await second.bind("kept", "b", ["b", "c"]) == "b"
        assert await first.bind("kept", "a", ["a", "b"]) == "b"
    finally:
        await first.close()
        await second.close()


async def test_without_valkey_the_draw_counts():
    alone = Bindings("redis://127.0.0.1:1", RULES)
    alone.start()
    try:
        assert await alone.bind("c", "b", ["a", "b"]) == "b"
        # That it is bound to none, nobody can say.
        assert await alone.bind("c", "b", ["a", "b"], unbound="a") == "b"
    finally:
        await alone.close()
