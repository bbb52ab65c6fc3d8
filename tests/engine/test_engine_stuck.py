"""A step that never returns: everyone is told, once, by another thread."""

import threading
import time

import pytest

from core.protocol import Failed, Finished, Nack, Tokens
from tests.support.engine_listener import Gate, Listener, an_engine, submitted, wait_until
from tests.support.engine_requests import a_request
from worker.watchdog import EXIT_STUCK, Watchdog


class Recorded:
    """A guard that only remembers."""

    def __init__(self):
        self.ended = []
        self.expected = []
        self.resting = False

    def expect_life(self, within_s):
        self.expected.append(within_s)

    def rest(self):
        self.resting = True

    def end(self, status):
        self.ended.append(status)


def watched(engine, *, guard=None, tick_s=0.01):
    stuck = threading.Event()
    dog = Watchdog(engine, on_stuck=stuck.set, guard=guard or Recorded(), tick_s=tick_s)
    dog.start()
    return dog, stuck


def last_words(listener):
    return [e for e in listener.events if isinstance(e, Failed | Finished)]


def test_a_stuck_step_fails_everyone_once_and_the_engine_takes_nothing_more():
    # vllm 45388: a stuck engine held its requests for ever.
    gate = Gate()
    with an_engine(before=gate, max_sequences=2, step_timeout_s=0.2) as engine:
        dog, stuck = watched(engine)
        running = [submitted(engine, a_request(max_tokens=50)) for _ in range(2)]
        for _ in range(3):
            gate.open()
            gate.wait_for_step()
        waiting = [submitted(engine, a_request()) for _ in range(2)]
        bad = submitted(engine, a_request(()))
        assert stuck.wait(20)
        for listener in [*running, *waiting]:
            last = listener.end_unchecked()
            assert (last.code, last.retryable) == ("internal", True)
            produced = sum(len(e.ids) for e in listener.events if isinstance(e, Tokens))
            assert last.usage.output_tokens == produced
        assert bad.end_unchecked().code == "bad_request"
        assert not engine.load().healthy
        assert engine.submit(a_request(), Listener().emit) == Nack(reason="draining")
        dog.stop()
        gate.open(for_good=True)
        engine._thread.join(20)
        assert all(len(last_words(each)) == 1 for each in [*running, *waiting, bad])


def test_a_step_that_outlasts_a_stop_leaves_nobody_without_a_last_word():
    gate = Gate()
    with an_engine(before=gate) as engine:
        listener = submitted(engine, a_request())
        gate.wait_for_step()
        engine.stop(0.05)
        last = listener.end_unchecked()
        assert (last.code, last.retryable) == ("shutting_down", True)
        gate.open(for_good=True)
        engine._thread.join(20)
        assert len(last_words(listener)) == 1


def test_slow_steps_are_not_stuck_ones():
    guard = Recorded()
    with an_engine(before=lambda _plan: time.sleep(0.05), step_timeout_s=0.3) as engine:
        dog, stuck = watched(engine, guard=guard)
        listener = submitted(engine, a_request(max_tokens=20, ignore_eos=True))
        assert listener.end().cause == "complete"
        assert not stuck.is_set()
        dog.stop()
    assert guard.resting
    assert min(guard.expected) > 0.3
    assert guard.ended == []


def test_an_idle_engine_is_not_stuck():
    with an_engine(step_timeout_s=0.05) as engine:
        dog, stuck = watched(engine)
        assert submitted(engine, a_request()).end().cause == "complete"
        assert not stuck.wait(0.3)
        dog.stop()


def test_an_emit_that_hangs_is_stuck_too_and_the_others_are_told():
    entered, leave = threading.Event(), threading.Event()

    def hanging(_events):
        entered.set()
        leave.wait(20)

    with an_engine(step_timeout_s=0.1) as engine:
        _, stuck = watched(engine)
        other = submitted(engine, a_request(max_tokens=500))
        assert engine.submit(a_request(), hanging) is None
        assert entered.wait(20)
        assert stuck.wait(20)
        assert isinstance(other.end_unchecked(), Failed)
        leave.set()


def test_where_nobody_ends_the_process_the_guard_does(monkeypatch):
    monkeypatch.setattr("worker.watchdog.GRACE_S", 0.05)
    gate, guard = Gate(), Recorded()
    with an_engine(before=gate, step_timeout_s=0.1) as engine:
        watched(engine, guard=guard)
        submitted(engine, a_request())
        wait_until(lambda: guard.ended)
        assert guard.ended == [EXIT_STUCK]
        gate.open(for_good=True)


@pytest.mark.parametrize("code", ["internal", "shutting_down"])
def test_giving_up_an_engine_that_never_started_tells_everyone(code):
    with an_engine(start=False) as engine:
        listener = submitted(engine, a_request())
        engine.give_up(code, "no more")
        assert listener.end_unchecked().code == code
