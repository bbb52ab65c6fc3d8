"""Which silent replicas are given up, and which are not."""

import asyncio
import secrets

import pytest

from control_plane.reaper import Reaper
from tests.support.control_plane import SECRET, running, the_settings
from tests.support.load_server import LoadServer
from tests.support.registry import a_beat, a_deployment, a_register
from tests.support.services import free_port

pytestmark = [pytest.mark.services, pytest.mark.anyio]

LOST_MS = 10_000
DEAD = f"http://127.0.0.1:{free_port()}"


@pytest.fixture
async def plane(fresh_postgres_url, valkey_url):
    # The reaper of the process itself stays out of it: these tests run their own.
    settings = the_settings(fresh_postgres_url, valkey_url, replica_lost_ms=600_000)
    async with running(settings) as plane:
        async with plane.services.postgres.transaction() as conn:
            await a_deployment(conn)
        yield plane


class Case:
    """A replica, long silent by the database's clock, and a reaper whose clock a test moves."""

    def __init__(self, plane, url):
        self.plane = plane
        self.url = url
        self.now_ms = 0
        settings = the_settings("", "", replica_lost_ms=LOST_MS)
        self.reaper = Reaper(plane.services, settings, lambda: self.now_ms)
        self.replica_id = f"rep-{secrets.token_hex(4)}"

    async def register(self):
        message = a_register(replica_id=self.replica_id, url=self.url)
        assert (await self.plane.says("/register", message)).status_code == 200
        async with self.plane.services.postgres.transaction() as conn:
            await conn.execute("UPDATE replicas SET last_beat_at = now() - interval '1 hour'")

    async def listen(self, ms):
        """Rounds as they come when nothing is amiss, for so long."""
        for _ in range(ms // self.reaper.every_ms):
            self.now_ms += self.reaper.every_ms
            await self.reaper.round()

    async def state(self):
        rows = (await self.plane.admin("GET", "/replicas", limit=1000)).json()["replicas"]
        return next(row["state"] for row in rows if row["replica_id"] == self.replica_id)


async def test_a_dead_replica_is_lost_once_we_have_listened_long_enough(plane):
    case = Case(plane, DEAD)
    await case.register()
    await case.listen(LOST_MS)
    assert await case.state() == "ready"
    await case.listen(case.reaper.every_ms)
    assert await case.state() == "lost"


async def test_a_replica_that_cannot_be_heard_but_answers_is_kept(plane):
    async with LoadServer(SECRET) as replica:
        case = Case(plane, replica.url)
        await case.register()
        await case.listen(2 * LOST_MS)
        assert replica.asked
        assert await case.state() == "ready"


async def test_another_life_at_its_address_does_not_answer_for_it(plane):
    async with LoadServer(SECRET, boot_id="boot_other") as replica:
        case = Case(plane, replica.url)
        await case.register()
        await case.listen(2 * LOST_MS)
        assert await case.state() == "lost"


async def test_nobody_is_lost_by_a_control_plane_that_was_away_itself(plane):
    case = Case(plane, DEAD)
    await case.register()
    await case.listen(LOST_MS)
    case.now_ms += 60_000  # stopped, or Postgres was: nobody was heard
    await case.listen(LOST_MS)
    assert await case.state() == "ready"
    await case.listen(case.reaper.every_ms)
    assert await case.state() == "lost"


async def test_a_beat_during_the_second_look_keeps_it(plane):
    async with LoadServer(SECRET) as replica:
        replica.silent = True
        case = Case(plane, replica.url)
        await case.register()
        listening = asyncio.create_task(case.listen(LOST_MS + case.reaper.every_ms))
        while not replica.asked:  # noqa: ASYNC110 - bounded by the test's own time-out
            await asyncio.sleep(0.005)
        assert (await plane.says("/beat", a_beat(replica_id=case.replica_id))).json()["known"]
        await listening
        assert await case.state() == "ready"


async def test_a_beat_brings_a_lost_replica_back(plane):
    case = Case(plane, DEAD)
    await case.register()
    await case.listen(2 * LOST_MS)
    assert await case.state() == "lost"
    await plane.says("/beat", a_beat(replica_id=case.replica_id))
    assert await case.state() == "ready"


async def test_a_stopped_replica_is_not_lost(plane):
    case = Case(plane, DEAD)
    await case.register()
    async with plane.services.postgres.transaction() as conn:
        await conn.execute("UPDATE replicas SET state = 'stopped'")
    await case.listen(2 * LOST_MS)
    assert await case.state() == "stopped"
