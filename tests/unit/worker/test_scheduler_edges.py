"""Scheduler and blocks at the exact places where one more or one less decides."""

import pytest

from core.protocol import CacheMark
from tests.support.engine_requests import a_sequence
from tests.support.scheduler_driver import Driver, assert_right_outputs
from worker.blocks import BlockPool
from worker.sequence import TTL_MS, State, Wait
from worker.step import Row, StepPlan
from worker.tier import Tier

FIVE = TTL_MS["5m"]


def displacing(prompt_tokens, *, max_tokens=1):
    """An interactive and a batch sequence run, of 2 blocks each; then a standard one comes.

    The batch one is expected to take 2 more. Of the 8 blocks 4 are free: the standard one lacks
    its own blocks less 2, and displacing the batch one gains 4.
    """
    driver = Driver(kv_blocks=8, expected_share=1, headroom_share=0, max_batched_tokens=32)
    driver.add(a_sequence([1] * 4, max_tokens=5, service_class="interactive"))
    batch = driver.add(a_sequence([2] * 4, max_tokens=13, service_class="batch"))
    driver.step()
    standard = driver.add(a_sequence([3] * prompt_tokens, max_tokens=max_tokens))
    driver.step()
    return driver, batch, standard


@pytest.mark.parametrize(("prompt_tokens", "displaced"), [(8, False), (20, True), (24, True)])
def test_a_lower_class_is_displaced_to_the_last_block_that_it_gains(prompt_tokens, displaced):
    driver, batch, standard = displacing(prompt_tokens)
    assert (batch.state is State.WAITING) == displaced
    assert standard.state is not State.WAITING
    driver.run()
    assert_right_outputs(driver, 3)


def test_and_not_for_one_block_more():
    driver, batch, standard = displacing(25)
    assert (batch.state, standard.state) == (State.RUNNING, State.WAITING)
    assert standard.wait is Wait.BLOCKS
    assert driver.scheduler.num_preemptions == 0
    driver.run()
    assert_right_outputs(driver, 3)


def test_all_of_a_lower_class_make_way_for_one_that_can_only_run_alone():
    driver = Driver(kv_blocks=8, expected_share=1, headroom_share=0.9, max_batched_tokens=32)
    batch = driver.add(a_sequence([2] * 4, max_tokens=4, service_class="batch"))
    driver.step()
    urgent = driver.add(a_sequence([3] * 28, max_tokens=4, service_class="interactive"))
    driver.step()
    assert (batch.state, urgent.state) == (State.WAITING, State.RUNNING)
    driver.run()
    assert_right_outputs(driver, 2)


def test_a_preempted_sequence_waits_because_of_the_order_and_has_no_slot():
    driver = Driver()
    sequence = driver.add(a_sequence())
    driver.step()
    driver.scheduler.preempt(sequence)
    assert (sequence.wait, sequence.slot) == (Wait.ORDER, -1)


def test_a_deadline_at_the_first_millisecond_is_one():
    driver = Driver()
    driver.add(a_sequence(request="first", deadline_ms=1))
    driver.add(a_sequence(request="never", deadline_ms=0))
    assert driver.scheduler.expired(1) == {"first"}


def test_preemptions_never_raise_the_expected_share_above_all():
    driver = Driver(expected_share=0.9)
    for _ in range(3):
        driver.scheduler.forecast.preempted()
    assert driver.scheduler.forecast.share == 1


def test_a_step_is_observed_with_its_decodes_its_prefill_and_its_moves():
    driver = Driver()
    pace = driver.scheduler.pace

    def plan(*sizes, out=0, into=0):
        rows = [
            Row(sequence=i, token_ids=(1,) * size, start=0, blocks=(), draw=None)
            for i, size in enumerate(sizes)
        ]
        moves = [tuple((block, block) for block in range(number)) for number in (out, into)]
        return StepPlan(rows=tuple(rows), moves_out=moves[0], moves_in=moves[1])

    driver.scheduler.observed(plan(1, 1), 10.0)
    assert pace.decode_ms(2) == 10
    driver.scheduler.observed(plan(1, 1, 4, 6), 30.0)
    assert pace.token_ms == 2
    driver.scheduler.observed(plan(1, 1, out=2, into=1), 25.0)
    assert pace.copy_block_ms == 5


def test_prefill_by_itself_is_measured_against_one_decode():
    pace = Driver().scheduler.pace
    pace.observed(10.0, decode_rows=1, prefill_tokens=0)
    pace.observed(50.0, decode_rows=2, prefill_tokens=0)
    pace.observed(14.0, decode_rows=0, prefill_tokens=4)
    assert pace.token_ms == 1


def test_a_sequence_is_stowed_where_it_just_fits():
    for host_blocks, swaps in ((3, 1), (2, 0)):
        driver = Driver(host_blocks=host_blocks, copy_block_ms=1e-6)
        sequence = driver.add(a_sequence(range(1, 11)))
        driver.step()
        driver.scheduler.preempt(sequence)
        assert driver.scheduler.num_swaps == swaps


def test_what_a_failed_step_was_to_move_in_is_not_found_on_the_device():
    driver = Driver(kv_blocks=6, host_blocks=8, copy_block_ms=1e-6)
    for prompt in (range(1, 14), range(100, 121)):
        driver.add(a_sequence(prompt, max_tokens=1))
        driver.run()
    failing = driver.add(a_sequence(range(1, 14), max_tokens=4))
    plan = driver.scheduler.schedule()
    assert plan.moves_in
    driver.scheduler.failed(plan)
    driver.scheduler.end(failing.request)
    again = driver.add(a_sequence(range(1, 14), max_tokens=4))
    plan = driver.scheduler.schedule()
    assert len(plan.moves_in) == 3, "host memory still has it, the device never had"
    driver.scheduler.complete(plan, driver.runner.execute(plan))
    driver.run()
    assert again.cached_tokens == 12
    assert_right_outputs(driver, 3)


# Tiers.


def a_tier(*ttls_ms, marked_max=9):
    """Blocks without a holder, in this order, each with a content that is kept so long."""
    tier = Tier(len(ttls_ms), marked_max)
    pool = BlockPool(1, 1)
    for number, ttl_ms in enumerate(ttls_ms):
        block, _ = tier.take()
        content = pool._published.find_or_add(pool.chain(b"root", [number]), 0, None)
        content.ttl_ms = ttl_ms
        tier.contents[block] = content
        tier.release([block])
    return tier


def evicted(tier):
    return [tier.take()[0] for _ in range(tier.num_available)]


def test_a_touched_block_is_the_last_of_its_class():
    tier = a_tier(0, 0, 0)
    tier.touch(0)
    assert evicted(tier) == [1, 2, 0]


def test_a_touched_block_moves_to_the_class_that_its_content_has_now():
    tier = a_tier(0, 0, 0)
    tier.contents[0].ttl_ms = FIVE
    tier.touch(0)
    assert tier.num_marked == 1
    assert evicted(tier) == [1, 2, 0]


def test_what_is_past_its_time_goes_by_its_last_use_whatever_its_number():
    tier = a_tier(0, FIVE)
    tier.touch(0)
    tier.advance(FIVE)
    assert tier.num_marked == 0
    assert evicted(tier) == [1, 0]
    tier = a_tier(FIVE, 0)
    tier.touch(0)
    tier.advance(FIVE)
    assert evicted(tier) == [1, 0]


def test_a_held_or_empty_block_is_touched_in_vain():
    tier = a_tier(0, 0)
    tier.hold(0)
    tier.touch(0)
    assert (tier.num_available, tier.refs) == (1, [1, 0])
    tier.take()
    tier.touch(1)
    assert tier.num_available == 0


def test_an_unmarked_content_takes_no_block_that_a_mark_keeps():
    tier = a_tier(FIVE, FIVE, 0, marked_max=2)
    assert (tier.num_takeable(0), tier.num_takeable(FIVE)) == (1, 3)
    tier = a_tier(FIVE, FIVE, 0, marked_max=1)
    assert (tier.num_takeable(0), tier.num_takeable(FIVE)) == (2, 3)


def test_a_tiers_problems_are_told():
    tier = a_tier(0, FIVE)
    assert tier.problems([]) == []
    tier._orders[0].clear()
    assert tier.problems([]) == [
        "block 0: cached 0 times, 0 references",
        "block 0: cached in no order",
    ]


def test_a_marked_content_takes_the_host_block_of_another_marked_one():
    pool = BlockPool(1, 1, host_blocks=2, marked_share=1)
    chains = [pool.chain(b"root", [number]) for number in range(4)]
    for chain in chains:
        block = pool.take(1)
        pool.publish(chain, block, range(1))
        pool.mark(block[0], FIVE)
        pool.release(block)
    assert [len(pool.match(chain, 1)) for chain in chains] == [0, 1, 1, 1]


def test_what_is_withdrawn_is_found_in_no_copy():
    pool = BlockPool(3, 1, host_blocks=2)
    chain = pool.chain(b"root", [1])
    first, second = pool.take(1), pool.take(1)
    for block in (first, second):
        pool.publish(chain, block, range(1))
    stowed = pool.stow(first)
    pool.withdraw([*first, *pool.take(1)])
    assert pool.match(chain, 1) == []
    assert pool.problems([first, second, [2]], [stowed]) == []


def test_the_same_mark_again_is_no_use_of_what_nobody_holds():
    pool = BlockPool(3, 1, marked_share=0)
    first, second, other = pool.take(1), pool.take(1), pool.take(1)
    chain = pool.chain(b"root", [1])
    pool.publish(chain, first, range(1))
    pool.publish(chain, second, range(1))
    pool.publish(pool.chain(b"root", [2]), other, range(1))
    pool.release(first)
    pool.mark(second[0], FIVE)
    pool.release(other)
    pool.mark(second[0], FIVE)
    assert pool.take(1) == first


def test_a_mark_on_a_block_without_content_is_nothing():
    pool = BlockPool(1, 1)
    [block] = pool.take(1)
    pool.mark(block, FIVE)
    assert not pool.is_published(block)


def test_marks_of_a_prompt_end_with_it():
    sequence = a_sequence([1] * 6, marks=[CacheMark(tokens=100)])
    assert (sequence.kept_ms(6), sequence.kept_ms(7)) == (FIVE, 0)


def test_a_prompts_logprobs_that_were_told_are_not_told_again():
    sequence = a_sequence([1] * 9, tells_prompt=True)
    logprobs = tuple("abcd")
    assert sequence.tell(1, logprobs) == (1, logprobs)
    assert sequence.tell(1, logprobs) == (5, ())
    assert sequence.tell(4, logprobs) == (5, ("b", "c", "d"))
    assert sequence.untold == 8


def test_a_sequence_that_forks_later_is_forecast_with_its_prompt_once():
    driver = Driver(expected_share=0)
    first, second = (a_sequence(range(1, 10), request="two", choice=i) for i in range(2))
    first.forks = [second]
    assert driver.scheduler.forecast.blocks_with_forks(first) == 3 + (3 - 2)


def test_what_it_will_hit_is_not_asked_for_again():
    driver = Driver(kv_blocks=8, expected_share=0, headroom_share=0, max_batched_tokens=32)
    driver.add(a_sequence(range(1, 18), max_tokens=1))
    driver.run()
    driver.add(a_sequence([99] * 5, max_tokens=8))
    driver.step()
    again = driver.add(a_sequence(range(1, 18), max_tokens=1))
    driver.step()
    assert again.cached_tokens == 16
    driver.run()
    assert_right_outputs(driver, 3)


def test_the_share_that_is_learned_is_of_what_was_still_allowed():
    forecast = Driver(expected_share=0).scheduler.forecast
    sequence = a_sequence([1] * 4, outputs=[1, 2], max_tokens=8)
    sequence.tokens += [5, 6, 7]
    forecast.finished(sequence)
    assert forecast.share == 3 / 6 / 16


def test_each_class_lapses_by_itself_and_a_lapsed_block_can_be_held():
    tier = a_tier(TTL_MS["1h"], FIVE)
    tier.advance(FIVE)
    assert tier.num_marked == 1
    tier.hold(1)
    assert tier.problems([[1]]) == []
