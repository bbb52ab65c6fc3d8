"""What to do about one launch, and about what runs for it. Pure.

asked ─► start ─► runs ──────────── not wanted any more ─► stop ─► forget
           ▲        │ ended by itself, stuck, never registered
           └─ pause ┘
"""

from collections.abc import Iterator

from control_plane.launchers.actions import (
    Action,
    Adopt,
    AskStop,
    Drain,
    Fail,
    Forget,
    PlanRules,
    Seen,
    Settle,
    Start,
    Stop,
)
from control_plane.launchers.life import AWAKE, Condition, Judgement, judge
from core.launch import Launch, Place

ENDED = frozenset({Condition.GONE, Condition.STUCK})
TAKES_WORK = frozenset({Condition.SERVING, Condition.SUSPECT})


def is_here(launch: Launch, seen: Seen) -> bool:
    """Whether the launcher that we reach holds it."""
    return bool(seen.home) and launch.home == seen.home


class Keeper:
    """Of one round."""

    def __init__(self, seen: Seen, now_ms: int, rules: PlanRules) -> None:
        self._seen = seen
        self._now_ms = now_ms
        self._rules = rules
        self._places = {each.replica_id: each for each in seen.places}
        self._replicas = {each.replica_id: each for each in seen.replicas}

    def keep(self, launch: Launch) -> Iterator[Action]:
        """What is to be done for it now."""
        place = self._places.get(launch.replica_id)
        runs = place is not None and place.alive
        if not is_here(launch, self._seen):
            yield from self._give_up(launch)
        elif runs and launch.started_ms is None:
            yield Adopt(replica_id=launch.replica_id, reason="it runs already")
        elif not launch.is_wanted:
            yield from self._end(launch, runs=runs)
        elif not runs:
            yield from self._begin(launch, place)
        else:
            assert launch.started_ms is not None, "one that runs has been adopted"
            yield from self._watch(launch, self._now_ms - launch.started_ms)

    def condition(self, launch: Launch) -> Condition:
        """What it counts as: one that will be started again is coming."""
        if not launch.is_wanted:
            return Condition.LEAVING
        told = self._judged(launch)
        if not is_here(launch, self._seen):
            if told is None:
                is_late = self._now_ms - launch.asked_ms > self._rules.life.start_ms
                return Condition.GONE if is_late else Condition.COMING
            return told.condition
        if told is None or told.condition in ENDED:
            return Condition.COMING
        return told.condition

    def _begin(self, launch: Launch, place: Place | None) -> Iterator[Action]:
        name = launch.replica_id
        if launch.started_ms is not None:
            ended = (place.ended if place else "") or "its process is gone"
            yield Fail(replica_id=name, reason=ended, retry_in_ms=self._pause_ms(launch))
        elif launch.retry_ms is None or self._now_ms >= launch.retry_ms:
            again = f"again, after: {launch.last_failure}" if launch.failures else "it is wanted"
            yield Start(replica_id=name, reason=again)

    def _watch(self, launch: Launch, life_ms: int) -> Iterator[Action]:
        name, told = launch.replica_id, self._judged(launch)
        if told is None:
            if life_ms > self._rules.life.start_ms:
                late = f"it has not registered {life_ms / 1000:.0f} s after its start"
                yield Stop(replica_id=name, reason=late)
        elif told.condition is Condition.STUCK:
            yield Stop(replica_id=name, reason=told.reason)
        elif told.condition is Condition.GONE:
            # It does not answer either, or the reaper would have kept it.
            if self._replicas[name].silent_ms > self._rules.life.stalled_ms:
                yield Stop(replica_id=name, reason=f"{told.reason}, and its process goes on")
        elif told.condition is Condition.LEAVING:
            yield AskStop(replica_id=name, reason=told.reason, grace_ms=self._left_ms(name))
        elif launch.failures and told.condition in AWAKE and life_ms > self._rules.stable_ms:
            yield Settle(replica_id=name, reason="it has been well for long")

    def _end(self, launch: Launch, *, runs: bool) -> Iterator[Action]:
        name, reason = launch.replica_id, launch.stop_reason
        told = self._judged(launch)
        if not runs:
            yield Forget(replica_id=name, reason=reason)
        elif told is None or told.condition in ENDED:
            yield Stop(replica_id=name, reason=reason)
        elif told.condition in TAKES_WORK:
            # It became ready after it was asked for, and may have been given work by now.
            yield Drain(replica_id=name, reason=reason, within_ms=self._rules.drain_ms)
        elif self._now_ms >= self._over_ms(launch):
            yield Stop(replica_id=name, reason=f"{reason}; its time is over")

    def _give_up(self, launch: Launch) -> Iterator[Action]:
        """What runs there after all is nobody's, and stopped as such once it is in reach."""
        replica = self._replicas.get(launch.replica_id)
        since_ms = self._now_ms - launch.asked_ms if replica is None else replica.silent_ms
        if since_ms > self._rules.away_ms:
            reason = f"its launcher {launch.home} has been out of reach"
            yield Forget(replica_id=launch.replica_id, reason=reason)

    def _judged(self, launch: Launch) -> Judgement | None:
        """None while what runs now has not been heard of: an older life's row says nothing."""
        replica = self._replicas.get(launch.replica_id)
        if replica is None or launch.started_ms is None:
            return None
        if self._now_ms - replica.silent_ms < launch.started_ms:
            return None
        return judge(replica, now_ms=self._now_ms, rules=self._rules.life)

    def _over_ms(self, launch: Launch) -> int:
        asked_ms = (launch.stop_asked_ms or 0) + launch.stop_grace_ms
        deadline_ms = self._replicas[launch.replica_id].drain_deadline_ms
        return asked_ms if deadline_ms is None else deadline_ms

    def _left_ms(self, name: str) -> int:
        deadline_ms = self._replicas[name].drain_deadline_ms
        return self._rules.drain_ms if deadline_ms is None else max(0, deadline_ms - self._now_ms)

    def _pause_ms(self, launch: Launch) -> int:
        first, most = self._rules.retry_first_ms, self._rules.retry_max_ms
        return min(most, first << min(launch.failures, 30))
