"""Steps: who gets how many tokens, and what is never done to anyone's KV.

Outputs are compared with the same model run alone and without blocks.
"""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.engine_requests import a_sequence
from tests.support.fake_runner import expected
from tests.support.scheduler_driver import Driver, assert_right_output, assert_right_outputs
from worker.admission import SchedulerConfig, prefill_tokens, refuse
from worker.sequence import State
from worker.step import Sampled, StepResult

# What a step is made of


def test_an_empty_scheduler_has_no_step():
    assert Driver().scheduler.schedule() is None


def test_prefill_chunk_and_decode_are_one_number():
    driver = Driver(max_batched_tokens=8)
    a = driver.add(a_sequence(range(1, 20), max_tokens=2))
    steps = []
    while driver.scheduler.has_work:
        steps.append(driver.step()[a.number])
    assert steps == [8, 8, 3, 1]
    assert_right_output(a)


def test_decodes_come_before_prefills_and_take_one_token_each():
    driver = Driver(max_batched_tokens=8)
    a = driver.add(a_sequence([1, 2], max_tokens=9))
    driver.step()
    b = driver.add(a_sequence(range(10, 30)))
    assert driver.step() == {a.number: 1, b.number: 7}
    assert list(driver.step()) == [a.number, b.number]


def test_only_the_row_that_ends_its_prefill_has_a_draw():
    driver = Driver(max_batched_tokens=4, max_sequences=4)
    driver.add(a_sequence(range(1, 7), seed=3, temperature=0.5, top_k=9, logprobs=2, choice=6))
    first = driver.scheduler.schedule()
    assert first.rows[0].draw is None
    driver.scheduler.complete(first, StepResult(sampled=()))
    draw = driver.scheduler.schedule().rows[0].draw
    sampling = draw.opening.sampling
    assert (sampling.seed, draw.opening.choice, draw.index) == (3, 6, 0)
    assert (sampling.temperature, sampling.top_k, sampling.logprobs) == (0.5, 9, 2)


def test_one_long_prompt_leaves_half_the_step_to_others():
    driver = Driver(kv_blocks=100, max_batched_tokens=16)
    long = driver.add(a_sequence(range(1, 200), max_tokens=1))
    assert driver.step() == {long.number: 16}
    short = driver.add(a_sequence([5, 6, 7, 8, 9], max_tokens=1))
    assert driver.step() == {long.number: 11, short.number: 5}
    assert driver.step() == {long.number: 16}


def test_classes_go_before_arrival_and_arrival_decides_within_a_class():
    driver = Driver(max_batched_tokens=6, max_sequences=6)
    batch = driver.add(a_sequence([1] * 3, service_class="batch"))
    late = driver.add(a_sequence([2] * 3, service_class="interactive"))
    later = driver.add(a_sequence([3] * 3, service_class="interactive"))
    assert list(driver.step()) == [late.number, later.number]
    assert batch.state is State.WAITING


def test_sequences_over_max_sequences_wait():
    driver = Driver(max_sequences=2)
    for i in range(5):
        driver.add(a_sequence([i + 1] * 3))
    driver.step()
    assert (len(driver.scheduler.running), len(driver.scheduler.waiting)) == (2, 3)
    driver.run()
    assert_right_outputs(driver, 5)


# Prefix cache


def test_a_prompt_that_is_an_exact_multiple_and_fully_cached_still_computes_a_token():
    # nano-vllm 144: zero query tokens.
    for block_tokens in (1, 2, 4, 8, 16, 32):
        driver = Driver(block_tokens=block_tokens, kv_blocks=128, max_batched_tokens=64)
        first = driver.add(a_sequence(range(1, 33), max_tokens=3))
        driver.run()
        again = driver.add(a_sequence(range(1, 33), max_tokens=3))
        assert driver.step()[again.number] == block_tokens
        assert again.cached_tokens == 32 - block_tokens
        driver.run()
        assert again.tokens == first.tokens
        assert_right_outputs(driver, 2)


def test_another_salt_computes_the_same_prompt_again():
    # CVE-2025-46570: the time to the first token told of another tenant's prompts.
    driver = Driver()
    driver.add(a_sequence(range(1, 14), salt=b"a"))
    driver.run()
    other = driver.add(a_sequence(range(1, 14), salt=b"b"))
    assert driver.step() == {other.number: 13}
    assert other.cached_tokens == 0


@pytest.mark.parametrize("size", [0, 1])
def test_colliding_hashes_change_no_output(size):
    # GHSA-rm76-4mrf-v9r8: a chosen collision lent another user's KV.
    driver = Driver(hash_block=lambda message: bytes(size) and message[-1:], kv_blocks=64)
    for i in range(12):
        driver.add(a_sequence([i % 3, 1, 2, 3] * 3 + [i], salt=bytes([i % 2])))
    driver.run()
    assert_right_outputs(driver, 12)


def test_aborted_mid_prefill_leaves_only_computed_blocks_to_hit():
    # sglang 28374: KV of an aborted request's uncomputed part was cached.
    driver = Driver(max_batched_tokens=6, max_sequences=4, kv_blocks=32)
    aborted = driver.add(a_sequence(range(1, 20)))
    driver.step()  # computes 6 of 19
    driver.scheduler.schedule()  # takes blocks for 6 more, and is never executed
    driver.scheduler.end(aborted.request)
    again = driver.add(a_sequence(range(1, 20)))
    driver.step()
    assert again.cached_tokens == 4
    driver.run()
    assert_right_output(again)


def test_two_identical_prompts_in_one_step_keep_their_own_blocks():
    # mini-sglang 142: duplicate prefix pages were freed under a running request.
    driver = Driver(kv_blocks=20, max_batched_tokens=32)
    prompt = range(1, 17)
    driver.add(a_sequence(prompt, max_tokens=1))
    driver.add(a_sequence(prompt, max_tokens=20))
    driver.step()
    driver.add(a_sequence([9] * 11, max_tokens=20))
    driver.add(a_sequence(prompt, max_tokens=9, temperature=1))
    driver.run()
    assert_right_outputs(driver, 4)


# Choices that share a prompt


def forks(number, prompt, **kwargs):
    return [
        a_sequence(prompt, request="forked", choice=i, temperature=1.0, **kwargs)
        for i in range(number)
    ]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_choices_share_the_prompt_and_part_at_its_last_token(length):
    driver = Driver(kv_blocks=32)
    choices = forks(4, range(1, length + 1), max_tokens=6)
    driver.add(*choices)
    driver.run()
    assert_right_outputs(driver, 4)
    assert len({tuple(sequence.tokens) for sequence in choices}) > 1
    # The prompt once, the last token again for each further choice; a choice's last output
    # token is never fed.
    assert driver.runner.num_fed == length + 3 + 4 * 5


def test_only_a_block_that_is_partly_the_prompts_is_copied():
    for length, copies in ((4, 3), (5, 0), (6, 3)):
        driver = Driver(kv_blocks=32)
        driver.add(*forks(4, range(1, length + 1), max_tokens=3))
        driver.step()
        # Of four holders the last writes in place; a full block keeps its first holder too.
        assert len(driver.scheduler.schedule().copies) == copies


def test_choices_beyond_the_sequence_bound_wait_and_hit_the_shared_blocks():
    driver = Driver(max_sequences=2, kv_blocks=32)
    choices = forks(5, range(1, 10), max_tokens=6)
    driver.add(*choices)
    driver.run()
    assert_right_outputs(driver, 5)
    assert driver.runner.num_fed == 9 + 1 + 3 * 1 + 5 * 5


def test_choices_that_outlive_the_first_write_its_last_block_in_place():
    # Two blocks in all: a copy would never find room.
    driver = Driver(kv_blocks=2, max_sequences=3, max_batched_tokens=8)
    driver.add(*forks(3, range(1, 9), max_tokens=1))
    driver.run()
    assert_right_outputs(driver, 3)


def test_resumed_choices_feed_their_own_tokens_after_the_shared_prompt():
    driver = Driver(kv_blocks=32)
    whole = forks(3, range(1, 7), max_tokens=9)
    driver.add(*whole)
    driver.run()
    for cut in ((0, 4, 8), (8, 0, 1), (5, 5, 5)):
        resumed = [
            a_sequence(
                range(1, 7), request="forked", choice=i, temperature=1.0, max_tokens=9,
                outputs=whole[i].tokens[6 : 6 + cut[i]],
            )
            for i in range(3)
        ]  # fmt: skip
        driver.add(*resumed)
        driver.run()
        assert [s.tokens for s in resumed] == [s.tokens for s in whole]
        assert [s.num_new for s in resumed] == [9 - n for n in cut]


def test_a_request_ends_with_all_its_choices_in_whatever_state():
    driver = Driver(max_sequences=2, kv_blocks=32)
    choices = forks(4, range(1, 30), max_tokens=6)
    driver.add(*choices)
    driver.step()
    assert [s.state for s in choices] == [State.RUNNING, *[State.FORKING] * 3]
    driver.step()
    assert [s.state for s in choices] == [State.RUNNING] * 2 + [State.WAITING] * 2
    driver.scheduler.end("forked")
    assert {s.state for s in choices} == {State.ENDED}
    driver.assert_idle()


# Room


def test_a_sequence_that_needs_a_block_takes_it_from_the_last_in_line():
    driver = Driver(kv_blocks=4, expected_share=0, headroom_share=0)
    first = driver.add(a_sequence([1] * 4, max_tokens=12))
    last = driver.add(a_sequence([2] * 4, max_tokens=12))
    driver.run()
    assert driver.scheduler.num_preemptions > 0
    assert driver.done == [first, last]
    assert_right_outputs(driver, 2)


def test_the_last_in_line_waits_with_what_it_holds():
    driver = Driver(kv_blocks=3, expected_share=0, headroom_share=0)
    driver.add(a_sequence([1] * 4, max_tokens=4))
    last = driver.add(a_sequence([2] * 3, max_tokens=5))
    for _ in range(2):
        driver.step()
    held = list(last.blocks)
    assert last.number not in driver.step()
    assert (last.state, last.blocks) == (State.RUNNING, held)
    driver.run()
    assert driver.scheduler.num_preemptions == 0
    assert_right_outputs(driver, 2)


def test_a_victim_already_scheduled_in_the_step_is_undone():
    # vllm 23347: it stayed in the step, and the assertion killed the server.
    driver = Driver(
        kv_blocks=6, expected_share=0, headroom_share=0, max_batched_tokens=2, max_sequences=2
    )
    late = driver.add(a_sequence([2] * 4, max_tokens=16, service_class="batch"))
    for _ in range(2):
        driver.step()
    first = driver.add(a_sequence([1] * 16, max_tokens=1))
    assert driver.step() == {late.number: 1, first.number: 1}
    # While the standard prefill creeps on, the batch decode of each step goes first and grows,
    # until in one step the prefill needs its blocks.
    while late.state is State.RUNNING:
        step = driver.step()
    assert step == {first.number: 2}
    driver.run()
    assert_right_outputs(driver, 2)


def test_an_undone_victim_takes_its_copy_with_it():
    driver = Driver(kv_blocks=5, expected_share=0, headroom_share=0, max_batched_tokens=8)
    choices = forks(2, range(1, 7), max_tokens=3, service_class="batch")
    driver.add(*choices)
    driver.step()
    assert [s.state for s in choices] == [State.RUNNING] * 2
    urgent = driver.add(a_sequence(range(30, 50), max_tokens=1, service_class="interactive"))
    plan = driver.scheduler.schedule()
    assert ([row.sequence for row in plan.rows], plan.copies) == ([urgent.number], ())
    assert driver.scheduler.num_preemptions == 2


def test_what_a_victim_leaves_is_not_given_to_those_that_wait():
    driver = Driver(kv_blocks=4, expected_share=0, headroom_share=0)
    driver.add(a_sequence([1] * 4, max_tokens=12))
    last = driver.add(a_sequence([2] * 4, max_tokens=12))
    for _ in range(2):
        driver.step()
    small = driver.add(a_sequence([3], max_tokens=1))
    while last.state is State.RUNNING:
        step = driver.step()
    assert small.number not in step
    assert driver.scheduler.pool.num_available > 0
    assert small.number in driver.step()


def test_growth_is_forecast_so_that_preemption_is_rare():
    driver = Driver(kv_blocks=16, expected_share=1, headroom_share=0)
    for i in range(6):
        driver.add(a_sequence([i + 1] * 4, max_tokens=25))  # 7 blocks each at the end
    driver.step()
    assert len(driver.scheduler.running) == 2
    driver.run()
    assert driver.scheduler.num_preemptions == 0


def test_the_forecast_learns_from_what_ends_and_from_preemptions():
    driver = Driver(kv_blocks=6, expected_share=0, headroom_share=0)
    driver.add(a_sequence([1] * 4, max_tokens=12))
    driver.add(a_sequence([2] * 4, max_tokens=12))
    driver.run()
    assert driver.scheduler.num_preemptions == 1
    assert driver.scheduler.forecast.share > 1 / 8
    early = driver.add(a_sequence([3] * 4, max_tokens=12))
    driver.step()
    before = driver.scheduler.forecast.share
    driver.scheduler.finish(early)
    assert driver.scheduler.forecast.share < before


def test_the_forecast_never_exceeds_what_can_be_written():
    forecast = Driver(expected_share=1).scheduler.forecast
    assert forecast.blocks(a_sequence([1] * 4, max_tokens=1)) == 1  # the fifth is never fed
    assert forecast.blocks(a_sequence([1] * 4, max_tokens=2)) == 2


def test_a_higher_class_displaces_lower_ones_to_run():
    driver = Driver(max_sequences=2, max_batched_tokens=8)
    batch = [driver.add(a_sequence([i + 1] * 3, service_class="batch")) for i in range(2)]
    driver.step()
    urgent = driver.add(a_sequence([9] * 3, service_class="interactive"))
    step = driver.step()
    assert urgent.number in step
    assert [s.state for s in batch] == [State.RUNNING, State.WAITING]
    driver.run()
    assert_right_outputs(driver, 3)


def test_nothing_is_displaced_in_vain():
    driver = Driver(kv_blocks=8, max_batched_tokens=16, headroom_share=0)
    driver.add(a_sequence([1] * 16, max_tokens=1, service_class="interactive"))
    driver.add(a_sequence([2] * 7, max_tokens=8, service_class="batch"))
    driver.step()
    driver.step()
    urgent = driver.add(a_sequence([3] * 28, max_tokens=1, service_class="standard"))
    still = driver.add(a_sequence([4] * 8, max_tokens=9, service_class="interactive"))
    driver.step()
    assert urgent.state is State.WAITING
    assert still.state is State.RUNNING
    driver.run()
    assert_right_outputs(driver, 4)


def test_displacing_that_frees_less_than_hoped_does_not_admit():
    # Both batch choices hold the same blocks: displacing them frees those once.
    driver = Driver(kv_blocks=10, headroom_share=0, expected_share=0, max_batched_tokens=32)
    driver.add(a_sequence([1] * 8, max_tokens=9, service_class="interactive"))
    driver.add(*forks(2, range(1, 21), max_tokens=2, service_class="batch"))
    driver.step()
    assert len(driver.scheduler.running) == 3
    large = driver.add(a_sequence([3] * 36, max_tokens=1, service_class="standard"))
    driver.step()
    assert large.state is State.WAITING
    driver.run()
    assert_right_outputs(driver, 4)


def test_small_requests_pass_a_large_one_that_does_not_fit_until_it_has_waited_long():
    driver = Driver(kv_blocks=10, patience_steps=12, expected_share=1, max_batched_tokens=16)
    driver.add(a_sequence([1] * 4, max_tokens=8))
    driver.step()
    large = driver.add(a_sequence(range(1, 33), max_tokens=1))
    passed = 0
    while large.state is State.WAITING:
        small = driver.add(a_sequence([7] * 4, max_tokens=8))
        driver.step()
        passed += small.state is State.RUNNING
        assert large.steps_waited < 30
    assert passed == 2
    assert large.overdue
    driver.run()


def test_a_batch_sequence_does_not_starve_under_endless_interactive_load():
    driver = Driver(max_sequences=2, patience_steps=10)
    patient = driver.add(a_sequence([1] * 3, max_tokens=4, service_class="batch"))
    for i in range(60):
        if len(driver.scheduler.waiting) < 4:
            driver.add(a_sequence([i + 2] * 3, max_tokens=4, service_class="interactive"))
        driver.step()
    assert patient.state is State.ENDED
    assert_right_output(patient)


def test_a_prompt_larger_than_the_forecast_allows_still_runs_alone():
    driver = Driver(kv_blocks=8, headroom_share=0.9, expected_share=1)
    driver.add(a_sequence(range(1, 30), max_tokens=4))
    driver.add(a_sequence([2] * 4, max_tokens=4))
    driver.run()
    assert_right_outputs(driver, 2)


# The door


def refusal(sequences, waiting_tokens=0, **config):
    defaults = {"kv_blocks": 50, "context_tokens": 2000, "block_tokens": 16}
    return refuse(SchedulerConfig(**(defaults | config)), sequences, waiting_tokens)


def test_a_prompt_that_fits_the_context_but_not_the_pool_is_refused():
    # vllm 35541: never scheduled, and everything behind it hung.
    nack = refusal([a_sequence([1] * 1002)])
    assert (nack.reason, nack.fits_never) == ("fits_never", True)


def test_a_request_fits_to_the_last_block_and_no_further():
    assert refusal([a_sequence([1] * 800, max_tokens=1)]) is None
    assert refusal([a_sequence([1] * 800, max_tokens=2)]).fits_never
    assert refusal([a_sequence([1] * 790, max_tokens=500, context_tokens=801)]) is None


def test_a_prompt_that_leaves_no_room_in_the_context_is_refused():
    assert refusal([a_sequence([1] * 99, context_tokens=100)]) is None
    assert refusal([a_sequence([1] * 100, context_tokens=100)]).fits_never


def test_the_waiting_list_is_bounded_by_one_steps_prefill():
    config = {"max_batched_tokens": 100}
    assert refusal([a_sequence([1] * 40)], 60, **config) is None
    assert refusal([a_sequence([1] * 41)], 60, **config).reason == "full"
    assert refusal([a_sequence([1] * 41)], 60, **config, waiting_tokens_max=200) is None
    assert refusal([a_sequence([1] * 500)], 0, **config) is None


def test_choices_count_their_prompt_once():
    choices = forks(3, range(1, 11), outputs=(1, 2), max_tokens=9)
    assert prefill_tokens(choices) == 10 + 3 * 2
    driver = Driver()
    driver.add(*choices)
    assert driver.scheduler.waiting_tokens == 16
    assert driver.scheduler.waiting_blocks == 3


@pytest.mark.parametrize(
    "bad",
    [
        {"kv_blocks": 0},
        {"block_tokens": 0},
        {"context_tokens": 0},
        {"max_sequences": 0},
        {"max_sequences": 9, "max_batched_tokens": 8},
        {"waiting_tokens_max": -1},
        {"patience_steps": -1},
        {"expected_share": 1.5},
        {"headroom_share": 1},
        {"marked_share": -0.1},
        {"marked_share": 1.1},
        {"host_blocks": -1},
        {"itl_target_ms": -1},
        {"itl_stretch": 0.9},
        {"itl_stretch": -1},
        {"copy_block_ms": 0},
        {"token_ms": 0},
    ],
)
def test_bounds_that_contradict_each_other_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SchedulerConfig(**({"kv_blocks": 8, "context_tokens": 100} | bad))


# Ends


def test_an_abort_before_the_first_step_is_fine():
    # vllm 18485: no blocks were known yet, and it raised.
    driver = Driver()
    sequence = driver.add(a_sequence())
    driver.scheduler.end(sequence.request)
    driver.scheduler.end(sequence.request)
    assert driver.scheduler.schedule() is None
    driver.assert_idle()


def test_what_ended_during_a_step_is_passed_over():
    driver = Driver()
    gone, kept = driver.add(a_sequence([1, 2])), driver.add(a_sequence([3, 4]))
    plan = driver.scheduler.schedule()
    assert driver.scheduler.requests_in(plan) == [gone.request, kept.request]
    driver.scheduler.end(gone.request)
    assert driver.scheduler.requests_in(plan) == [kept.request]
    drawn = driver.scheduler.complete(plan, driver.runner.execute(plan))
    assert [sequence for sequence, _ in drawn] == [kept]
    driver.run()
    assert_right_outputs(driver, 1)


def test_deadlines_are_noticed_waiting_and_running():
    driver = Driver(max_sequences=1)
    driver.add(a_sequence(request="runs", deadline_ms=100))
    driver.add(a_sequence(request="waits", deadline_ms=50))
    driver.add(a_sequence(request="never"))
    driver.step()
    assert driver.scheduler.expired(49) == set()
    assert driver.scheduler.expired(50) == {"waits"}
    assert driver.scheduler.expired(10**15) == {"waits", "runs"}


def test_a_short_chunk_size_and_a_long_answer_leak_nothing():
    # sglang 11970, 6888: "memory leak detected" killed the scheduler.
    driver = Driver(kv_blocks=64, max_batched_tokens=4, max_sequences=1)
    driver.add(a_sequence([1] * 9, max_tokens=200))
    driver.run()
    assert_right_outputs(driver, 1)


def test_problems_name_a_sequence_out_of_place():
    driver = Driver()
    sequence = driver.add(a_sequence())
    driver.step()
    sequence.state = State.WAITING
    assert driver.scheduler.problems() == [
        f"sequence {sequence.number}: State.WAITING, out of place"
    ]


# Everything at once


CLASSES = st.sampled_from(["interactive", "standard", "batch"])


class Steps(RuleBasedStateMachine):
    """Random arrivals, aborts and steps on random bounds; every output is compared."""

    @initialize(
        block_tokens=st.sampled_from([1, 2, 3, 4, 8, 16, 32]),
        pool_tokens=st.integers(40, 120),
        chunk=st.integers(1, 24),
        max_sequences=st.integers(1, 6),
        patience_steps=st.sampled_from([0, 3, 20]),
        expected_share=st.sampled_from([0, 0.5, 1]),
        colliding=st.booleans(),
    )
    def start(self, block_tokens, pool_tokens, chunk, max_sequences, colliding, **config):
        self.driver = Driver(
            block_tokens=block_tokens,
            kv_blocks=-(-pool_tokens // block_tokens),
            max_batched_tokens=max(chunk, max_sequences),
            max_sequences=max_sequences,
            hash_block=(lambda message: bytes([sum(message) % 3])) if colliding else None,
            **config,
        )
        self.requests = []
        self.number = 0

    @rule(
        unit=st.lists(st.integers(1, 3), min_size=1, max_size=8),
        repeat=st.integers(1, 4),
        choices=st.sampled_from([1, 1, 1, 2, 3]),
        resumed=st.integers(0, 4),
        max_tokens=st.integers(5, 12),
        salt=st.sampled_from([b"a", b"b"]),
        service_class=CLASSES,
        temperature=st.sampled_from([0.0, 1.0]),
    )
    def submit(self, unit, repeat, choices, resumed, **kwargs):
        if len(self.requests) > 12:
            return
        self.number += 1
        prompt = (unit * repeat)[:28]
        outputs = []
        for choice in range(choices):
            whole = a_sequence(prompt, choice=choice, **kwargs)
            known = resumed if choice % 2 == 0 else 0
            outputs.append(expected(prompt, whole.sampling, choice, known))
        sequences = [
            a_sequence(prompt, outputs=outputs[i], request=f"r{self.number}", choice=i, **kwargs)
            for i in range(choices)
        ]
        self.driver.add(*sequences)
        self.requests.append(sequences)

    @rule(steps=st.integers(1, 6))
    def run(self, steps):
        for _ in range(steps):
            before = self.driver.scheduler.has_work
            assert bool(self.driver.step()) == before, "work always advances"

    @rule(data=st.data(), mid_step=st.booleans())
    def abort(self, data, mid_step):
        alive = [r for r in self.requests if any(s.state is not State.ENDED for s in r)]
        if not alive:
            return
        victim = data.draw(st.sampled_from(alive))[0].request
        scheduler = self.driver.scheduler
        plan = scheduler.schedule() if mid_step else None
        scheduler.end(victim)
        self.requests = [r for r in self.requests if r[0].request != victim]
        if plan is not None:
            for sequence, _ in scheduler.complete(plan, self.driver.runner.execute(plan)):
                if sequence.num_tokens == sequence.final_tokens:
                    scheduler.finish(sequence)

    @rule()
    def failed_step(self):
        """The runner raised: everybody in the step is gone, and its writes are not to be read."""
        scheduler = self.driver.scheduler
        plan = scheduler.schedule()
        if plan is None:
            return
        self.driver.runner.execute(plan)
        for row in plan.rows:
            for position in range(row.start, row.start + len(row.token_ids)):
                self.driver.runner.kv[self.driver.runner._slot(row, position)] = -7
        lost = set(scheduler.requests_in(plan))
        for request in lost:
            scheduler.end(request)
        self.requests = [r for r in self.requests if r[0].request not in lost]

    @invariant()
    def nothing_leaks(self):
        if hasattr(self, "driver"):
            assert self.driver.scheduler.problems() == []

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        self.driver.run(steps_max=4000)
        for sequences in self.requests:
            for sequence in sequences:
                assert sequence.num_tokens == sequence.final_tokens
                assert_right_output(sequence)


TestSteps = Steps.TestCase


def test_sampled_tokens_go_to_the_rows_that_asked_in_order():
    driver = Driver(max_batched_tokens=8)
    a = driver.add(a_sequence([1, 2]))
    driver.step()
    driver.add(a_sequence(range(1, 20)))
    c = driver.add(a_sequence([4], service_class="interactive"))
    plan = driver.scheduler.schedule()
    assert [row.draw is not None for row in plan.rows] == [True, True, False]
    result = StepResult(sampled=(Sampled(token_id=50), Sampled(token_id=60)))
    assert [(s, t.token_id) for s, t in driver.scheduler.complete(plan, result)] == [
        (a, 50),
        (c, 60),
    ]
