"""Makes the number of replicas what it is wanted to be: reads, has `plan` decide, acts.

The leader's alone. A launch is written before it is made and noted after it, each in a
transaction of its own that begins with the fence; what lies between is the launcher's to keep
apart (two starts of one id are one process). What is done outside Postgres is done after the
fence was asked: who stood still knows older lives of replicas than there are. A round that is
cut anywhere leaves what the next one, here or elsewhere, sees and finishes.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import assert_never

import msgspec

from control_plane.background import Job
from control_plane.launchers.actions import (
    Action,
    Adopt,
    Ask,
    AskStop,
    Drain,
    Fail,
    Forget,
    PlanRules,
    Seen,
    Settle,
    Sleep,
    Start,
    Stop,
    Wake,
    Wanted,
)
from control_plane.launchers.base import Launcher, LauncherError
from control_plane.launchers.life import LifeRules, Replica
from control_plane.launchers.plan import plan, shortfalls
from control_plane.services import Services
from control_plane.settings import ControlPlaneSettings
from core.launch import Launch, LaunchSpec
from store import fleet, launches, registry
from store.audit_log import record
from store.fleet import ReplicaRow
from store.postgres import Connection
from store.registry import Deployment, DesiredState

ACTOR = "launcher"  # in the audit log
ROWS_MAX = 10_000  # of deployments, and of replicas
WAKE_PAUSE_FIRST_MS = 2000
WAKE_PAUSE_MAX_MS = 60_000

_log = logging.getLogger(__name__)


class _Pause(msgspec.Struct, frozen=True):
    """Until a sleeping replica is asked again."""

    until_ms: int
    last_ms: int


class _Now(msgspec.Struct, frozen=True, kw_only=True):
    """What a round has read."""

    now_ms: int
    deployments: Mapping[str, Deployment]
    launches: Mapping[str, Launch]
    replicas: Mapping[str, ReplicaRow]


class LaunchReconciler:
    """`round` is one look; run it every `launcher_every_ms`."""

    def __init__(self, services: Services, launcher: Launcher) -> None:
        self._services = services
        self._launcher = launcher
        self._rules = rules_of(services.settings)
        self._stop_ms = services.settings.launcher_stop_ms
        self._wakes: dict[str, _Pause] = {}

    async def round(self) -> None:
        """Raises StoreAwayError, NotLeaderError, LauncherError: the next round goes on."""
        now = await self._read()
        seen = Seen(
            replicas=tuple(map(replica_of, now.replicas.values())),
            launches=tuple(now.launches.values()),
            places=await asyncio.to_thread(self._launcher.places),
            home=self._launcher.home,
        )
        wanted = [wanted_of(deployment) for deployment in now.deployments.values()]
        self._measure(shortfalls(wanted, seen, rules=self._rules))
        for action in plan(wanted, seen, now_ms=now.now_ms, rules=self._rules):
            try:
                await self._do(action, now)
            except LauncherError as error:
                # Of one replica: the others have their turn, and it has its next.
                facts = {"replica": action.replica_id, "reason": str(error)}
                _log.warning("a launcher could not do it", extra={"facts": facts})

    async def _read(self) -> _Now:
        async with self._services.postgres.transaction() as conn:
            await self._services.leadership.fence(conn)
            deployments = await registry.deployments_page(conn, limit=ROWS_MAX)
            found = await launches.all_launches(conn)
            replicas = await fleet.replicas_page(conn, limit=ROWS_MAX)
            # Last: nothing that was read is younger than now.
            now_ms = await fleet.now_ms(conn)
        return _Now(
            now_ms=now_ms,
            deployments={each.name: each for each in deployments},
            launches={each.replica_id: each for each in found},
            replicas={each.replica_id: each for each in replicas},
        )

    def _measure(self, short: Mapping[str, int]) -> None:
        self._services.metrics.replicas_short.clear()
        for deployment, count in short.items():
            self._services.metrics.replicas_short.labels(deployment).set(count)

    async def _do(self, action: Action, now: _Now) -> None:
        name, kind = action.replica_id, type(action).__name__.lower()
        facts = {"action": kind, "replica": name, "reason": action.reason}
        _log.info("replicas are made as many as wanted", extra={"facts": facts})
        self._services.metrics.launcher_actions.labels(kind).inc()
        match action:
            case Start() | Wake() | Sleep() | Stop() | Forget():
                await self._write(_nothing)
                await self._reach(action, now)
            case Ask() | Adopt() | Settle() | Fail() | Drain() | AskStop():
                await self._write(lambda conn: self._note(conn, action, now))
            case _:
                assert_never(action)

    async def _reach(self, action: Start | Wake | Sleep | Stop | Forget, now: _Now) -> None:
        """What is done to processes, and not in Postgres."""
        name = action.replica_id
        match action:
            case Start():
                await self._start(name, now)
            case Wake():
                await self._wake(now.replicas[name], now.now_ms)
            case Sleep():
                await self._sleep(now.replicas[name])
            case Stop():
                await asyncio.to_thread(self._launcher.stop, name, grace_ms=self._stop_ms)
            case Forget():
                await asyncio.to_thread(self._launcher.forget, name)
                await self._write(lambda conn: launches.forget(conn, name))
            case _:
                assert_never(action)

    async def _start(self, name: str, now: _Now) -> None:
        deployment = now.deployments[now.launches[name].deployment]
        spec = LaunchSpec(
            replica_id=name,
            deployment=deployment.name,
            region=deployment.region,
            version=deployment.version,
            worker=deployment.spec,
        )
        try:
            await asyncio.to_thread(self._launcher.start, spec)
        except LauncherError as error:
            _log.warning("a replica could not be started", extra={"facts": {"reason": str(error)}})
            reason, pause_ms = str(error), self._rules.retry_first_ms
            await self._write(
                lambda conn: launches.failed(conn, name, reason=reason, retry_in_ms=pause_ms)
            )
            return
        await self._write(lambda conn: launches.started(conn, name))

    async def _wake(self, replica: ReplicaRow, now_ms: int) -> None:
        name = replica.replica_id
        pause = self._wakes.get(name, _Pause(0, WAKE_PAUSE_FIRST_MS // 2))
        if now_ms < pause.until_ms:
            return
        refused = await self._services.replicas.wake(replica.url)
        if not refused:
            self._wakes.pop(name, None)
            return
        next_ms = min(WAKE_PAUSE_MAX_MS, 2 * pause.last_ms)
        self._wakes[name] = _Pause(now_ms + next_ms, next_ms)
        facts = {"replica": name, "reason": refused}
        _log.warning("a replica does not wake", extra={"facts": facts})

    async def _sleep(self, replica: ReplicaRow) -> None:
        """Asked again each round until it sleeps."""
        refused = await self._services.replicas.sleep(replica.url)
        if refused:
            facts = {"replica": replica.replica_id, "reason": refused}
            _log.warning("a replica does not sleep", extra={"facts": facts})

    async def _note(
        self, conn: Connection, action: Ask | Adopt | Settle | Fail | Drain | AskStop, now: _Now
    ) -> None:
        name, reason = action.replica_id, action.reason
        match action:
            case Ask(deployment=deployment):
                launcher = now.deployments[deployment].launcher
                home = self._launcher.home
                await launches.ask(
                    conn, replica_id=name, deployment=deployment, launcher=launcher, home=home
                )
            case Adopt():
                await launches.adopted(conn, name)
            case Settle():
                await launches.settled(conn, name)
            case Fail(retry_in_ms=retry_in_ms):
                await launches.failed(conn, name, reason=reason, retry_in_ms=retry_in_ms)
            case Drain(within_ms=within_ms):
                await fleet.begin_drain(conn, name, reason=reason, within_ms=within_ms)
            case AskStop(grace_ms=grace_ms):
                await launches.ask_stop(conn, name, reason=reason, grace_ms=grace_ms)
            case _:
                assert_never(action)
        if isinstance(action, Ask | Fail | Drain | AskStop):
            what = f"replica.{type(action).__name__.lower()}"
            detail = {**msgspec.structs.asdict(action)}
            await record(conn, actor=ACTOR, action=what, subject=name, detail=detail)

    async def _write(self, change: Callable[[Connection], Awaitable[None]]) -> None:
        async with self._services.postgres.transaction() as conn:
            await self._services.leadership.fence(conn)
            await change(conn)


async def _nothing(_: Connection) -> None:
    """For the fence alone."""


def launch_job(services: Services, launcher: Launcher) -> Job:
    """The leader's: two who decide at once would start twice as many."""
    reconciler = LaunchReconciler(services, launcher)
    every_ms = services.settings.launcher_every_ms
    return Job(name="launcher", every_ms=every_ms, run=reconciler.round, leader=True)


def rules_of(settings: ControlPlaneSettings) -> PlanRules:
    """The plan's bounds, as they are set."""
    return PlanRules(
        life=LifeRules(stalled_ms=settings.replica_stalled_ms, start_ms=settings.replica_start_ms),
        drain_ms=settings.replica_drain_ms,
        places_max=settings.launcher_replicas_max,
    )


def replica_of(row: ReplicaRow) -> Replica:
    """What of a row concerns its life."""
    return Replica(
        replica_id=row.replica_id,
        deployment=row.deployment,
        state=row.state,
        busy=row.running + row.waiting,
        silent_ms=row.silent_ms,
        stalled_ms=row.stalled_ms,
        started_ms=row.started_ms,
        ready_ms=row.ready_ms,
        drain_reason=row.drain_reason,
        drain_deadline_ms=row.drain_deadline_ms,
    )


def wanted_of(deployment: Deployment) -> Wanted:
    """What of a deployment concerns its number."""
    return Wanted(
        deployment=deployment.name,
        replicas=deployment.replicas_desired,
        warm=deployment.replicas_warm,
        launcher=deployment.launcher,
        draining=deployment.desired_state is DesiredState.DRAINING,
    )
