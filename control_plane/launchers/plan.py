"""What to do so that a deployment has as many replicas as it is wanted to have. Pure.

`plan` is asked again and again with what is wanted and what is seen; nothing is remembered
between. Each action may be lost or made twice: the next round sees what came of it.

    too few    wake those that sleep, then start
    too cold   too few asleep: more are started, and the least busy put to sleep
    too many   those not ready yet, then the least busy, then the newest: drained, then stopped
    too warm   more asleep than the pool is wanted to have: those that we started are stopped
    leaving    drained by an operator, or its machine is taken back: replaced at once
    ended      started again after a pause that doubles, up to a bound
    stuck      stopped, and started again
    nobody's   a place without a launch is stopped: it was started, and its record was lost

A replica that is launched counts from when it is asked for, so a slow start is never asked
for twice.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from control_plane.launchers.actions import (
    Action,
    Ask,
    AskStop,
    Drain,
    Forget,
    PlanRules,
    Seen,
    Sleep,
    Stop,
    Wake,
    Wanted,
)
from control_plane.launchers.keep import Keeper, is_here
from control_plane.launchers.life import AWAKE, Condition, Replica, judge
from core.fleet import ReplicaState
from core.launch import Place
from core.worker_spec import LauncherKind

HOME_CHARS = 6  # of a launcher's home, in the ids of its replicas


def plan(wanted: Sequence[Wanted], seen: Seen, *, now_ms: int, rules: PlanRules) -> list[Action]:
    """What to do now, in this order."""
    return list(_Round(wanted, seen, now_ms, rules).actions())


def shortfalls(wanted: Sequence[Wanted], seen: Seen, *, rules: PlanRules) -> Mapping[str, int]:
    """By deployment: how many are wanted that do not serve. For a metric and an alarm."""
    serving = [
        replica.deployment
        for replica in seen.replicas
        if judge(replica, now_ms=0, rules=rules.life).condition
        in (Condition.SERVING, Condition.SUSPECT)
    ]
    return {
        each.deployment: max(0, each.replicas - serving.count(each.deployment))
        for each in wanted
        if each.replicas is not None and not each.draining
    }


class _Round:
    """One look at everything."""

    def __init__(self, wanted: Sequence[Wanted], seen: Seen, now_ms: int, rules: PlanRules) -> None:
        self._wanted = wanted
        self._seen = seen
        self._now_ms = now_ms
        self._rules = rules
        self._keeper = Keeper(seen, now_ms, rules)
        self._launches = {each.replica_id: each for each in seen.launches}
        self._replicas = {each.replica_id: each for each in seen.replicas}
        places = {place.replica_id for place in seen.places}
        self._taken = {*self._launches, *places, *self._live_ids()}
        # Nobody's are about to be stopped: counted, they would cost one that is wanted its place.
        self._orphans = places - self._launches.keys()
        self._room = rules.places_max - sum(is_here(each, seen) for each in seen.launches)

    def actions(self) -> Iterator[Action]:
        for launch in self._seen.launches:
            yield from self._keeper.keep(launch)
        for place in self._seen.places:
            if place.replica_id not in self._launches:
                yield _rid_of(place)
        for replica in self._seen.replicas:
            yield from self._end_stuck(replica)
        for wanted in self._wanted:
            yield from self._count(wanted)

    def _end_stuck(self, replica: Replica) -> Iterator[Action]:
        """One that somebody else runs: its worker, told to end at once, is started again there."""
        told = judge(replica, now_ms=self._now_ms, rules=self._rules.life)
        is_ours = replica.replica_id in self._launches
        if told.condition is Condition.STUCK and not is_ours and replica.serves:
            yield Drain(replica_id=replica.replica_id, reason=told.reason, within_ms=0)

    def _count(self, wanted: Wanted) -> Iterator[Action]:
        if wanted.replicas is None and not wanted.draining:
            return
        want = 0 if wanted.draining else wanted.replicas or 0
        awake, asleep = self._members(wanted.deployment)
        told = f"there are {len(awake)}, and {want} are wanted"
        if wanted.draining:
            # Its replicas hear of it by themselves; those launched are not to come back.
            yield from self._retire([*awake, *asleep], "its deployment drains")
        else:
            yield from self._level(wanted, want, awake, asleep, told)

    def _level(
        self, wanted: Wanted, want: int, awake: list[str], asleep: list[str], told: str
    ) -> Iterator[Action]:
        """Wake at once and start behind; what is there for the warm pool goes to sleep."""
        woken = asleep[: max(0, want - len(awake))]
        for name in woken:
            yield Wake(replica_id=name, reason=told)
        dozing = asleep[len(woken) :]
        spare = max(0, wanted.warm - len(dozing))
        yield from self._more(wanted, want + spare - len(awake) - len(woken), told)
        least_missed = sorted(awake, key=self._worth)
        serving = [name for name in least_missed if self._condition(name) is Condition.SERVING]
        tired = serving[: max(0, min(spare, len(serving) - want))]
        for name in tired:
            yield Sleep(replica_id=name, reason=f"{wanted.warm} are kept warm")
        rest = [name for name in least_missed if name not in tired]
        yield from self._retire(rest[: max(0, len(awake) - want - spare)], told)
        # A smaller pool gives its memory back; those that others start are others' to end.
        ours = [name for name in dozing if name in self._launches]
        too_warm = ours[: max(0, len(dozing) - wanted.warm)]
        yield from self._retire(too_warm, f"{len(dozing)} sleep, and {wanted.warm} are kept warm")

    def _members(self, deployment: str) -> tuple[list[str], list[str]]:
        """Those that serve or are about to, and those that sleep."""
        launched = {n for n, each in self._launches.items() if each.deployment == deployment}
        known = {n for n, each in self._replicas.items() if each.deployment == deployment}
        names = sorted((launched | known) - self._orphans)
        conditions = {name: self._condition(name) for name in names}
        awake = [name for name in names if conditions[name] in AWAKE]
        return awake, [name for name in names if conditions[name] is Condition.ASLEEP]

    def _condition(self, name: str) -> Condition:
        launch = self._launches.get(name)
        if launch is not None:
            return self._keeper.condition(launch)
        return judge(self._replicas[name], now_ms=self._now_ms, rules=self._rules.life).condition

    def _worth(self, name: str) -> tuple[bool, int, int, str]:
        """Ascending: what is missed least. Not ready, then the least busy, then the newest."""
        replica = self._replicas.get(name)
        serves = self._condition(name) is not Condition.COMING
        busy = replica.busy if replica and serves else 0
        started_ms = (replica.started_ms if replica else None) or self._now_ms
        return serves, busy, -started_ms, name

    def _retire(self, names: Sequence[str], reason: str) -> Iterator[Action]:
        for name in names:
            replica, launch = self._replicas.get(name), self._launches.get(name)
            # Only one that takes work has something to finish.
            has_work = replica is not None and (replica.serves or replica.busy > 0)
            if launch is not None and self._condition(name) is Condition.COMING:
                has_work = False
            grace_ms = self._rules.drain_ms if has_work else 0
            if replica is not None:
                # Of one that loads too: it is not to become ready and be given work meanwhile.
                yield Drain(replica_id=name, reason=reason, within_ms=grace_ms)
            if launch is not None:
                yield AskStop(replica_id=name, reason=reason, grace_ms=grace_ms)

    def _more(self, wanted: Wanted, count: int, told: str) -> Iterator[Action]:
        if wanted.launcher is LauncherKind.EXTERNAL or not self._seen.home:
            return
        for _ in range(min(count, self._room)):
            name = self._free_id(wanted.deployment)
            self._taken.add(name)
            self._room -= 1
            yield Ask(replica_id=name, deployment=wanted.deployment, reason=told)

    def _free_id(self, deployment: str) -> str:
        """An id is a place with a journal in it, so it is taken again as soon as it is free."""
        stem = f"{_slug(deployment)}-{self._seen.home[:HOME_CHARS]}"
        number = 0
        while f"{stem}-{number}" in self._taken:
            number += 1
        return f"{stem}-{number}"

    def _live_ids(self) -> Iterator[str]:
        for replica in self._seen.replicas:
            if replica.state not in (ReplicaState.STOPPED, ReplicaState.LOST):
                yield replica.replica_id


def _rid_of(place: Place) -> Action:
    name, reason = place.replica_id, "nobody asked for it"
    if place.alive:
        return Stop(replica_id=name, reason=reason)
    return Forget(replica_id=name, reason=reason)


def _slug(deployment: str) -> str:
    """As a replica id may be written; whose id it is, the registry says."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", deployment)
