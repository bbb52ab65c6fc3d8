"""Bugs of peers' schedulers and block managers, each with its small input, run on ours."""

import random

import pytest

from tests.support.engine_requests import a_sequence
from tests.support.scheduler_driver import Driver, assert_right_output, assert_right_outputs
from worker.admission import SchedulerConfig, refuse
from worker.sequence import State, Wait


def test_an_aborted_requests_kv_is_not_hit_beyond_what_was_computed():
    # sglang 28374: KV of an aborted request went into the radix cache.
    for aborted_after in range(6):
        driver = Driver(max_batched_tokens=4, max_sequences=4, kv_blocks=32)
        aborted = driver.add(a_sequence(range(1, 20)))
        for _ in range(aborted_after):
            driver.step()
        driver.scheduler.schedule()
        driver.scheduler.end(aborted.request)
        for block in range(32):  # what nobody computed is nothing
            for offset in range(4):
                driver.runner.kv.setdefault((block, offset), -9)
        again = driver.add(a_sequence(range(1, 20)))
        driver.run()
        assert again.cached_tokens == min(16, aborted_after * 4)
        assert_right_outputs(driver, 1)


def test_two_equal_prompts_in_one_batch_keep_the_pages_that_their_tables_name():
    # mini-sglang 142: duplicate prefix pages were freed while a page table pointed to them.
    driver = Driver(kv_blocks=40, max_batched_tokens=128, patience_steps=0)
    prompt = range(1, 65)
    two = [a_sequence(prompt, max_tokens=40) for _ in range(2)]
    for sequence in two:
        sequence.overdue = True  # waits for nobody: both are computed in one step
        driver.add(sequence)
    driver.step()
    assert not set(two[0].blocks) & set(two[1].blocks)
    driver.scheduler.end(two[0].request)
    driver.add(a_sequence([9] * 40, max_tokens=30))
    driver.run()
    assert_right_outputs(driver, 2)


def test_a_prompt_larger_than_the_pool_is_refused_with_the_arithmetic_and_the_next_one_runs():
    # vllm 35541, 39734: 1,002 tokens for 50 blocks of 16 hung, and all behind it; usage said 0.
    config = SchedulerConfig(kv_blocks=50, context_tokens=2000, block_tokens=16)
    nack = refuse(config, [a_sequence([1] * 1002, context_tokens=2000)], 0)
    assert (nack.reason, nack.fits_never) == ("fits_never", True)
    assert nack.detail == "1009 positions in blocks of 16 take 64 blocks of 50"
    driver = Driver(kv_blocks=50, block_tokens=16)
    driver.add(a_sequence([1] * 700, max_tokens=8))
    driver.run()
    assert_right_outputs(driver, 1)


def test_every_block_of_the_pool_can_be_used():
    # vllm 39734: a reserved block made the last one unreachable.
    driver = Driver(kv_blocks=5, block_tokens=16, headroom_share=0)
    driver.add(a_sequence([1] * 79, max_tokens=2))
    driver.run()
    assert_right_outputs(driver, 1)


def test_a_full_context_and_a_full_waiting_list_say_by_how_much():
    config = SchedulerConfig(kv_blocks=50, context_tokens=20, block_tokens=4, max_batched_tokens=32)
    nack = refuse(config, [a_sequence([1] * 20, context_tokens=20)], 0)
    assert nack.detail == "20 tokens leave none of 20 for an answer"
    nack = refuse(config, [a_sequence([1] * 10, context_tokens=20)], 30)
    assert (nack.reason, nack.detail) == ("full", "30 tokens wait and 10 came, of 32")


@pytest.mark.parametrize("host_blocks", [0, 6])
def test_pool_pressure_from_all_sides_never_stops_progress(host_blocks):
    # vllm 45388, vllm-ascend 16315: deadlock, or preemptions without end, when blocks were
    # freed late or held by parked loads.
    driver = Driver(
        kv_blocks=10, host_blocks=host_blocks, expected_share=0, headroom_share=0,
        copy_block_ms=1e-6,
    )  # fmt: skip
    for number in range(12):
        driver.add(a_sequence([number] * (3 + number % 5), max_tokens=20))
    # Alone they would take 240 steps; preempted work is redone, but not without end.
    driver.run(steps_max=1000)
    assert driver.scheduler.num_preemptions > 0
    assert_right_outputs(driver, 12)


@pytest.mark.parametrize("seed", range(20))
def test_random_priorities_in_a_tiny_pool_do_not_trip_over_victims_of_the_same_step(seed):
    # vllm 23347, 49097: a victim that the step already held killed the server.
    dice = random.Random(seed)
    driver = Driver(
        kv_blocks=6, host_blocks=dice.choice([0, 4]), max_batched_tokens=8, max_sequences=4,
        expected_share=0, headroom_share=0, copy_block_ms=1e-6,
    )  # fmt: skip
    added = 0
    for _ in range(200):
        if len(driver.scheduler.waiting) < 3:
            service_class = dice.choice(["interactive", "standard", "batch"])
            prompt = [dice.randrange(3) for _ in range(dice.randint(1, 12))]
            driver.add(a_sequence(prompt, max_tokens=9, service_class=service_class))
            added += 1
        driver.step()
        assert driver.scheduler.problems() == []
    driver.run()
    assert_right_outputs(driver, added)


def test_an_eight_bit_hash_changes_no_output():
    # GHSA-rm76-4mrf-v9r8: a chosen collision lent another user's KV.
    driver = Driver(
        hash_block=lambda message: bytes([sum(message) & 255]), kv_blocks=24, host_blocks=24,
        copy_block_ms=1e-6,
    )  # fmt: skip
    dice = random.Random(1)
    for number in range(60):
        prompt = [dice.randrange(4) for _ in range(dice.randint(1, 30))]
        driver.add(a_sequence(prompt, salt=bytes([number % 2])))
    driver.run()
    assert_right_outputs(driver, 60)


def test_a_tenant_finds_nothing_of_another_one_in_either_memory():
    # CVE-2025-46570: the time to the first token told of another tenant's prompts.
    driver = Driver(kv_blocks=8, host_blocks=20, copy_block_ms=1e-6)
    for prompt in (range(1, 21), range(50, 75)):
        driver.add(a_sequence(prompt, salt=b"a", max_tokens=1))
        driver.run()
    other = driver.add(a_sequence(range(1, 21), salt=b"b", max_tokens=1))
    driver.run()
    own = driver.add(a_sequence(range(1, 21), salt=b"a", max_tokens=1))
    driver.run()
    assert (other.cached_tokens, own.cached_tokens) == (0, 16)


def test_a_tenant_does_not_wait_for_the_prefill_of_another_one_either():
    # CVE-2025-46570, by the way round: a wait tells as much as a hit.
    driver = Driver(kv_blocks=64, max_batched_tokens=8)
    driver.add(a_sequence(range(1, 41), salt=b"a"))
    driver.step()
    other = driver.add(a_sequence(range(1, 41), salt=b"b"))
    driver.step()
    assert other.state is State.RUNNING


@pytest.mark.parametrize("flush_after", range(8))
def test_a_flush_with_live_requests_disturbs_nobody(flush_after):
    # sglang 12107: it crashed.
    driver = Driver(kv_blocks=24, host_blocks=8, max_batched_tokens=8, copy_block_ms=1e-6)
    for number in range(4):
        driver.add(a_sequence([1, 2, 3, 4, 5, 6, 7, 8, number], max_tokens=9))
    for _ in range(flush_after):
        driver.step()
    plan = driver.scheduler.schedule()
    driver.scheduler.pool.flush()
    assert driver.scheduler.problems() == []
    for sequence, _ in driver.scheduler.complete(plan, driver.runner.execute(plan)):
        assert sequence.num_tokens < sequence.final_tokens
    driver.run()
    assert driver.scheduler.pool.problems([]) == []
    assert_right_outputs(driver, 4)


def test_a_huge_prompt_at_the_head_of_the_line_holds_up_no_small_ones():
    driver = Driver(kv_blocks=300, max_batched_tokens=16, max_sequences=8)
    huge = driver.add(a_sequence([i % 250 for i in range(1000)], max_tokens=2))
    driver.step()
    for number in range(10):
        small = driver.add(a_sequence([number, 1, 2], max_tokens=2))
        first, second = driver.step(), driver.step()
        assert first[small.number] == 3, "its prompt goes into the very next step"
        assert second[small.number] == 1
        assert min(first[huge.number], second[huge.number]) >= 8, "and the huge one goes on"
        assert small.state is State.ENDED
    driver.run()
    assert_right_outputs(driver, 11)


def test_a_huge_prompt_that_does_not_fit_yet_is_passed_and_then_served():
    driver = Driver(kv_blocks=20, max_batched_tokens=16, patience_steps=15, expected_share=1)
    driver.add(a_sequence([1] * 8, max_tokens=30))
    driver.step()
    huge = driver.add(a_sequence([2] * 60, max_tokens=2))
    small = driver.add(a_sequence([3] * 4, max_tokens=3))
    driver.step()
    assert (huge.wait, small.state) == (Wait.BLOCKS, State.RUNNING)
    driver.run()
    assert_right_output(huge)


def test_each_wait_has_its_reason():
    driver = Driver(kv_blocks=32, max_batched_tokens=8, max_sequences=3, patience_steps=2)
    driver.add(a_sequence(range(1, 30), max_tokens=20))
    driver.step()
    same = driver.add(a_sequence(range(1, 30), max_tokens=20))
    driver.step()
    assert same.wait is Wait.PREFIX
    others = [driver.add(a_sequence([50 + i] * 8, max_tokens=20)) for i in range(3)]
    driver.step()
    assert [sequence.wait for sequence in others[1:]] == [Wait.TOKENS] * 2
    for _ in range(4):
        driver.step()
    assert {sequence.wait for sequence in driver.scheduler.waiting} == {Wait.SLOTS, Wait.ORDER}
    assert driver.scheduler.waits[Wait.SLOTS] == 1
    driver.scheduler.preempt(driver.scheduler.running[-1])
    assert driver.scheduler.waits[Wait.ORDER] >= 1
    driver.run()
    assert_right_outputs(driver, 5)
