"""What a failing part costs: the attempts it touched, never the engine."""

import threading

import pytest

from core.protocol import Choice, Failed, Finished, Started, Tokens, Usage
from tests.support.engine_listener import (
    Gate,
    Listener,
    an_engine,
    assert_right,
    submitted,
    wait_until,
)
from tests.support.engine_requests import FakeText, a_request
from tests.support.fake_runner import expected
from worker.step import Sampled, StepResult


class DeviceError(Exception):
    """What a runner may raise."""


class Failing:
    """A `before` that raises in the steps numbered here, from 1."""

    def __init__(self, *steps):
        self.steps = steps
        self.count = 0

    def __call__(self, plan):
        self.count += 1
        if self.count in self.steps:
            raise DeviceError


def test_a_failed_step_costs_its_attempts_and_the_next_request_runs(caplog):
    with an_engine(before=Failing(2)) as engine:
        failed = submitted(engine, a_request([1, 2, 3]))
        last = failed.end()
        assert (last.code, last.retryable) == ("internal", True)
        assert last.usage == Usage(prompt_tokens=3, output_tokens=1)
        assert "DeviceError" in last.message
        request = a_request([1, 2, 3])
        listener = submitted(engine, request)
        assert listener.end().cause == "complete"
        assert_right(listener, request)
        assert (engine.load().failed_steps, engine.load().healthy) == (1, True)
    assert "a step failed" in caplog.text


def test_a_failed_step_spares_those_that_were_not_in_it():
    gate, failing = Gate(), Failing(2)

    def before(plan):
        gate(plan)
        failing(plan)

    with an_engine(before=before, max_sequences=1) as engine:
        first = submitted(engine, a_request([1, 2, 3], max_tokens=2))
        request = a_request([4, 5, 6])
        second = submitted(engine, request)
        gate.open(for_good=True)
        assert isinstance(first.end(), Failed)
        assert second.end().cause == "complete"
        assert_right(second, request)


def test_failures_in_a_row_make_it_unhealthy_and_a_good_step_heals_it():
    with an_engine(before=Failing(1, 2, 3)) as engine:
        for healthy in (True, True, False):
            assert isinstance(submitted(engine, a_request()).end(), Failed)
            wait_until(lambda expected=healthy: engine.load().healthy is expected)
        submitted(engine, a_request()).end()
        wait_until(lambda: engine.load().healthy)


@pytest.mark.parametrize(
    "sampled", [(), (Sampled(token_id=1),) * 2, (Sampled(token_id=300),), (Sampled(token_id=-1),)]
)
def test_an_answer_that_does_not_fit_the_plan_is_a_failed_step(sampled):
    class Wrong:
        def execute(self, plan):
            return StepResult(sampled=sampled)

    with an_engine(start=False) as engine:
        engine._stepper._runner = Wrong()
        engine.start()
        last = submitted(engine, a_request()).end()
        assert "RunnerError" in last.message


def test_an_empty_prompt_a_bad_one_and_a_good_one_each_get_their_answer():
    # vllm 7283, MEDS_EIC_AR 176: an empty prompt, or a batch of them, killed the engine.
    with an_engine() as engine:
        bad = [submitted(engine, a_request(prompt)) for prompt in ((), (), (301,), (-1,))]
        good = submitted(engine, a_request())
        for listener in bad:
            last = listener.end()
            assert (last.code, last.retryable, last.usage) == ("bad_request", False, Usage())
        assert good.end().cause == "complete"


class BrokenText(FakeText):
    """Text rules that raise on one token."""

    broken: int | None = None

    def token_bytes(self, id, /):  # noqa: A002 - the product's name
        if id == self.broken:
            raise KeyError(id)
        return super().token_bytes(id)


def outputs_of(request, choice=0):
    return expected(request.prompt_ids, request.sampling, choice, request.sampling.max_tokens)


def test_a_token_without_text_ends_its_own_attempt_alone():
    # vllm 17448: one stream's invalid prefix killed the output of all.
    victim_request = a_request([9, 9], max_tokens=5, ignore_eos=True)
    other_request = a_request([8, 8], max_tokens=5, ignore_eos=True)
    text = BrokenText()
    text.broken = outputs_of(victim_request)[2]
    assert text.broken not in outputs_of(victim_request)[:2] + outputs_of(other_request)
    with an_engine(text=text, start=False) as engine:
        victim, other = submitted(engine, victim_request), submitted(engine, other_request)
        engine.start()
        last = victim.end_unchecked()
        assert (last.code, last.retryable) == ("internal", True)
        assert victim.ids() == outputs_of(victim_request)[:2]
        assert last.usage.output_tokens == 3  # produced, though it could not be told
        assert other.end().cause == "complete"
        assert_right(other, other_request)


def test_a_token_without_text_ends_the_other_choices_of_its_attempt():
    choices = (Choice(index=0), Choice(index=1), Choice(index=2))
    request = a_request([7, 7], max_tokens=4, temperature=1.0, choices=choices, ignore_eos=True)
    text = BrokenText()
    text.broken = outputs_of(request, choice=1)[1]
    assert text.broken not in outputs_of(request, 0)[:3] + outputs_of(request, 2)[:3]
    with an_engine(text=text) as engine:
        listener = submitted(engine, request)
        assert listener.end_unchecked().code == "internal"
        assert len(listener.ids(1)) == 1
        assert submitted(engine, a_request()).end().cause == "complete"


def test_resumed_tokens_without_text_are_our_fault_and_told_so(caplog):
    text = BrokenText()
    text.broken = 5
    with an_engine(text=text) as engine:
        last = submitted(engine, a_request(choices=(Choice(index=0, output_ids=(5,)),))).end()
        assert (last.code, last.retryable, last.message) == ("internal", True, "KeyError")
    assert "could not be opened" in caplog.text


class DeafListener(Listener):
    """Raises at the events of one kind, as a closed event loop would."""

    def __init__(self, *kinds):
        super().__init__()
        self.kinds = kinds

    def emit(self, events):
        if any(isinstance(event, self.kinds) for event in events):
            raise ConnectionError
        super().emit(events)


@pytest.mark.parametrize("kinds", [(Started,), (Tokens,), (Started, Finished), (Tokens, Finished)])
def test_an_emit_that_raises_aborts_its_attempt_alone(kinds):
    errors = []
    with an_engine(sink_error=lambda name, error: errors.append((name, error))) as engine:
        deaf = DeafListener(*kinds)
        request = a_request(request_id="deaf", max_tokens=50)
        assert engine.submit(request, deaf.emit) is None
        other = submitted(engine, a_request())
        assert other.end().cause == "complete"
        wait_until(lambda: not engine.progress())
        assert {name for name, _ in errors} == {"deaf:1"}
        assert len(errors) == (2 if Finished in kinds else 1)
        if Finished not in kinds:
            assert deaf.events[-1].cause == "aborted"


def test_an_emit_that_raises_is_logged_when_nobody_else_wants_to_know(caplog):
    with an_engine() as engine:
        deaf = DeafListener(Failed)
        assert engine.submit(a_request(()), deaf.emit) is None
        submitted(engine, a_request()).end()
    assert "an emit raised" in caplog.text


def test_a_bug_in_the_bookkeeping_costs_everything_once_and_is_told(caplog):
    gate = Gate()
    with an_engine(before=gate) as engine:
        first, second = submitted(engine, a_request([1, 2])), submitted(engine, a_request([3]))
        gate.wait_for_step()
        engine._stepper.scheduler.pool.device.refs[0] += 1
        engine._stepper.scheduler.complete = None
        gate.open(for_good=True)
        for listener in (first, second):
            last = listener.end()
            assert (last.code, last.retryable) == ("internal", True)
        assert "started over" in last.message
        request = a_request([1, 2])
        after = submitted(engine, request)
        assert after.end().cause == "complete"
        assert_right(after, request)
        assert not engine.load().integrity
        assert engine.load().kv_blocks_in_use == 0
    assert "the engine starts over" in caplog.text


def test_a_leak_is_found_when_the_engine_is_idle(caplog):
    with an_engine() as engine:
        submitted(engine, a_request()).end()
        pool = engine._stepper.scheduler.pool
        [leaked] = pool.take(1)
        submitted(engine, a_request()).end()
        wait_until(lambda: not engine.load().integrity)
        pool.release([leaked])
    assert "KV bookkeeping is wrong" in caplog.text


def test_stopping_fails_what_is_left_as_retryable():
    gate = Gate()
    with an_engine(before=gate, max_sequences=1) as engine:
        running, waiting = submitted(engine, a_request([1])), submitted(engine, a_request([2]))
        gate.wait_for_step()
        late = submitted(engine, a_request([3]))
        bad = submitted(engine, a_request(()))
        stopping = threading.Thread(target=engine.stop, args=(10,))
        stopping.start()
        wait_until(lambda: engine.load().draining)
        assert engine.submit(a_request(), Listener().emit).reason == "draining"
        assert engine.submit(a_request(()), Listener().emit).reason == "draining"
        gate.open()
        for listener in (running, waiting, late):
            last = listener.end()
            assert (last.code, last.retryable) == ("shutting_down", True)
        assert running.end().usage.output_tokens == 1
        assert bad.end().code == "bad_request"
        stopping.join()


def test_an_engine_that_never_started_still_tells_everyone_when_it_stops():
    with an_engine(start=False) as engine:
        listener = submitted(engine, a_request())
        engine.stop(1)
        assert listener.end().code == "shutting_down"


def test_a_step_that_hangs_does_not_hold_up_the_stop(caplog):
    gate = Gate()
    with an_engine(before=gate) as engine:
        submitted(engine, a_request())
        gate.wait_for_step()
        engine.stop(0.05)
        assert "outlasted" in caplog.text
        gate.open(for_good=True)
