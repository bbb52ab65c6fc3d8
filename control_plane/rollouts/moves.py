"""What one look or word does to a rollout, and the moves that several states make."""

from typing import NamedTuple

from msgspec.structs import replace

from control_plane.rollouts.state import Event, Pause, Rollout, State
from control_plane.rollouts.tables import leads_to, returned, same, split
from core.route_table import RouteTable


class Tick(NamedTuple):
    """A look's moment, and how much of the time since the last one counts."""

    now_ms: int
    passed_ms: int


class Move(NamedTuple):
    """`event` None: it stays where it is, for the rollout's reasons."""

    rollout: Rollout
    event: Event | None = None
    write: RouteTable | None = None
    release: str = ""


def stays(rollout: Rollout, *reasons: str) -> Move:
    """Where it is."""
    return Move(replace(rollout, reasons=reasons))


def pauses(rollout: Rollout, pause: Pause, event: Event, *reasons: str) -> Move:
    """Weights stay until an operator says what becomes of it."""
    return Move(
        replace(
            _fresh(rollout),
            state=State.PAUSED,
            pause=pause,
            resumes=rollout.resumes if rollout.state is State.PAUSED else rollout.state,
            reasons=reasons,
        ),
        event,
    )


def enters(rollout: Rollout, state: State, event: Event, *reasons: str) -> Move:
    """Another state, with everything counted anew and nothing measured."""
    return Move(replace(_fresh(rollout), state=state, pause="", began_ms=0, reasons=reasons), event)


def shifts(
    rollout: Rollout, table: RouteTable, percent: int, now_ms: int, event: Event, *reasons: str
) -> Move:
    """This share to the canary, in a window of its own."""
    assert rollout.base is not None
    shifted = replace(
        _fresh(rollout),
        state=State.STEPPING,
        pause="",
        percent=percent,
        over_version=table.version,
        began_ms=now_ms if percent else 0,
        windows=rollout.windows + bool(percent),
        look=0,
        verdicts=(),
        reasons=reasons,
    )
    wanted = split(rollout.base, rollout.plan, percent)
    return Move(shifted, event, replace(wanted, version=table.version))


def rolls_back(rollout: Rollout, table: RouteTable | None, event: Event, *reasons: str) -> Move:
    """The canary out of the table, which moves its conversations: one write."""
    moved = enters(rollout, State.ROLLING_BACK, event, *reasons)
    return takes_out(moved, table, keep=False)


def takes_out(move: Move, table: RouteTable | None, *, keep: bool) -> Move:
    """The canary without a share, as part of a move; nothing to write where it has none.

    A table that is as this rollout wrote it becomes what was found, to the weight.
    """
    rollout = replace(move.rollout, percent=0)
    if table is None or not leads_to(table, rollout.plan.canary):
        return move._replace(rollout=rollout)
    wanted = returned(table, rollout.plan, keep=keep)
    if rollout.base is not None and is_as_written(move.rollout, table):
        wanted = split(rollout.base, rollout.plan, 0) if keep else rollout.base
    return move._replace(
        rollout=replace(rollout, over_version=table.version),
        write=replace(wanted, version=table.version),
    )


def is_as_written(rollout: Rollout, table: RouteTable | None) -> bool:
    """Whether nobody else has changed the table since."""
    return rollout.base is not None and same(
        table, split(rollout.base, rollout.plan, rollout.percent)
    )


def is_old(rollout: Rollout, table: RouteTable | None) -> bool:
    """Whether the table was read before this rollout's own last write."""
    return table is not None and 0 < rollout.over_version >= table.version


def edited(rollout: Rollout, table: RouteTable | None) -> str:
    """What is wrong with a table that is not as written."""
    if table is None:
        return f"the route table of {rollout.plan.model} was deleted"
    return (
        f"the route table of {rollout.plan.model} was changed by another hand: version "
        f"{table.version} does not give {rollout.plan.canary} {rollout.percent} % of "
        f"{rollout.plan.stable}'s weight"
    )


def _fresh(rollout: Rollout) -> Rollout:
    return replace(rollout, held_ms=0, waited_ms=0, lost_ms=0, steady_ms=0)
