"""One rollout from its first look to its end: the real machine, and a world that obeys it."""

from collections.abc import Callable

import msgspec
import numpy as np

from control_plane.rollouts import machine
from control_plane.rollouts.plan import Plan, Rules, Step
from control_plane.rollouts.samples import Sample
from control_plane.rollouts.state import Observed, ReplicaSeen, Rollout, State
from core.fleet import ReplicaState
from core.route_table import RouteTable, Target
from simulator.clock import START_MS
from simulator.rollouts.sides import Kind, Tally

TICK_MS = 60_000
HOURS_MAX = 24
MINUTE_MS = 60_000


class Weather(msgspec.Struct, frozen=True, kw_only=True):
    """Of both sides at one moment."""

    rate: float = 1.0  # times the scenario's requests
    slow: float = 1.0  # times all latencies


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Two sides, the traffic they share, and whether the canary should be stopped."""

    name: str
    canary: Kind = Kind()
    stable: Kind = Kind()
    rps: float = 20.0
    weather: Callable[[int], Weather] = lambda _minute: Weather()
    is_bad: bool = False


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a trial ended: at a pause, since nobody is there to resume."""

    state: State
    minutes: int
    percent_max: int
    served: int  # requests of the canary
    reasons: tuple[str, ...]


PLAN = Plan(
    model="smol",
    stable="smol-a",
    canary="smol-b",
    stable_version="a",
    canary_version="b",
    steps=(Step(percent=5), Step(percent=50), Step(percent=100)),
    rules=Rules(settle_ms=0, tick_ms_max=TICK_MS, lost_ms_max=2 * TICK_MS, keep_warm_ms=0),
)
WAITING = {State.PENDING, State.STAGING, State.STEPPING, State.PROMOTING, State.ROLLING_BACK}


class Trial:
    """The world of one seed."""

    def __init__(self, scenario: Scenario, seed: int, plan: Plan = PLAN) -> None:
        self._scenario = scenario
        self._rng = np.random.default_rng(seed)
        self._rollout = machine.begin("trial", plan, START_MS)
        self._table = RouteTable(model="smol", targets=(Target(deployment="smol-a"),), version=1)
        self._tallies = (Tally(), Tally())
        self._began_ms = 0
        self._served = 0
        self._percent_max = 0

    def run(self) -> Ended:
        """To its end."""
        now_ms = START_MS
        while self._rollout.state in WAITING and now_ms < START_MS + HOURS_MAX * 60 * MINUTE_MS:
            minute = (now_ms - START_MS) // MINUTE_MS
            self._requests(self._scenario.weather(minute))
            now_ms += TICK_MS
            self._look(now_ms)
        return Ended(
            state=self._rollout.state,
            minutes=(now_ms - START_MS) // MINUTE_MS,
            percent_max=self._percent_max,
            served=self._served,
            reasons=self._rollout.reasons,
        )

    def _requests(self, weather: Weather) -> None:
        """Of one tick. A window that the machine has opened anew has none before it."""
        if self._rollout.began_ms != self._began_ms:
            self._began_ms = self._rollout.began_ms
            self._tallies = (Tally(), Tally())
        mean = self._scenario.rps * weather.rate * TICK_MS / 1000
        total = int(self._rng.poisson(mean))
        ours = int(self._rng.binomial(total, self._rollout.percent / 100))
        self._served += ours
        canary, stable = self._tallies
        canary.add(self._scenario.canary, ours, self._rng, weather.slow)
        stable.add(self._scenario.stable, total - ours, self._rng, weather.slow)

    def _look(self, now_ms: int) -> None:
        decision = machine.advance(self._rollout, self._observed(self._rollout, now_ms), now_ms)
        self._rollout = decision.rollout
        self._percent_max = max(self._percent_max, self._rollout.percent)
        if decision.write is not None:
            version = self._table.version + 1
            self._table = msgspec.structs.replace(decision.write, version=version)

    def _observed(self, rollout: Rollout, now_ms: int) -> Observed:
        window = machine.window(rollout, now_ms)
        sample = None
        if window is not None:
            canary, stable = (tally.side() for tally in self._tallies)
            sample = Sample(window=window, canary=canary, stable=stable)
        return Observed(
            table=self._table,
            canary=_replicas("smol-b", "b"),
            stable=_replicas("smol-a", "a"),
            sample=sample,
        )


def _replicas(deployment: str, version: str) -> tuple[ReplicaSeen, ...]:
    return tuple(
        ReplicaSeen(name=f"{deployment}-{n}", state=ReplicaState.READY, version=version)
        for n in range(4)
    )
