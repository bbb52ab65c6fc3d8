"""Versions pushed by a process that does not dispatch."""

import asyncio

import pytest

from core.tickets import Admitted, CacheVersions, Stale
from store.redis_client import RedisAwayError
from store.versions import VersionPublisher
from tests.support.dispatch_worlds import an_admit
from tests.support.dispatchers import dispatchers

pytestmark = [pytest.mark.anyio, pytest.mark.services]


async def test_a_push_is_seen_by_the_next_admit_and_never_falls(valkey_url):
    publisher = VersionPublisher(valkey_url)
    publisher.start()
    await publisher.ping()
    async with dispatchers(valkey_url, 1) as (gateway,):
        assert isinstance(await gateway.admit(an_admit("t1")), Admitted)
        for version in (5, 3):
            await publisher.tenant("ten", version)
            await publisher.key("ten", "key", version)
            await publisher.route("model", version)
        old = CacheVersions(key=4, tenant=4, route=4)
        assert await gateway.admit(an_admit("t2", versions=old)) == Stale(
            key=True, tenant=True, route=True
        )
        new = CacheVersions(key=5, tenant=5, route=5)
        assert isinstance(await gateway.admit(an_admit("t2", versions=new)), Admitted)
    await publisher.close()


async def test_a_publisher_without_valkey_says_so_in_time(own_valkey):
    own_valkey.running.stop()
    publisher = VersionPublisher(own_valkey.embedded.url, timeout_ms=200)
    publisher.start()
    async with asyncio.timeout(1):
        with pytest.raises(RedisAwayError):
            await publisher.ping()
    await publisher.close()
