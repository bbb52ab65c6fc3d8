"""A draw that failed costs its own sequence a token, and nobody else anything."""

import msgspec
import pytest

from tests.support.engine_requests import a_sequence
from tests.support.fake_runner import FakeRunner, expected
from worker.admission import SchedulerConfig
from worker.scheduler import Scheduler
from worker.step import Sampled, StepResult


def test_a_fault_adds_no_token_and_its_neighbour_goes_on() -> None:
    config = SchedulerConfig(kv_blocks=16, context_tokens=100, block_tokens=4, max_sequences=4)
    scheduler, runner = Scheduler(config), FakeRunner(16, 4)
    faulty, sound = a_sequence([1, 2, 3]), a_sequence([4, 5])
    for sequence in (faulty, sound):
        scheduler.add([sequence])
    plan = scheduler.schedule()
    assert plan is not None
    result = runner.execute(plan)
    spoilt = msgspec.structs.replace(result.sampled[0], token_id=-1, fault="no numbers")
    result = msgspec.structs.replace(result, sampled=(spoilt, result.sampled[1]))
    drawn = scheduler.complete(plan, result)
    assert [(sequence, bool(sampled.fault)) for sequence, sampled in drawn] == [
        (faulty, True),
        (sound, False),
    ]
    assert faulty.num_output == 0
    scheduler.end(faulty.request)
    while sound.num_tokens < sound.final_tokens:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.complete(plan, runner.execute(plan))
    assert sound.tokens[2:] == expected([4, 5], sound.sampling, 0, 8)
    scheduler.finish(sound)
    assert scheduler.problems() == []


@pytest.mark.parametrize("unanswerable", [False, True])
def test_nobody_takes_over_the_blocks_of_a_draw_that_was_no_number(unanswerable):
    config = SchedulerConfig(kv_blocks=16, context_tokens=100, block_tokens=4, max_sequences=4)
    scheduler, runner = Scheduler(config), FakeRunner(16, 4)
    prompt = range(1, 10)
    scheduler.add([a_sequence(prompt, request="r"), a_sequence(prompt, request="r", choice=1)])
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.complete(plan, runner.execute(plan))
    plan = scheduler.schedule()  # both choices, which share the prompt's blocks
    assert plan is not None
    assert len(plan.rows) == 2
    spoilt = Sampled(token_id=-1, fault="no numbers", unanswerable=unanswerable)
    runner.execute(plan)
    scheduler.complete(plan, StepResult(sampled=(spoilt, spoilt)))
    scheduler.end("r")
    again = a_sequence(prompt)
    scheduler.add([again])
    assert scheduler.schedule() is not None
    assert again.cached_tokens == (8 if unanswerable else 0)
    assert scheduler.problems() == []
