"""A rollout at one look, and an operator's word: total over every state and whatever is seen.

The shell, every few seconds: `window` → measure → `advance` → keep `Decision.rollout`, append
its transitions, make its `write` with `if_version` of the observed table: one transaction, or
nothing of it. An older table than the one written is recognised by its version and waited out.
"""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from control_plane.rollouts.analysis import outcome
from control_plane.rollouts.capacity import need
from control_plane.rollouts.ending import look_aborted, look_promoting, look_rolling_back
from control_plane.rollouts.moves import Move, Tick, is_old
from control_plane.rollouts.plan import DAY_MS, WHOLE, Plan
from control_plane.rollouts.samples import Window
from control_plane.rollouts.staging import look_pending, look_staging
from control_plane.rollouts.state import (
    Command,
    Decision,
    Observed,
    Refused,
    Rollout,
    State,
    Transition,
    Wanted,
)
from control_plane.rollouts.stepping import look_paused, look_stepping
from control_plane.rollouts.words import follow

MOVES_MAX = 8  # within one look; three are the most there can be
WINDOW_MS_MAX = DAY_MS  # a rollout that is paused for longer is judged by its first day

LOOKS = {
    State.PENDING: look_pending,
    State.STAGING: look_staging,
    State.STEPPING: look_stepping,
    State.PAUSED: look_paused,
    State.PROMOTING: look_promoting,
    State.ROLLING_BACK: look_rolling_back,
    State.ABORTED: look_aborted,
}


def begin(rollout_id: str, plan: Plan, now_ms: int) -> Rollout:
    """A new one, pending. The plan has no `fault`."""
    return Rollout(id=rollout_id, plan=plan, seen_ms=now_ms)


def window(rollout: Rollout, now_ms: int) -> Window | None:
    """What to measure before the next look; None: nothing."""
    from_ms = rollout.began_ms
    to_ms = min(now_ms - rollout.plan.rules.settle_ms, from_ms + WINDOW_MS_MAX)
    if rollout.closed or not from_ms or to_ms <= from_ms:
        return None
    return Window(from_ms=from_ms, to_ms=to_ms)


def advance(rollout: Rollout, observed: Observed, now_ms: int) -> Decision:
    """The next look. With the same input again it changes nothing more."""
    if rollout.closed:
        return Decision(rollout=rollout)
    passed_ms = min(max(0, now_ms - rollout.seen_ms), rollout.plan.rules.tick_ms_max)
    tick = Tick(now_ms, passed_ms)
    # A clock that was set back must not leave a window that begins in what is now the future.
    rollout = replace(rollout, seen_ms=now_ms, began_ms=min(rollout.began_ms, now_ms))
    if is_old(rollout, observed.table):
        return _decided(rollout, (Move(rollout),), observed, now_ms)
    before, moves = rollout, list[Move]()
    while True:
        assert len(moves) < MOVES_MAX
        move = LOOKS[rollout.state](rollout, observed, tick)
        moves.append(move)
        if move.event is None or move.write is not None or move.rollout.closed:
            break
        rollout, tick = move.rollout, Tick(now_ms, 0)
    return _decided(before, moves, observed, now_ms)


def command(
    rollout: Rollout, word: Command, observed: Observed, now_ms: int, *, why: str = ""
) -> Decision | Refused:
    """An operator's word. Only `observed.table` and, for promote, the replicas are asked for.

    `rollback` takes the canary out of the table, which moves its conversations; `abort` only
    keeps new ones from it. `promote` ends the analysis, not the gate of capacity.
    """
    move = follow(rollout, word, observed, Tick(now_ms, 0), why)
    if isinstance(move, Refused):
        return move
    seen = replace(move.rollout, seen_ms=now_ms)
    return _decided(rollout, (move._replace(rollout=seen),), observed, now_ms)


def _decided(before: Rollout, moves: Sequence[Move], observed: Observed, now_ms: int) -> Decision:
    transitions: list[Transition] = []
    state = before.state
    for move in moves:
        if move.event is not None:
            told = Transition(
                event=move.event,
                before=state,
                after=move.rollout.state,
                percent=move.rollout.percent,
                reasons=move.rollout.reasons,
                at_ms=now_ms,
            )
            transitions.append(told)
        state = move.rollout.state
    last = moves[-1]
    return Decision(
        rollout=last.rollout,
        transitions=tuple(transitions),
        write=last.write,
        wanted=tuple(_floors(last.rollout, observed)),
        release=last.release,
    )


def _floors(rollout: Rollout, observed: Observed) -> Iterator[Wanted]:
    """The stable can take everything back until the end; the canary is there for what is next."""
    if rollout.closed or rollout.state is State.PENDING:
        return
    if rollout.stable_replicas:
        yield Wanted(deployment=rollout.plan.stable, replicas=rollout.stable_replicas)
    if rollout.state is not State.ROLLING_BACK:
        replicas = need(rollout, observed, _aim(rollout)).replicas
        yield Wanted(deployment=rollout.plan.canary, replicas=replicas)


def _aim(rollout: Rollout) -> int:
    """The share that replicas of the canary should be there for."""
    steps = rollout.plan.steps
    if rollout.state is State.ABORTED:
        return 0
    if rollout.state is State.PROMOTING or rollout.resumes is State.PROMOTING:
        return WHOLE
    if rollout.state is State.STEPPING and outcome(rollout.verdicts) == "pass":
        return steps[min(rollout.step + 1, len(steps) - 1)].percent
    return steps[rollout.step].percent
