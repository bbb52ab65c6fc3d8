"""The scenarios, and what many seeds of each say."""

from collections.abc import Sequence
from statistics import median

import msgspec

from control_plane.rollouts.plan import Plan
from control_plane.rollouts.state import State
from simulator.rollouts.sides import Kind
from simulator.rollouts.trial import PLAN, Ended, Scenario, Trial, Weather

LAST_STEP_MINUTE = 20  # about when an equal canary comes to its last step
WHOLE_PERCENT = 100


def _bursts(minute: int) -> Weather:
    """Every tenth minute ten times the traffic, twice as slow."""
    return Weather(rate=10.0, slow=2.0) if minute % 10 == 0 else Weather()


def _busier(minute: int) -> Weather:
    """From the time of the last step on: a rush hour that is nobody's fault."""
    return Weather(slow=1.6) if minute > LAST_STEP_MINUTE else Weather()


SCENARIOS = (
    Scenario(name="equal"),
    Scenario(name="equal, busy", rps=200.0),
    Scenario(name="equal, bursts", weather=_bursts),
    Scenario(name="equal, rush hour", weather=_busier),
    Scenario(name="equal, other prompts", stable=Kind(long=0.6)),
    Scenario(name="equal, tiny traffic", rps=0.05),
    Scenario(name="10 % slower", canary=Kind(slower=1.1)),
    Scenario(name="60 % slower", canary=Kind(slower=1.6), is_bad=True),
    Scenario(name="60 % slower, bursts", canary=Kind(slower=1.6), weather=_bursts, is_bad=True),
    Scenario(name="answers twice as long", canary=Kind(longer=2.0), is_bad=True),
    Scenario(name="errors 1 to 5 %", canary=Kind(errors=0.05), is_bad=True),
    Scenario(name="errors 1 to 30 %", canary=Kind(errors=0.3), is_bad=True),
    Scenario(name="refusals 2 to 15 %", canary=Kind(refused=0.15), is_bad=True),
    Scenario(name="cut off 5 to 20 %", canary=Kind(truncated=0.2), is_bad=True),
    Scenario(name="errors 30 %, tiny traffic", canary=Kind(errors=0.3), rps=0.05, is_bad=True),
)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one scenario. Minutes and requests are medians, from the start to the end."""

    name: str
    is_bad: bool
    runs: int
    promoted: int
    rolled_back: int
    paused: int
    minutes: int
    minutes_p90: int
    served: int  # by the canary
    whole: int  # trials in which the canary ever had all of the traffic


def measure(scenario: Scenario, seeds: Sequence[int], plan: Plan = PLAN) -> Figures:
    """Every seed once."""
    ends = [Trial(scenario, seed, plan).run() for seed in seeds]
    minutes = sorted(end.minutes for end in ends)
    return Figures(
        name=scenario.name,
        is_bad=scenario.is_bad,
        runs=len(ends),
        promoted=_count(ends, State.PROMOTED),
        rolled_back=_count(ends, State.ROLLED_BACK),
        paused=_count(ends, State.PAUSED),
        minutes=int(median(minutes)),
        minutes_p90=minutes[(len(minutes) * 9) // 10],
        served=int(median(end.served for end in ends)),
        whole=sum(end.percent_max == WHOLE_PERCENT for end in ends),
    )


def _count(ends: Sequence[Ended], state: State) -> int:
    return sum(end.state is state for end in ends)


def table(figures: Sequence[Figures]) -> str:
    """As it stands in the documentation."""
    rows = [
        "| canary | runs | promoted | rolled back | paused | minutes (p90) | its requests |",
        "|---|---|---|---|---|---|---|",
    ]
    rows += [
        f"| {f.name} | {f.runs:,} | {f.promoted / f.runs:.1%} | {f.rolled_back / f.runs:.1%} "
        f"| {f.paused / f.runs:.1%} | {f.minutes} ({f.minutes_p90}) | {f.served:,} |"
        for f in figures
    ]
    return "\n".join(rows)
