"""A launcher's round: what it does to processes belongs to the term that it began in."""

from collections.abc import Callable

import psycopg
import pytest

from control_plane.launchers.reconcile import LaunchReconciler
from core.launch import LaunchSpec, Place
from core.worker_spec import LauncherKind
from store.leader import NotLeaderError
from tests.support.control_plane import running, the_settings
from tests.support.gateway_world import until

pytestmark = [pytest.mark.services, pytest.mark.anyio]


class Machine:
    """Two places that nobody asked for: one with a process, and one without."""

    kind = LauncherKind.LOCAL
    home = "a-machine"
    places_max = 2

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self.done: list[str] = []
        self._meanwhile = meanwhile

    def start(self, spec: LaunchSpec) -> Place:
        raise AssertionError(f"nobody wants {spec.replica_id}")

    def places(self) -> tuple[Place, ...]:
        self._meanwhile()
        return (Place(replica_id="one", alive=True), Place(replica_id="two", alive=False))

    def stop(self, replica_id: str, *, grace_ms: int) -> None:
        self.done.append(f"stop {replica_id} within {grace_ms}")

    def forget(self, replica_id: str) -> None:
        self.done.append(f"forget {replica_id}")


@pytest.fixture
async def plane(fresh_postgres_url, valkey_url):
    settings = the_settings(fresh_postgres_url, valkey_url, launcher_every_ms=3_600_000)
    async with running(settings) as plane:
        await until(lambda: plane.has_run("launcher"))
        yield plane


async def test_what_nobody_asked_for_is_ended(plane):
    machine = Machine(lambda: None)
    with plane.services.leadership.within_term():
        await LaunchReconciler(plane.services, machine).round()
    assert machine.done == ["stop one within 15000", "forget two"]


async def test_who_leads_no_more_touches_no_process(plane, fresh_postgres_url):
    """It stood still: what it would stop now may be what the next one has started since."""

    def another_leads() -> None:
        with psycopg.connect(fresh_postgres_url, autocommit=True) as conn:
            conn.execute("UPDATE leaders SET holder = 'another', epoch = epoch + 1")

    machine = Machine(another_leads)
    with plane.services.leadership.within_term(), pytest.raises(NotLeaderError):
        await LaunchReconciler(plane.services, machine).round()
    assert machine.done == []
