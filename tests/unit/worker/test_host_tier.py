"""The second tier: what is evicted or preempted goes to host memory, and comes back when hit."""

import pytest

from tests.support.engine_requests import a_sequence
from tests.support.scheduler_driver import Driver, assert_right_output, assert_right_outputs
from worker.sequence import State

SWAPS = {"copy_block_ms": 1e-6}
RECOMPUTES = {"copy_block_ms": 1e6}


def swapped_out(driver, *, computed=9, **kwargs):
    """A sequence that was swapped out after so many positions."""
    sequence = driver.add(a_sequence(range(1, computed + 1), **({"max_tokens": 8} | kwargs)))
    driver.step()
    assert sequence.num_computed == computed
    driver.scheduler.preempt(sequence)
    assert sequence.stowed is not None
    return sequence


def test_an_evicted_prefix_is_found_in_host_memory_and_moved_in():
    driver = Driver(kv_blocks=6, host_blocks=8, **SWAPS)
    first = driver.add(a_sequence(range(1, 14), max_tokens=4))
    driver.run()
    driver.add(a_sequence(range(100, 120), max_tokens=3))
    driver.run()  # takes the whole pool
    again = driver.add(a_sequence(range(1, 14), max_tokens=4))
    plan = driver.scheduler.schedule()
    assert len(plan.moves_in) == 3
    assert again.cached_tokens == 12
    assert len(plan.rows[0].token_ids) == 1
    driver.scheduler.complete(plan, driver.runner.execute(plan))
    driver.run()
    assert again.tokens == first.tokens
    assert_right_outputs(driver, 3)


def test_without_host_blocks_what_is_evicted_is_gone():
    driver = Driver(kv_blocks=6, host_blocks=0, **SWAPS)
    for prompt in (range(1, 14), range(100, 120), range(1, 14)):
        sequence = driver.add(a_sequence(prompt, max_tokens=3))
        driver.run()
    assert sequence.cached_tokens == 0
    assert driver.runner.num_moved == 0


def test_what_is_not_worth_the_move_is_not_moved():
    driver = Driver(kv_blocks=6, host_blocks=8, **RECOMPUTES)
    for prompt in (range(1, 14), range(100, 120), range(1, 14)):
        driver.add(a_sequence(prompt, max_tokens=3))
        driver.run()
    assert driver.runner.num_moved == 0


def test_host_memory_keeps_the_heads_of_prefixes_and_the_latest():
    driver = Driver(kv_blocks=6, host_blocks=4, **SWAPS)
    for start in (0, 50, 100):
        driver.add(a_sequence(range(start, start + 21), max_tokens=1))  # 6 blocks, 5 of them full
        driver.run()
    pool = driver.scheduler.pool
    chains = {s: pool.chain(driver.done[0].root, list(range(s, s + 21))) for s in (0, 50, 100)}
    found = {start: pool.match(chain, 20) for start, chain in chains.items()}
    assert [len(found[start]) for start in (0, 50, 100)] == [0, 4, 5]
    assert not any(content.device for content in found[50])


def test_a_second_eviction_of_what_host_memory_has_moves_nothing():
    driver = Driver(kv_blocks=6, host_blocks=20, **SWAPS)
    for _ in range(3):
        for start in (0, 50):
            driver.add(a_sequence(range(start, start + 21), max_tokens=1))
            driver.run()
    moved = driver.runner.num_moved
    assert moved == 2 * 5 + 4 * 5  # each prefix out once, and in again four times
    assert_right_outputs(driver, 6)


def test_more_evictions_in_one_step_than_host_blocks_keep_the_last():
    driver = Driver(kv_blocks=8, host_blocks=2, max_batched_tokens=32, **SWAPS)
    driver.add(a_sequence(range(29), max_tokens=1))
    driver.run()
    large = driver.add(a_sequence(range(100, 129), max_tokens=1))
    plan = driver.scheduler.schedule()
    assert len(plan.moves_out) == 2
    driver.scheduler.complete(plan, driver.runner.execute(plan))
    driver.scheduler.end(large.request)
    driver.add(a_sequence(range(29), max_tokens=3))
    driver.run()
    assert_right_outputs(driver, 2)


def test_swapped_out_a_sequence_goes_on_where_it_was():
    driver = Driver(kv_blocks=16, host_blocks=8, **SWAPS)
    sequence = swapped_out(driver, computed=10)
    fed = driver.runner.num_fed
    assert driver.step()[sequence.number] == 1
    assert driver.runner.num_fed == fed + 1
    assert (sequence.stowed, driver.scheduler.num_swaps) == (None, 1)
    driver.run()
    assert_right_outputs(driver, 1)


@pytest.mark.parametrize("computed", [1, 3, 4, 5, 8, 9, 16])
@pytest.mark.parametrize("taken", [False, True])
def test_swapped_in_from_any_position_an_answer_is_right(computed, taken):
    driver = Driver(kv_blocks=16, host_blocks=8, **SWAPS)
    sequence = swapped_out(driver, computed=computed)
    if taken:  # everything that it left on the device
        other = driver.add(a_sequence(range(100, 160), max_tokens=1, service_class="interactive"))
        while other.state is not State.ENDED:
            driver.step()
    driver.run()
    assert_right_output(sequence)


def test_a_sequence_is_computed_again_where_that_is_cheaper_or_host_memory_is_full():
    for config in (RECOMPUTES | {"host_blocks": 8}, SWAPS | {"host_blocks": 1}):
        driver = Driver(kv_blocks=16, **config)
        sequence = driver.add(a_sequence(range(1, 11), max_tokens=5))
        driver.step()
        driver.scheduler.preempt(sequence)
        assert (sequence.stowed, driver.scheduler.num_swaps) == (None, 0)
        driver.run()
        assert_right_outputs(driver, 1)


def test_what_others_hold_is_counted_for_neither():
    driver = Driver(kv_blocks=32, host_blocks=16, **SWAPS)
    shared = range(1, 9)
    driver.add(a_sequence([*shared, 50, 51], max_tokens=9))
    driver.step()
    second = driver.add(a_sequence([*shared, 60, 61, 62], max_tokens=9))
    driver.step()
    leaving = driver.scheduler._tables.leaving(second)
    assert (leaving.blocks_out, leaving.blocks_in, leaving.tokens) == (1, 1, 3)
    driver.scheduler.preempt(second)
    assert (len(second.stowed.blocks), len(second.stowed.tail)) == (0, 1)
    driver.run()
    assert_right_outputs(driver, 2)


def test_what_host_memory_has_already_is_not_moved_again():
    driver = Driver(kv_blocks=16, host_blocks=8, **SWAPS)
    sequence = swapped_out(driver, computed=8)
    driver.step()
    driver.step()
    leaving = driver.scheduler._tables.leaving(sequence)
    assert (leaving.blocks_out, leaving.blocks_in, leaving.tokens) == (1, 3, 10)


def test_a_sequence_without_kv_or_after_a_flush_is_not_swapped():
    driver = Driver(kv_blocks=16, host_blocks=8, max_batched_tokens=8, **SWAPS)
    sequence = driver.add(a_sequence(range(1, 10), max_tokens=9))
    driver.step()
    driver.scheduler.pool.flush()
    assert driver.scheduler._tables.leaving(sequence) is None
    driver.scheduler.preempt(sequence)
    plan = driver.scheduler.schedule()
    assert driver.scheduler._tables.leaving(sequence) is None  # nothing is computed yet
    driver.scheduler.complete(plan, driver.runner.execute(plan))
    driver.run()
    assert_right_outputs(driver, 1)


def test_flushed_while_it_is_swapped_out_a_sequence_is_computed_again():
    driver = Driver(kv_blocks=16, host_blocks=8, **SWAPS)
    sequence = swapped_out(driver, computed=10)
    driver.scheduler.pool.flush()
    assert driver.scheduler.problems() == []
    assert driver.step()[sequence.number] == 10 + 1
    driver.run()
    assert_right_outputs(driver, 1)


def test_an_undone_copy_is_stowed_from_its_source():
    driver = Driver(kv_blocks=6, host_blocks=8, expected_share=0, headroom_share=0, **SWAPS)
    choices = [
        a_sequence(range(1, 7), request="two", choice=i, temperature=1.0, max_tokens=6,
                   service_class="batch")
        for i in range(2)
    ]  # fmt: skip
    driver.add(*choices)
    driver.step()
    driver.add(a_sequence(range(30, 50), max_tokens=3, service_class="interactive"))
    plan = driver.scheduler.schedule()  # begins the copy, then takes the choices' blocks
    assert plan.copies == ()
    assert driver.scheduler.num_swaps == 2
    driver.scheduler.complete(plan, driver.runner.execute(plan))
    driver.run()
    assert_right_outputs(driver, 3)


def test_admitted_in_the_step_that_moves_it_out_a_sequence_is_copied_on_the_device():
    driver = Driver(kv_blocks=16, host_blocks=8, **SWAPS)
    sequence = swapped_out(driver, computed=10)
    plan = driver.scheduler.schedule()
    assert (len(plan.moves_out), len(plan.moves_in), len(plan.copies)) == (3, 0, 1)
    for drawn, _ in driver.scheduler.complete(plan, driver.runner.execute(plan)):
        assert drawn is sequence
    driver.run()
    assert_right_outputs(driver, 1)


@pytest.mark.parametrize("steps_before", range(3))
def test_aborted_in_any_state_a_swapped_sequence_leaves_nothing(steps_before):
    # vllm 46283, vllm-ascend 16662: blocks of a request that waited for offloaded KV were
    # never freed.
    driver = Driver(kv_blocks=16, host_blocks=8, max_sequences=1, **SWAPS)
    sequence = swapped_out(driver)
    if steps_before == 1:
        driver.scheduler.schedule()  # moved in, and not yet computed
    if steps_before == 2:
        driver.step()
        assert sequence.stowed is None
    driver.scheduler.end(sequence.request)
    driver.assert_idle()


def test_five_hundred_aborts_in_random_states_leave_every_block_free():
    # vllm 46283: 500 requests aborted at random, some in the middle of being moved in.
    driver = Driver(kv_blocks=12, host_blocks=10, expected_share=0, headroom_share=0, **SWAPS)
    live = []
    for number in range(500):
        live.append(driver.add(a_sequence([number % 7] * (1 + number % 19), max_tokens=9)))
        if number % 3:
            driver.step()
        if driver.scheduler.running and number % 5 == 0:
            driver.scheduler.preempt(driver.scheduler.running[number % 2 - 1])
        driver.scheduler.end(live[number * 7 % len(live)].request)
        if number % 2:
            driver.scheduler.end(live[number // 2].request)
        assert driver.scheduler.problems() == []
    assert driver.scheduler.num_swaps > 20
    for sequence in live:
        driver.scheduler.end(sequence.request)
    driver.assert_idle()


def test_what_a_failed_step_was_to_move_is_not_found():
    driver = Driver(kv_blocks=6, host_blocks=8, **SWAPS)
    driver.add(a_sequence(range(1, 14), max_tokens=1))
    driver.run()
    evicting = driver.add(a_sequence(range(100, 116), max_tokens=8))
    plan = driver.scheduler.schedule()
    assert plan.moves_out
    driver.scheduler.failed(plan)  # and the runner moved nothing
    driver.scheduler.end(evicting.request)
    again = driver.add(a_sequence(range(1, 14), max_tokens=4))
    driver.run()
    assert again.cached_tokens < 12
    assert_right_outputs(driver, 2)


def test_a_tail_that_a_failed_step_was_to_move_is_computed_again():
    driver = Driver(kv_blocks=16, host_blocks=8, max_sequences=1, **SWAPS)
    sequence = swapped_out(driver, computed=6, service_class="batch")
    urgent = driver.add(a_sequence([200, 201], max_tokens=3, service_class="interactive"))
    plan = driver.scheduler.schedule()
    assert [row.sequence for row in plan.rows] == [urgent.number]
    assert len(plan.moves_out) == 2
    driver.scheduler.failed(plan)
    driver.scheduler.end(urgent.request)
    assert sequence.stowed is None
    driver.run()
    assert_right_outputs(driver, 1)


def test_a_tail_that_moved_in_an_earlier_step_outlives_a_failed_one():
    driver = Driver(kv_blocks=16, host_blocks=8, max_sequences=1, **SWAPS)
    sequence = swapped_out(driver, computed=6, service_class="batch")
    urgent = driver.add(a_sequence([200, 201], max_tokens=3, service_class="interactive"))
    driver.step()
    driver.scheduler.failed(driver.scheduler.schedule())
    driver.scheduler.end(urgent.request)
    assert sequence.stowed is not None
    fed = driver.runner.num_fed
    driver.step()
    assert driver.runner.num_fed == fed + 1
    driver.run()
    assert_right_outputs(driver, 1)
