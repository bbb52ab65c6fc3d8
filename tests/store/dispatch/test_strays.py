"""Grants for tickets that a gateway does not know: each is given back, by one call."""

import asyncio

import msgspec
import pytest

from store.dispatch import Dispatch
from store.dispatch_backend import PoolReply
from tests.support.dispatch_worlds import an_arm
from tests.support.dispatchers import POOL, RULES, a_replica, dispatchers, until, until_idle

pytestmark = [pytest.mark.anyio, pytest.mark.services]

STRAYS = 30


@pytest.mark.parametrize("strays_max", [64, 7])
async def test_a_stray_is_cancelled_once_however_often_it_is_listed(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch, strays_max: int
) -> None:
    rules = msgspec.structs.replace(RULES, strays_max=strays_max)
    replica = a_replica(sequences=STRAYS, ready=False)
    async with dispatchers(valkey_url, 1, rules, (replica,)) as (gateway,):
        cancelled: list[str] = []
        most = 0
        cancel = gateway._decider.remote.cancel_pool

        async def counted(pool: str, name: str, ticket: str) -> PoolReply:
            nonlocal most
            cancelled.append(ticket)
            most = max(most, len(cancelled) - len(done))
            reply = await cancel(pool, name, ticket)
            done.append(ticket)
            return reply

        done: list[str] = []
        monkeypatch.setattr(gateway._decider.remote, "cancel_pool", counted)
        await asyncio.gather(*(arm_unheard(gateway, f"t{i}") for i in range(STRAYS)))
        gateway.set_replicas(POOL, (msgspec.structs.replace(replica, ready=True),))
        await until(lambda: len(done) >= STRAYS)
        await until_idle(valkey_url)
        assert sorted(cancelled) == sorted({f"t{i}" for i in range(STRAYS)})
        assert most <= strays_max
        assert not gateway._telling._strays


async def arm_unheard(gateway: Dispatch, ticket: str) -> None:
    """Granted to the gateway, which never asked: as after a call that it gave up on."""
    await gateway._decider.remote.arm(
        msgspec.structs.replace(an_arm(ticket), pool=POOL, gateway="gw1")
    )
