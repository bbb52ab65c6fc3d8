"""The functions about limits decide exactly as `core.limits`, and keep the same state."""

import os

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.limits import LimitRules
from core.tickets import CacheVersions, Limits, Output, Scope
from tests.support.dispatch_worlds import an_admit
from tests.support.limit_worlds import TwinTenant

pytestmark = pytest.mark.services

START_MS = 1_700_000_000_000
HISTORIES = int(os.environ.get("SOAK_LIMITS") or 100)
# Small bounds, so that short histories reach them.
RULES = LimitRules(lease_ms=2_000, output_hold_tokens=5, lapsed_max=2, forget_max=1)
SCOPES = ["key:k1", "key:k2", "model:m", "key:k1 model:m"]


@pytest.fixture
def client(valkey_url):
    with redis.Redis.from_url(valkey_url) as client:
        yield client


limits = st.builds(
    Limits,
    requests_per_min=st.sampled_from([0, 1, 3, 60]),
    input_tokens_per_min=st.sampled_from([0, 7, 100, 10_000_000_000]),
    output_tokens_per_min=st.sampled_from([0, 13, 1000]),
    concurrency=st.sampled_from([0, 1, 3]),
)
scope_names = st.lists(st.sampled_from(SCOPES), max_size=3, unique=True).map(tuple)
scopes = st.lists(
    st.builds(Scope, name=st.sampled_from(SCOPES), limits=limits),
    max_size=3,
    unique_by=lambda scope: scope.name,
).map(tuple)
tickets = st.sampled_from([f"t{i}" for i in range(10)])
versions = st.builds(
    CacheVersions, key=st.integers(1, 2), tenant=st.integers(1, 2), route=st.just(1)
)
asks = st.builds(
    an_admit,
    tickets,
    limits=limits,
    scopes=scopes,
    input_tokens=st.integers(0, 300),
    output_tokens=st.sampled_from([0, 1, 4, 300]),
    versions=versions,
)
outputs = st.lists(
    st.builds(Output, tickets, st.integers(0, 3_000), scope_names),
    max_size=4,
    unique_by=lambda output: output.ticket,
).map(tuple)
steps_ms = st.sampled_from([-5, 0, 0, 1, 17, 500, 1_999, 2_000, 61_000, 40_000_000])
commands = st.one_of(
    st.tuples(st.just("admit"), asks),
    st.tuples(st.just("admit"), asks),
    st.tuples(st.just("charge"), outputs),
    st.tuples(st.just("finish"), tickets, st.integers(0, 300), st.integers(0, 3_000)),
    st.tuples(st.just("cancel"), tickets),
    st.tuples(st.just("push"), st.sampled_from(["tenant", "key:key"]), st.integers(1, 2)),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=HISTORIES)
@given(history=st.lists(st.tuples(steps_ms, commands), max_size=40))
def test_limits_and_their_functions_agree(client, history):
    twins = TwinTenant(client, RULES)
    now_ms = START_MS
    for step_ms, command in history:
        now_ms += step_ms
        match command:
            case ("admit", asked):
                twins.look(asked.all_scopes, now_ms)
                twins.admit(asked, now_ms)
            case ("charge", produced):
                twins.charge(produced, now_ms)
            case ("finish", ticket, read, produced):
                twins.finish(ticket, read, produced, now_ms)
            case ("cancel", ticket):
                twins.cancel(ticket, now_ms)
            case ("push", field, version):
                twins.push(field, version)
