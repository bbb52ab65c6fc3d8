import pytest
from tests.support.gateway_requests import *
pytestmark=[pytest.mark.anyio]
async def test_x(world, caller):
    r = await post(world, caller)
    print("WORKER", world.worker.url, "GW", world.url, world.settings.redis_url, world.settings.database_url)
    await world.dispatcher_is_empty()
async def test_y(world):
    pass
