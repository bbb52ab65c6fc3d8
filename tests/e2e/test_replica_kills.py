"""The real worker killed under streams of every kind, and clients that leave at every stage.

More of both in `make soak`.
"""

import asyncio

import pytest

from tests.support.abandonment import STAGES, abandon
from tests.support.replica_kills import KINDS, kill_workers

pytestmark = [pytest.mark.e2e, pytest.mark.model]

KILLS = 3
ABORTS = 40
SEED = 20_261_130


@pytest.fixture(autouse=True)
def clean_before_and_after(stack):
    stack.wait_ready()
    stack.settles()
    yield
    stack.wait_ready()
    stack.settles()


def test_a_killed_worker_cuts_nothing_in_silence_and_tells_nothing_twice(stack):
    tally = asyncio.run(kill_workers(stack, kills=KILLS, seed=SEED))
    assert tally.kills == KILLS
    assert tally.streams.total() == KILLS * len(KINDS)
    assert tally.resumed > 0, tally.report()
    assert tally.whole.total() > tally.streams.total() // 2, tally.report()


def test_clients_that_leave_at_any_stage_leave_nothing_behind(stack):
    left = asyncio.run(abandon(stack, aborts=ABORTS, seed=SEED))
    assert left.total() == ABORTS
    assert len(set(left) & set(STAGES)) > len(STAGES) // 2, left
    stack.settles()
    assert stack.check()["ok"]
