"""A world around the rollout machine: a table that obeys, replicas, and sides as one asks."""

import math
from functools import cache
from statistics import NormalDist

from msgspec.structs import replace

from control_plane.rollouts import machine
from control_plane.rollouts.plan import Plan, Rules, Step
from control_plane.rollouts.samples import Histogram, Sample, Side, Stratum, Window, bucket
from control_plane.rollouts.state import (
    Command,
    Decision,
    Observed,
    Refused,
    ReplicaSeen,
    Rollout,
    State,
    Transition,
)
from core.fleet import ReplicaState
from core.route_table import RouteTable, Target

START_MS = 1_000_000
TICK_MS = 10_000
POINTS = 100
RULES = Rules(tick_ms_max=TICK_MS, settle_ms=0, lost_ms_max=2 * TICK_MS, restore_ms=TICK_MS)
PLAN = Plan(
    model="smol",
    stable="old",
    canary="new",
    stable_version="v-old",
    canary_version="v-new",
    steps=tuple(
        Step(percent=percent, least_ms=2 * TICK_MS, most_ms=10 * TICK_MS)
        for percent in (5, 50, 100)
    ),
    rules=replace(RULES, keep_warm_ms=3 * TICK_MS),
)
TABLE = RouteTable(model="smol", targets=(Target(deployment="old"),), version=7)


@cache
def histogram(size: int, median: float, spread: float = 0.5) -> Histogram:
    """So many log-normal values, as evenly as they can lie."""
    points = min(size, POINTS)
    counts: dict[int, int] = {}
    for at in range(points):
        value = median * math.exp(spread * NormalDist().inv_cdf((at + 0.5) / points))
        counts[bucket(value)] = counts.get(bucket(value), 0) + (size + at) // points
    return tuple(sorted(counts.items()))


@cache
def stratum(
    size: int = 2000,
    *,
    name: str = "all",
    errors: float = 0.01,
    truncated: float = 0.05,
    filtered: float = 0.0,
    refused: float | None = 0.02,
    left: float = 0.0,
    slower: float = 1.0,
    longer: float = 1.0,
) -> Stratum:
    """Requests of one stratum by their rates and factors."""
    failed, gone = round(size * errors), round(size * left)
    whole = size - failed - gone
    length, blocked = round(whole * truncated), round(whole * filtered)
    causes = {
        "failed": failed,
        "client_cancelled": gone,
        "length": length,
        "filtered": blocked,
        "complete": whole - length - blocked,
    }
    lengths = histogram(whole, 200 * longer)
    return Stratum(
        name=name,
        causes=causes,
        refused=None if refused is None else round(whole * refused),
        first_token=histogram(whole, 300 * slower),
        inter_token=histogram(whole, 25 * slower, 0.2),
        output_tokens=lengths,
        tokens=histogram(whole, 600 * longer),
        cost=lengths,
    )


def side(size: int = 2000, **kinds) -> Side:
    """The same as a whole side."""
    return Side(strata=(stratum(size, **kinds),)) if size else Side()


class RolloutWorld:
    """`canary` and `stable` are what is measured of them, None if nothing can be."""

    def __init__(self, plan: Plan = PLAN, table: RouteTable | None = TABLE) -> None:
        self.now_ms = START_MS
        self.table = table
        self.rollout: Rollout = machine.begin("ro_1", plan, self.now_ms)
        self.new: tuple[ReplicaSeen, ...] | None = replicas("new", 2)
        self.old: tuple[ReplicaSeen, ...] | None = replicas("old", 2)
        self.canary: Side | None = side()
        self.stable: Side | None = side()
        self.window: Window | None = None  # instead of the one that is asked for
        self.demand_rps: float | None = None
        self.replica_rps: float | None = None
        self.busy_with = ""
        self.history: list[Transition] = []
        self.released: list[str] = []
        self.writes = 0

    def observed(self) -> Observed:
        window = self.window or machine.window(self.rollout, self.now_ms)
        sample = None
        if window is not None and self.canary is not None and self.stable is not None:
            sample = Sample(window=window, canary=self.canary, stable=self.stable)
        return Observed(
            table=self.table,
            canary=self.new,
            stable=self.old,
            demand_rps=self.demand_rps,
            replica_rps=self.replica_rps,
            sample=sample,
            busy_with=self.busy_with,
        )

    def look(self, passed_ms: int = TICK_MS, times: int = 1) -> Decision:
        """Look so often; each is taken twice, which must change nothing more."""
        decision = Decision(rollout=self.rollout)
        for _ in range(times):
            self.now_ms += passed_ms
            observed = self.observed()
            decision = machine.advance(self.rollout, observed, self.now_ms)
            again = machine.advance(decision.rollout, observed, self.now_ms)
            assert (again.transitions, again.write, again.release) == ((), None, "")
            assert again.rollout == decision.rollout
            self._follow(decision)
        return decision

    def say(self, word: Command, **more) -> Decision | Refused:
        answer = machine.command(self.rollout, word, self.observed(), self.now_ms, **more)
        if isinstance(answer, Decision):
            self._follow(answer)
        return answer

    def until(self, state: State, looks: int = 60) -> Decision:
        for _ in range(looks):
            decision = self.look()
            if self.rollout.state is state:
                return decision
        raise AssertionError(f"{self.rollout.state}: {self.rollout.reasons}")

    def until_percent(self, percent: int) -> None:
        for _ in range(60):
            if self.rollout.percent == percent:
                return
            self.look()
        raise AssertionError(f"{self.rollout.state}: {self.rollout.reasons}")

    def share(self) -> float | None:
        """Of new conversations that go to the canary; None: the table does not lead there."""
        assert self.table is not None
        weights: dict[str, int] = {}
        for target in self.table.targets:
            weights[target.deployment] = weights.get(target.deployment, 0) + target.weight
        both = weights.get("new", 0) + weights.get("old", 0)
        return weights["new"] / both if "new" in weights else None

    def edit(self, **changes) -> None:
        """Another hand."""
        assert self.table is not None
        self.table = replace(self.table, version=self.table.version + 1, **changes)

    def _follow(self, decision: Decision) -> None:
        self.rollout = decision.rollout
        self.history.extend(decision.transitions)
        if decision.release:
            self.released.append(decision.release)
        if decision.write is not None:
            assert self.table is not None
            assert decision.write.version == self.table.version
            self.table = replace(decision.write, version=self.table.version + 1)
            self.writes += 1


def replicas(
    deployment: str, count: int, state: ReplicaState = ReplicaState.READY, version: str = ""
) -> tuple[ReplicaSeen, ...]:
    return tuple(
        ReplicaSeen(name=f"{deployment}-{n}", state=state, version=version or f"v-{deployment}")
        for n in range(count)
    )


MUCH = 8_000  # requests of a side, with which equals pass


def stepping(**rules) -> RolloutWorld:
    """At its first step, with sides that neither pass nor fail."""
    world = RolloutWorld(replace(PLAN, rules=replace(PLAN.rules, **rules)))
    world.canary = world.stable = side(300)
    world.until(State.STEPPING)
    return world


def alone(**rules) -> RolloutWorld:
    """At its last step, where there is no stable to compare with."""
    world = stepping(**rules)
    world.canary = world.stable = side(MUCH)
    world.until_percent(100)
    world.canary = side(300)
    return world
