"""Which rows are asked for the logprobs of their prompt, and that each token is told once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engine_requests import a_sequence
from tests.support.fake_runner import FakeRunner, logprob_of
from worker.admission import SchedulerConfig
from worker.scheduler import Scheduler
from worker.sequence import Sequence, State
from worker.step import StepPlan


class Told:
    """Runs a scheduler and gathers what it tells of prompts."""

    def __init__(self, **config):
        defaults = {"kv_blocks": 40, "context_tokens": 1 << 20, "block_tokens": 4}
        defaults |= {"max_batched_tokens": 16, "max_sequences": 8}
        self.config = SchedulerConfig(**(defaults | config))
        self.scheduler = Scheduler(self.config)
        self.runner = FakeRunner(self.config.kv_blocks, self.config.block_tokens)
        self.told = {}

    def run(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.add([sequence])
        while self.scheduler.has_work:
            self.step()
        assert self.scheduler.problems() == []

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        result = self.runner.execute(plan)
        for sequence, start, logprobs in self.scheduler.prompted(plan, result):
            so_far = self.told.setdefault(sequence.number, [])
            assert start == len(so_far) + 1
            so_far += logprobs
        for sequence, _ in self.scheduler.complete(plan, result):
            if sequence.num_tokens == sequence.final_tokens:
                self.scheduler.finish(sequence)
        return plan


def expected(prompt, number):
    return [logprob_of(token, number) for token in prompt[1:]]


# vllm #3251, #8268: prompt logprobs together with the prefix cache crashed, or were too few.
def test_a_prompt_of_33_tokens_sent_twice_tells_all_its_logprobs_twice() -> None:
    told = Told()
    prompt = range(40, 73)
    first, second = (a_sequence(prompt, prompt_logprobs=1, tells_prompt=True) for _ in "ab")
    told.run(first)
    told.run(second)
    assert told.told == {s.number: expected(prompt, 1) for s in (first, second)}
    assert second.cached_tokens == 0


def test_who_does_not_ask_takes_the_hits_of_who_did() -> None:
    told = Told()
    told.run(a_sequence(range(33), prompt_logprobs=0, tells_prompt=True))
    plain = a_sequence(range(33), prompt_logprobs=0)
    told.run(plain)
    assert plain.cached_tokens == 32
    assert plain.number not in told.told


@pytest.mark.parametrize("prompt", [[5], [5, 6], list(range(4)), list(range(5))])
def test_short_prompts_tell_one_logprob_less_than_they_have_tokens(prompt) -> None:
    told = Told()
    sequence = a_sequence(prompt, prompt_logprobs=2, tells_prompt=True)
    told.run(sequence)
    assert told.told.get(sequence.number, []) == expected(prompt, 2)


@given(data=st.data())
def test_preempted_in_the_middle_of_its_prompt_a_sequence_tells_no_token_twice(data) -> None:
    told = Told(kv_blocks=80)
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=3))
    sequences = [
        a_sequence(range(length), max_tokens=3, prompt_logprobs=1, tells_prompt=True)
        for length in lengths
    ]
    for sequence in sequences:
        told.scheduler.add([sequence])
    while told.scheduler.has_work:
        told.step()
        running = [s for s in sequences if s.state is State.RUNNING]
        if running and data.draw(st.booleans(), "preempt"):
            told.scheduler.preempt(data.draw(st.sampled_from(running)))
    for sequence, length in zip(sequences, lengths, strict=True):
        assert told.told.get(sequence.number, []) == expected(range(length), 1)


def test_a_sequence_that_ended_during_the_step_is_told_nothing() -> None:
    told = Told()
    sequence = a_sequence(range(9), prompt_logprobs=1, tells_prompt=True)
    told.scheduler.add([sequence])
    plan = told.scheduler.schedule()
    assert plan is not None
    result = told.runner.execute(plan)
    told.scheduler.end(sequence.request)
    assert told.scheduler.prompted(plan, result) == []
