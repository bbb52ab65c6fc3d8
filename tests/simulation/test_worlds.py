"""Short worlds under many seeds: every invariant holds after every event, and at rest.

A failure's message carries the seed, the last events, and the command that replays it.
"""

from collections import Counter

import pytest

from core.money import EndCause
from simulator.config import WorldConfig
from simulator.faults import ALL_FAULTS, STEADY_FAULTS, Fault
from simulator.world import World

# More of one kind at a time: what each does to the others shows where they meet.
PAIRS = [
    (Fault.WORKER, Fault.CUT),
    (Fault.GATEWAY, Fault.CONTROL_PLANE),
    (Fault.VALKEY, Fault.DELAY),
    (Fault.POSTGRES, Fault.GATEWAY),
    (Fault.PARTITION, Fault.POWER),
]


def run(seed, *faults, **changes):
    return World(WorldConfig(seed=seed, faults=faults, **changes)).run()


@pytest.mark.parametrize("seed", range(1_000, 1_010))
def test_all_goes_well(seed):
    report = run(seed)
    assert report.metered_tokens == report.produced_tokens
    assert not {"failed", "gateway_died"} & report.ends.keys()


@pytest.mark.parametrize("fault", ALL_FAULTS)
@pytest.mark.parametrize("seed", range(2_000, 2_002))
def test_one_thing_goes_wrong(fault, seed):
    run(seed, fault, orders=60)


@pytest.mark.parametrize("faults", PAIRS)
def test_two_things_go_wrong(faults):
    run(3_000, *faults, orders=60)


@pytest.mark.parametrize("seed", range(4_000, 4_012))
def test_everything_goes_wrong(seed):
    run(seed, *ALL_FAULTS)


@pytest.mark.parametrize(("gateways", "workers"), [(1, 1), (3, 1), (1, 3)])
def test_other_casts(gateways, workers):
    run(5_000, *ALL_FAULTS, gateways=gateways, workers=workers, orders=60)


def test_runs_get_everywhere():
    # A simulation in which nothing happens finds nothing: this is the list of what must.
    reports = [run(seed, *ALL_FAULTS) for seed in range(6)]
    reports += [run(seed, orders=120) for seed in range(2)]
    ends, refusals, strikes = Counter(), Counter(), Counter()
    for report in reports:
        ends.update(report.ends)
        refusals.update({name.split(":")[0]: n for name, n in report.refusals.items()})
        strikes.update(report.strikes)
    rare = {EndCause.FILTERED, EndCause.LOST, EndCause.FAILED}
    assert ends.keys() >= {*EndCause, "gateway_died"} - rare
    assert refusals.keys() >= {"limit", "ledger", "dropped"}
    assert strikes.keys() == set(ALL_FAULTS) - STEADY_FAULTS
    assert sum(report.preemptions for report in reports) > 0
    assert sum(report.resumes for report in reports) > 0
