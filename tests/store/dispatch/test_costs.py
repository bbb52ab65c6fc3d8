"""What a call costs the server: as many commands in a large pool as in a small one."""

import msgspec
import pytest
import redis

from core.dispatch import PoolRules
from core.tickets import Dropped, Placed, Queued, Renew, ReplicaView
from tests.support.dispatch_worlds import TwinPool, an_arm

pytestmark = pytest.mark.services

START_MS = 1_700_000_000_000
RULES = PoolRules(reannounce_ms=0, lease_ms=600_000)


def a_view(number: int) -> ReplicaView:
    return ReplicaView(
        replica=f"r{number:03}", boot_id=f"b{number}", url="u", version="v", ready=True,
        kv_blocks=1_000, sequences=4,
    )  # fmt: skip


def commands(client: redis.Redis) -> int:
    return sum(told["calls"] for told in client.info("commandstats").values())


def cost_of_a_request(client: redis.Redis, replicas: int, tenants: int) -> int:
    """Commands for an arm and a finish, in a pool where all replicas and tenants are busy."""
    twins = TwinPool(client, RULES)
    views = tuple(a_view(i) for i in range(replicas))
    renew = Renew(gateway="gw", pool=twins.pool, epoch="", replicas=views, announces=True)
    assert twins.pure.renew(renew, START_MS).epoch
    encoded = twins._run(twins.functions.renew, START_MS, _encoded(renew))
    assert encoded[0] == twins.pure.epoch
    for i in range(tenants):
        answer = _arm(twins, f"run{i}", tenant=f"t{i}", prefix_hashes=("shared", f"own{i}"))
        assert isinstance(answer, Placed | Queued)
    client.config_resetstat()
    _arm(twins, "one", tenant="t0", prefix_hashes=("shared", "own0"))
    twins._run(
        twins.functions.finish_pool, START_MS, twins.pool, "gw", "one", 5, 5, _encoded(("shared",))
    )
    return commands(client)


def test_a_request_in_a_pool_of_many_costs_about_what_it_does_in_one_of_few(valkey_url):
    with redis.Redis.from_url(valkey_url) as client:
        few = cost_of_a_request(client, replicas=24, tenants=20)
        many = cost_of_a_request(client, replicas=240, tenants=400)
    assert many <= few + 2


def _encoded(message: object) -> bytes:
    return msgspec.msgpack.encode(message)


def _arm(twins: TwinPool, ticket: str, **changes: object) -> Placed | Queued | Dropped:
    arm = an_arm(ticket, **changes)
    expected = twins.pure.arm(arm, START_MS)
    twins._run(twins.functions.arm, START_MS, twins.pool, arm.gateway, _encoded(arm))
    return expected
