"""What workers say: register, beat, journal (`core.fleet`). Internal tokens only."""

from litestar import post
from litestar.di import NamedDependency
from litestar.params import JSONBody

from control_plane.api.deployments import DEPLOYMENT_DRAINS
from control_plane.fleet_rules import (
    BeatVerdict,
    judge_beat,
    refuse_register,
    unsound_beat,
    unsound_register,
)
from control_plane.journal import take_journal
from control_plane.services import Services
from core.errors import Code, refuse
from core.fleet import Beat, BeatReply, Journal, JournalReply, Register, Registered
from store import fleet, registry
from store.postgres import Connection
from store.registry import DesiredState


@post("/register", status_code=200)
async def register(services: NamedDependency[Services], data: JSONBody[Register]) -> Registered:
    """409 with the reason for an older boot, or for what the deployment does not serve."""
    _require_sound(unsound_register(data))
    # Boots have no order but their arrival: one that was kept waiting while its worker died and
    # was started again must not come after the new life, which would be taken for the older.
    async with services.registering.of(data.replica_id):
        acked = await _register(services, data)
    interval_ms = services.settings.beat_interval_ms
    return Registered(beat_interval_ms=interval_ms, journal_acked=acked or 0)


@post("/beat", status_code=200)
async def beat(services: NamedDependency[Services], data: JSONBody[Beat]) -> BeatReply:
    """409 for a boot that a newer one has replaced."""
    _require_sound(unsound_beat(data))
    async with services.postgres.transaction() as conn:
        current = await fleet.current_boot(conn, data.replica_id)
        acked = await fleet.boot_position(conn, data.boot_id)
        verdict = judge_beat(data, current=current, boot_known=acked is not None)
        services.metrics.beats.labels(verdict.name.lower()).inc()
        if verdict is BeatVerdict.OLD_BOOT:
            raise refuse(Code.CONFLICT, f"{data.boot_id} is an older life of {data.replica_id}")
        if verdict is BeatVerdict.UNKNOWN:
            return BeatReply(known=False)
        if verdict is BeatVerdict.TAKEN:
            await fleet.take_beat(conn, data)
        return await _reply(conn, data.replica_id, services.settings.replica_drain_ms)


@post("/journal", status_code=200)
async def journal(services: NamedDependency[Services], data: JSONBody[Journal]) -> JournalReply:
    """Journals of older boots are welcome: they may be the only witness of a lost request."""
    return await take_journal(services, data)


async def _register(services: Services, data: Register) -> int | None:
    """The boot's acknowledged journal sequence. Raises RefusedError."""
    async with services.postgres.transaction() as conn:
        acked = await fleet.boot_position(conn, data.boot_id)
        reason = refuse_register(
            data,
            deployment=await registry.deployment(conn, data.deployment),
            current=await fleet.current_boot(conn, data.replica_id),
            boot_known=acked is not None,
        )
        services.metrics.registrations.labels("refused" if reason else "taken").inc()
        if reason is not None:
            raise refuse(Code.CONFLICT, reason)
        await fleet.put_replica(conn, data)
    return acked


def _require_sound(field: str | None) -> None:
    if field is not None:
        raise refuse(Code.UNPROCESSABLE, "this cannot be what a worker means", param=field)


async def _reply(conn: Connection, replica_id: str, drain_ms: int) -> BeatReply:
    """A drain's time begins when its replica first hears of it."""
    now = await fleet.drain_now(conn, replica_id)
    if now is not None and now.left_ms is None and now.desired_state == DesiredState.DRAINING:
        await fleet.begin_drain(conn, replica_id, reason=DEPLOYMENT_DRAINS, within_ms=drain_ms)
        return BeatReply(known=True, drain=True, drain_ms=drain_ms)
    if now is None or now.left_ms is None:
        return BeatReply(known=True)
    return BeatReply(known=True, drain=True, drain_ms=now.left_ms)
