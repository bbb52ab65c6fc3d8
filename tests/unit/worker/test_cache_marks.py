"""Cache marks: what they keep from eviction, for how long, how much, and what they report."""

import pytest

from core.protocol import CacheMark, Choice
from tests.support.engine_requests import FakeText, a_request, a_sequence
from tests.support.scheduler_driver import Driver, assert_right_outputs
from worker.generation import open_generation
from worker.sequence import TTL_MS

FIVE, HOUR = TTL_MS["5m"], TTL_MS["1h"]


def mark(tokens, ttl="5m"):
    return CacheMark(tokens=tokens, ttl=ttl)


def compute(driver, prompt, *marks, **kwargs):
    sequence = driver.add(a_sequence(prompt, marks=marks, max_tokens=1, **kwargs))
    driver.run()
    return sequence


def hits(driver, prompt):
    """Blocks of the prompt that are found, without using them."""
    pool = driver.scheduler.pool
    chain = pool.chain(a_sequence().root, list(prompt))
    return len(pool.match(chain, len(chain._tokens)))


MARKED, PLAIN, NEXT = range(1, 10), range(50, 59), range(100, 117)


def test_a_marked_prefix_outlives_unmarked_ones_that_were_used_later():
    driver = Driver(kv_blocks=8)
    compute(driver, MARKED, mark(8))
    compute(driver, PLAIN)
    compute(driver, NEXT)
    compute(driver, range(200, 212))
    assert (hits(driver, MARKED), hits(driver, PLAIN)) == (2, 0)


@pytest.mark.parametrize(("ttl", "ttl_ms"), TTL_MS.items())
def test_a_mark_keeps_until_its_time_after_the_last_use(ttl, ttl_ms):
    for late_ms, kept in ((-1, 2), (0, 0)):
        driver = Driver(kv_blocks=8)
        compute(driver, MARKED, mark(8, ttl))
        driver.now_ms = ttl_ms // 2
        compute(driver, MARKED)  # a use
        driver.now_ms += ttl_ms + late_ms
        for start in (50, 100, 150):
            compute(driver, range(start, start + 21))
        assert hits(driver, MARKED) == kept


def test_time_that_goes_back_is_taken_for_the_last():
    driver = Driver(kv_blocks=8)
    driver.now_ms = 10 * HOUR
    compute(driver, MARKED, mark(8))
    driver.now_ms = 0
    compute(driver, range(50, 74))
    assert hits(driver, MARKED) == 2
    driver.now_ms = 10 * HOUR + FIVE
    compute(driver, range(50, 81))
    assert hits(driver, MARKED) < 2


def test_what_is_past_its_time_goes_by_its_last_use_like_all_others():
    driver = Driver(kv_blocks=8)
    compute(driver, PLAIN)
    compute(driver, MARKED, mark(8))
    driver.now_ms = FIVE
    compute(driver, NEXT)  # 5 blocks: 4 free ones and the tail of the unmarked prefix
    assert (hits(driver, PLAIN), hits(driver, MARKED)) == (1, 2)
    compute(driver, range(200, 212))
    assert (hits(driver, PLAIN), hits(driver, MARKED)) == (0, 1)


def test_only_the_marked_part_of_a_prompt_is_kept():
    driver = Driver(kv_blocks=8)
    compute(driver, range(1, 18), mark(9))
    compute(driver, range(100, 124))
    assert hits(driver, range(1, 18)) == 2


def test_marks_keep_no_more_than_their_share():
    driver = Driver(kv_blocks=8, marked_share=0.5)
    compute(driver, range(1, 25), mark(24))  # six blocks are marked, four may be kept
    compute(driver, range(100, 116))
    assert hits(driver, range(1, 25)) == 4
    compute(driver, range(150, 166))
    assert hits(driver, range(1, 25)) == 4


def test_among_marked_ones_above_the_share_the_oldest_goes_first():
    driver = Driver(kv_blocks=8, marked_share=0.25)
    compute(driver, range(1, 13), mark(12, "1h"))
    compute(driver, range(51, 63), mark(12, "5m"))
    compute(driver, range(100, 124))
    assert (hits(driver, range(1, 13)), hits(driver, range(51, 63))) == (0, 2)


def test_a_share_of_nothing_keeps_nothing():
    driver = Driver(kv_blocks=8, marked_share=0)
    compute(driver, MARKED, mark(8))
    compute(driver, PLAIN)
    compute(driver, range(100, 124))
    assert hits(driver, MARKED) == 0


def test_a_hit_with_a_mark_keeps_what_another_wrote_without_one():
    driver = Driver(kv_blocks=8)
    compute(driver, MARKED)
    compute(driver, MARKED, mark(8, "1h"))
    driver.now_ms = FIVE + 1
    compute(driver, PLAIN)
    compute(driver, range(100, 124))
    assert hits(driver, MARKED) == 2


def test_a_shorter_mark_takes_nothing_from_a_longer_one():
    driver = Driver(kv_blocks=8)
    compute(driver, MARKED, mark(8, "1h"))
    compute(driver, MARKED, mark(8, "5m"))
    driver.now_ms = FIVE + 1
    compute(driver, range(100, 124))
    assert hits(driver, MARKED) == 2


def test_a_content_marked_later_is_kept_in_every_block_that_has_it():
    driver = Driver(kv_blocks=8)
    pool = driver.scheduler.pool
    chain = pool.chain(b"root", [1, 2, 3, 4])
    plain, marked = pool.take(1), pool.take(1)
    pool.publish(chain, plain, range(1))
    pool.publish(chain, marked, range(1))
    pool.release(plain)
    pool.mark(marked[0], FIVE)
    pool.release(marked)
    pool.take(6)
    others = pool.take(1)
    assert others == plain, "the older of the two, since nothing else is left"
    assert pool.device.num_marked == 1


def test_host_memory_gives_no_marked_prefix_for_an_unmarked_one():
    driver = Driver(kv_blocks=6, host_blocks=4, copy_block_ms=1e-6)
    compute(driver, MARKED, mark(8))
    compute(driver, range(100, 124))  # the marked one goes to host memory
    compute(driver, range(150, 174))  # and these in turn
    compute(driver, range(200, 224))
    assert hits(driver, MARKED) == 2
    driver.now_ms = FIVE
    compute(driver, range(250, 274))
    assert hits(driver, MARKED) == 0


# What is reported.


def written(sequence):
    return sequence.written_tokens[FIVE], sequence.written_tokens[HOUR]


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ((), (0, 0)),
        ((mark(3),), (0, 0)),
        ((mark(4),), (4, 0)),
        ((mark(7),), (4, 0)),
        ((mark(8, "1h"),), (0, 8)),
        ((mark(4, "1h"), mark(12)), (8, 4)),
        ((mark(4), mark(12, "1h")), (0, 12)),
        ((mark(1000),), (16, 0)),
    ],
)
def test_full_blocks_up_to_the_last_mark_are_written_for_the_longest_time_asked(marks, expected):
    assert written(compute(Driver(), range(1, 19), *marks)) == expected


def test_what_was_read_from_cache_is_not_written():
    driver = Driver()
    compute(driver, range(1, 10))
    again = compute(driver, range(1, 19), mark(16))
    assert (again.cached_tokens, written(again)) == (8, (8, 0))
    last = compute(driver, range(1, 19), mark(16))
    assert (last.cached_tokens, written(last)) == (16, (0, 0))


def test_what_is_computed_again_after_a_preemption_is_written_once():
    driver = Driver(max_batched_tokens=8)
    sequence = driver.add(a_sequence(range(1, 19), marks=[mark(16)], max_tokens=3))
    for _ in range(3):
        driver.step()
        driver.scheduler.preempt(sequence)
        driver.scheduler.pool.flush()
    driver.run()
    assert written(sequence) == (16, 0)
    assert_right_outputs(driver, 1)


def test_the_answer_is_not_written():
    driver = Driver()
    sequence = driver.add(a_sequence(range(1, 7), marks=[mark(1000)], max_tokens=9))
    driver.run()
    assert written(sequence) == (4, 0)


def test_usage_tells_reads_and_writes_of_the_whole_request_once():
    driver = Driver(kv_blocks=64, max_batched_tokens=64)
    numbers = iter(range(1_000_000, 2_000_000))
    usages = []
    for _ in range(2):
        request = a_request(
            range(1, 40),
            choices=[Choice(index=0), Choice(index=1), Choice(index=2)],
            cache_marks=(mark(16, "1h"), mark(32)),
            max_tokens=4,
        )
        generation = open_generation(
            request, FakeText(), context_tokens=400, numbers=numbers, arrived_ms=0.0
        )
        driver.add(*generation.sequences)
        assert generation.usage.cache_write_tokens == 0
        generation.start("boot", 0.0)
        driver.run()
        usages.append(generation.usage)
    first, second = usages
    assert (first.cached_tokens, first.cache_write_5m_tokens, first.cache_write_1h_tokens) == (
        0, 16, 16
    )  # fmt: skip
    assert first.fresh_tokens == 39 - 32
    assert (second.cached_tokens, second.cache_write_tokens) == (36, 0)
    assert first.is_possible
    assert second.is_possible


def test_a_hit_beyond_the_mark_is_not_kept():
    driver = Driver()
    compute(driver, MARKED)
    compute(driver, MARKED, mark(4))
    assert driver.scheduler.pool.device.num_marked == 1
