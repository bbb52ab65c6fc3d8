"""What steps are measured to cost, and how little a long prompt may disturb those who decode."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engine_requests import a_sequence
from tests.support.scheduler_driver import Driver, assert_right_outputs
from worker.pace import PREFILL_LEAST, Pace
from worker.swap import Leaving


def a_pace(**changes):
    given_values = {"target_ms": 0.0, "stretch": 1.5, "token_ms": 1.0, "copy_block_ms": 1.0}
    return Pace(**(given_values | changes))


def learned(pace, *, decode_ms=20.0, rows=8, token_ms=0.5):
    """After steps of that cost."""
    for _ in range(40):
        pace.observed(decode_ms, decode_rows=rows, prefill_tokens=0)
        pace.observed(decode_ms + 64 * token_ms, decode_rows=rows, prefill_tokens=64)
    return pace


def test_before_any_measurement_nothing_is_limited():
    assert a_pace().prefill_tokens(8, 512) == 512


def test_without_decodes_a_step_is_all_prefill():
    assert learned(a_pace()).prefill_tokens(0, 512) == 512


def test_the_stretch_bounds_what_prefill_adds_to_a_step_of_decodes():
    assert learned(a_pace(stretch=1.5)).prefill_tokens(8, 512) == 20  # 10 ms of 0.5
    assert learned(a_pace(stretch=2.0)).prefill_tokens(8, 512) == 40
    assert learned(a_pace(stretch=2.0)).prefill_tokens(8, 30) == 30


@pytest.mark.parametrize(("wanting", "tokens"), [(1, 20), (8, 20), (9, 22), (16, 40), (80, 200)])
def test_the_more_want_to_begin_than_decode_the_longer_is_the_stretch(wanting, tokens):
    assert learned(a_pace(stretch=1.5)).prefill_tokens(8, 512, wanting) == tokens
    assert learned(a_pace(target_ms=50.0)).prefill_tokens(8, 512, wanting) == 60


def test_several_long_prompts_share_what_one_may_take_and_none_gets_less_than_nothing():
    machine = Machine(2)
    driver = machine.driver
    for number in range(4):
        driver.add(a_sequence([number] * 4, max_tokens=900))
    for _ in range(20):
        machine.step()
    prompts = [
        driver.add(a_sequence([(i * n) % 250 for i in range(2500)], max_tokens=1))
        for n in (1, 3, 7)
    ]
    for _ in range(40):
        step = machine.step()[1]
        assert all(tokens > 0 for tokens in step.values())
        assert sum(step.get(prompt.number, 0) for prompt in prompts) < 200
    assert len(driver.scheduler.running) == 7
    while driver.scheduler.has_work:
        machine.step()
    assert_right_outputs(driver, 7)


def test_a_target_bounds_the_whole_step_and_goes_before_the_stretch():
    assert learned(a_pace(target_ms=50.0)).prefill_tokens(8, 512) == 60
    assert learned(a_pace(target_ms=25.0, stretch=9.0)).prefill_tokens(8, 512) == 10


def test_with_neither_there_is_no_limit():
    assert learned(a_pace(stretch=0.0)).prefill_tokens(8, 512) == 512


def test_decodes_over_the_target_by_themselves_still_let_a_prefill_advance():
    assert learned(a_pace(target_ms=1.0)).prefill_tokens(8, 512) == PREFILL_LEAST
    assert learned(a_pace(target_ms=1.0)).prefill_tokens(8, 3) == 3


def test_decodes_that_were_never_measured_alone_get_the_least_prefill():
    pace = a_pace()
    pace.observed(30.0, decode_rows=0, prefill_tokens=30)
    assert pace.prefill_tokens(4, 512) == PREFILL_LEAST


def test_a_short_prefill_by_itself_is_not_taken_for_dear_tokens():
    pace = learned(a_pace(), decode_ms=20.0, token_ms=0.5)
    pace.observed(22.0, decode_rows=0, prefill_tokens=4)
    assert pace.token_ms == pytest.approx(0.5)


def test_decodes_that_were_only_measured_beside_prefill_are_what_it_left():
    pace = a_pace()
    pace.observed(100.0, decode_rows=0, prefill_tokens=100)
    pace.observed(30.0, decode_rows=4, prefill_tokens=10)
    assert (pace.decode_ms(4), pace.token_ms) == (20, 1)
    pace.observed(12.0, decode_rows=16, prefill_tokens=10)
    assert pace.decode_ms(16) == 6, "at least half of the step"
    pace.observed(30.0, decode_rows=64, prefill_tokens=10, moved_blocks=1)
    assert pace.decode_ms(64) == 6, "but not of one that moved blocks"


def test_the_nearest_measured_number_of_rows_speaks_for_others():
    pace = a_pace()
    pace.observed(10.0, decode_rows=2, prefill_tokens=0)
    pace.observed(80.0, decode_rows=32, prefill_tokens=0)
    sizes = {rows: pace.decode_ms(rows) for rows in (0, 1, 2, 3, 4, 8, 16, 32, 64)}
    assert sizes == {0: 0, 1: 10, 2: 10, 3: 10, 4: 10, 8: 10, 16: 80, 32: 80, 64: 80}


def test_prefill_that_costs_nothing_is_not_limited():
    pace = a_pace()
    pace.observed(10.0, decode_rows=4, prefill_tokens=0)
    pace.observed(9.0, decode_rows=4, prefill_tokens=100)
    assert pace.token_ms == 0
    assert pace.prefill_tokens(4, 512) == 512


def test_cost_that_rises_is_believed_at_once_and_cost_that_falls_by_and_by():
    pace = learned(a_pace(), token_ms=1.0)
    pace.observed(20 + 64 * 3, decode_rows=8, prefill_tokens=64)
    assert pace.token_ms == pytest.approx(2.0)
    pace.observed(20 + 64 * 1, decode_rows=8, prefill_tokens=64)
    assert pace.token_ms == pytest.approx(1.875)


def test_a_decodes_cost_drifts_with_its_measurements():
    pace = a_pace()
    for step_ms in (10.0, 20.0, 20.0):
        pace.observed(step_ms, decode_rows=8, prefill_tokens=0)
    assert pace.decode_ms(8) == pytest.approx(14.375)


def test_moves_are_measured_as_what_a_step_took_beyond_its_tokens():
    pace = learned(a_pace(), decode_ms=20.0, token_ms=0.5)
    pace.observed(20 + 32 + 12, decode_rows=8, prefill_tokens=64, moved_blocks=4)
    assert pace.copy_block_ms == pytest.approx(3.0)
    pace.observed(20 + 28, decode_rows=8, prefill_tokens=0, moved_blocks=4)
    assert pace.copy_block_ms == pytest.approx(4.0)
    pace.observed(0, decode_rows=8, prefill_tokens=0, moved_blocks=4)
    assert pace.copy_block_ms == pytest.approx(3.0)
    assert pace.token_ms == pytest.approx(0.5)


def test_an_empty_step_teaches_nothing():
    pace = a_pace()
    pace.observed(50.0, decode_rows=0, prefill_tokens=0)
    assert (pace.decode_ms(1), pace.token_ms, pace.copy_block_ms) == (0, 1, 1)


@pytest.mark.parametrize(
    ("blocks_out", "blocks_in", "tokens", "cheaper"),
    [(2, 2, 41, True), (2, 2, 40, False), (0, 4, 41, True), (4, 0, 41, True), (0, 0, 1, True)],
)
def test_a_swap_is_chosen_when_its_moves_take_less_than_the_tokens(
    blocks_out, blocks_in, tokens, cheaper
):
    pace = a_pace(copy_block_ms=1.0, token_ms=0.1)
    leaving = Leaving(blocks_out=blocks_out, blocks_in=blocks_in, tokens=tokens)
    assert pace.swap_is_cheaper(leaving) is cheaper


@given(
    steps=st.lists(
        st.tuples(st.floats(0, 1e6), st.integers(0, 64), st.integers(0, 512), st.integers(0, 9))
    ),
    rows=st.integers(0, 64),
    most=st.integers(1, 512),
    target_ms=st.sampled_from([0.0, 5.0, 1e9]),
    stretch=st.sampled_from([0.0, 1.0, 1.6, 100.0]),
)
def test_whatever_was_measured_a_prefill_advances_and_never_over_the_step(
    steps, rows, most, target_ms, stretch
):
    pace = a_pace(target_ms=target_ms, stretch=stretch)
    for step_ms, decode_rows, prefill_tokens, moved in steps:
        pace.observed(
            step_ms, decode_rows=decode_rows, prefill_tokens=prefill_tokens, moved_blocks=moved
        )
    assert 1 <= pace.prefill_tokens(rows, most) <= most


# A machine of virtual time: what eight streams feel of one long prompt.


class Machine:
    """Steps take a base, a little for each decode and each token, more at high positions."""

    def __init__(self, seed, **config):
        self.driver = Driver(
            kv_blocks=900, block_tokens=16, max_batched_tokens=512, max_sequences=16, **config
        )
        self.token_ms = 1.0
        self._dice = random.Random(seed)

    def step(self):
        """How long a step took, and its sequences."""
        scheduler = self.driver.scheduler
        plan = scheduler.schedule()
        ms = 15.0
        for row in plan.rows:
            size = len(row.token_ids)
            ms += 1.0 if size == 1 else size * self.token_ms * (1 + row.start / 8000)
        ms *= self._dice.uniform(0.95, 1.05)
        scheduler.observed(plan, ms)
        for sequence, _ in scheduler.complete(plan, self.driver.runner.execute(plan)):
            if sequence.num_tokens == sequence.final_tokens:
                scheduler.finish(sequence)
                self.driver.done.append(sequence)
        return ms, {row.sequence: len(row.token_ids) for row in plan.rows}


def intervals(machine, *, with_prompt):
    """Between the tokens of eight streams, in ms, while a prompt of 4,000 tokens is computed."""
    driver = machine.driver
    streams = [driver.add(a_sequence([i + 1] * 4, max_tokens=700)) for i in range(8)]
    for _ in range(20):
        machine.step()
    if with_prompt:
        prompt = driver.add(a_sequence([i % 250 for i in range(4000)], max_tokens=1))
    found, since = [], dict.fromkeys((stream.number for stream in streams), 0.0)
    for _ in range(600 if with_prompt else 100):
        ms, counts = machine.step()
        for number in since:
            since[number] += ms
            if number in counts:
                found.append(since[number])
                since[number] = 0.0
        if with_prompt and prompt.num_new:
            return found
    assert not with_prompt, "the prompt is computed meanwhile"
    return found


def p95(values):
    return sorted(values)[int(0.95 * len(values))]


@pytest.mark.parametrize("seed", range(2))
def test_a_long_prompt_less_than_doubles_the_intervals_of_those_who_decode(seed):
    quiet = p95(intervals(Machine(seed), with_prompt=False))
    disturbed = p95(intervals(Machine(seed), with_prompt=True))
    assert disturbed < 2 * quiet
    without = p95(intervals(Machine(seed, itl_stretch=0), with_prompt=True))
    assert without > 5 * quiet, "for contrast: a whole step of prefill"


def test_no_chunk_of_a_long_prompt_is_a_whole_step_not_even_its_last():
    machine = Machine(2)
    driver = machine.driver
    for number in range(4):
        driver.add(a_sequence([number] * 4, max_tokens=900))
    for _ in range(20):
        machine.step()
    long = driver.add(a_sequence([i % 250 for i in range(2000)], max_tokens=2))
    chunks = []
    while not long.num_new:
        chunks.append(machine.step()[1].get(long.number, 0))
    assert sum(chunks) == 2000
    assert all(0 < chunk < 200 for chunk in chunks)
    while driver.scheduler.has_work:
        machine.step()
    assert_right_outputs(driver, 5)


def test_many_that_arrive_at_once_are_soon_all_at_work():
    machine = Machine(3)
    for number in range(16):
        machine.driver.add(a_sequence([number] * 100, max_tokens=300))
    steps = 0
    while len({number for number, count in machine.step()[1].items() if count == 1}) < 16:
        steps += 1
    assert steps < 100  # as few as 4 without a bound, and 130 if each step bore the same


def test_a_prompt_that_fits_a_step_is_over_in_one_whatever_decodes_beside_it_and_a_long_one():
    machine = Machine(2)
    driver = machine.driver
    for number in range(4):
        driver.add(a_sequence([number] * 4, max_tokens=900))
    for _ in range(20):
        machine.step()
    long = driver.add(a_sequence([i % 250 for i in range(6000)], max_tokens=1))
    for _ in range(10):
        machine.step()
    short = driver.add(a_sequence([9] * 100, max_tokens=1))
    step = machine.step()[1]
    assert step[short.number] == 100
    assert 0 < step[long.number] < 100
    driver.scheduler.preempt(long)
    assert machine.step()[1][long.number] < 200


def test_a_target_bounds_what_a_short_prompt_takes_too():
    machine = Machine(2, itl_target_ms=25.0)
    driver = machine.driver
    for number in range(4):
        driver.add(a_sequence([number] * 4, max_tokens=900))
    for _ in range(20):
        machine.step()
    driver.add(a_sequence([8] * 20, max_tokens=1))
    machine.step()  # what a token of prefill takes is measured now
    short = driver.add(a_sequence([9] * 400, max_tokens=1))
    assert 0 < machine.step()[1][short.number] < 400


def test_when_the_machine_slows_prefill_shrinks_and_when_it_recovers_so_does_prefill():
    machine = Machine(1)
    machine.token_ms = 0.2
    driver = machine.driver
    driver.add(a_sequence([1] * 4, max_tokens=900))
    for _ in range(10):
        machine.step()
    prompt = driver.add(a_sequence([i % 250 for i in range(6000)], max_tokens=1))

    def chunk(steps):
        return [machine.step()[1][prompt.number] for _ in range(steps)][-1]

    fast = chunk(40)
    machine.token_ms = 1.0
    slow = chunk(5)
    machine.token_ms = 0.2
    assert slow < fast / 2
    assert chunk(40) >= 0.8 * fast
    while driver.scheduler.has_work:
        machine.step()
    assert_right_outputs(driver, 2)
