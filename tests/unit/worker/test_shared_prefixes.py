"""Requests that share a prefix which nobody has computed yet: it is computed once."""

import pytest

from tests.support.engine_requests import a_sequence
from tests.support.scheduler_driver import Driver, assert_right_outputs
from worker.sequence import State, Wait

PROMPT = range(1, 31)


@pytest.mark.parametrize("chunk", [8, 32, 512])
@pytest.mark.parametrize("length", [29, 30, 32])
def test_eight_equal_prompts_feed_one_prompt_and_eight_tails(chunk, length):
    driver = Driver(kv_blocks=100, max_batched_tokens=chunk)
    for _ in range(8):
        driver.add(a_sequence(range(1, length + 1), max_tokens=3))
    driver.run()
    assert_right_outputs(driver, 8)
    tail = length - (length - 1) // 4 * 4
    assert driver.runner.num_fed == length + 7 * tail + 8 * 2


def test_who_shares_only_a_part_waits_for_that_part_alone():
    driver = Driver(kv_blocks=100, max_batched_tokens=8)
    driver.add(a_sequence(range(1, 60), max_tokens=2))
    driver.step()
    other = driver.add(a_sequence([*range(1, 17), *range(200, 220)], max_tokens=2))
    driver.step()
    assert (other.state, other.wait) == (State.WAITING, Wait.PREFIX)
    driver.step()
    assert other.state is State.RUNNING
    assert other.cached_tokens == 16
    driver.run()
    assert_right_outputs(driver, 2)


def test_another_root_or_other_tokens_wait_for_nobody():
    driver = Driver(kv_blocks=100, max_batched_tokens=200)
    driver.add(a_sequence(PROMPT, max_tokens=2))
    others = [
        driver.add(a_sequence(PROMPT, max_tokens=2, salt=b"other")),
        driver.add(a_sequence([*range(1, 4), 99, *range(5, 31)], max_tokens=2)),
        driver.add(a_sequence(range(1, 4), max_tokens=2)),  # no full block
    ]
    driver.step()
    assert {sequence.state for sequence in others} == {State.RUNNING}


def test_the_same_block_after_another_beginning_is_not_the_same():
    driver = Driver(kv_blocks=100, max_batched_tokens=8)
    driver.add(a_sequence([1, 2, 3, 4], max_tokens=1))
    driver.run()
    driver.add(a_sequence([9, 9, 9, 9, 5, 6, 7, 8, 5, 6, 7, 8], max_tokens=2))
    driver.step()
    other = driver.add(a_sequence([1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=2))
    driver.step()
    assert other.state is State.RUNNING


def test_who_is_of_a_higher_class_waits_for_nobody_below():
    driver = Driver(kv_blocks=100, max_batched_tokens=8)
    driver.add(a_sequence(PROMPT, max_tokens=2, service_class="batch"))
    driver.step()
    urgent = driver.add(a_sequence(PROMPT, max_tokens=2, service_class="interactive"))
    driver.step()
    assert urgent.state is State.RUNNING
    driver.run()
    assert_right_outputs(driver, 2)


def test_the_first_is_aborted_and_the_next_one_computes():
    driver = Driver(kv_blocks=100, max_batched_tokens=8)
    first = driver.add(a_sequence(PROMPT, max_tokens=2))
    others = [driver.add(a_sequence(PROMPT, max_tokens=2)) for _ in range(3)]
    driver.step()
    driver.scheduler.end(first.request)
    driver.step()
    assert [sequence.state for sequence in others] == [State.RUNNING, *[State.WAITING] * 2]
    driver.run()
    assert_right_outputs(driver, 3)
    assert driver.runner.num_fed == 30 + 2 * 2 + 3 * 1


def test_the_wait_has_an_end():
    driver = Driver(kv_blocks=200, max_batched_tokens=2, max_sequences=2, patience_steps=5)
    slow = driver.add(a_sequence(range(1, 200), max_tokens=2))
    driver.step()
    patient = driver.add(a_sequence(range(1, 200), max_tokens=2))
    for _ in range(6):
        assert patient.state is State.WAITING
        driver.step()
    assert (slow.state, patient.state) == (State.RUNNING, State.RUNNING)
    driver.run()
    assert_right_outputs(driver, 2)


def test_a_block_that_an_answer_is_about_to_fill_is_waited_for_too():
    driver = Driver(kv_blocks=100)
    first = driver.add(a_sequence([1, 2, 3], max_tokens=9))
    driver.step()
    known = list(first.tokens)
    assert len(known) == 4
    other = driver.add(a_sequence([*known, 50], max_tokens=2))
    driver.step()
    assert other.wait is Wait.PREFIX
    driver.step()
    assert other.cached_tokens == 4
    driver.run()
    assert_right_outputs(driver, 2)
