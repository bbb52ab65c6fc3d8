"""The other side of an engine's `emit`: collects events, waits for the end, checks the grammar."""

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from core.protocol import Failed, Finished, Prompted, Started, Tokens
from tests.support.engine_requests import EOS, VERSION, FakeText
from tests.support.fake_runner import FakeRunner, expected
from worker.engine import Engine, EngineConfig

WAIT_S = 20
ENGINE_ARGUMENTS = ("wall_ms", "sink_error", "step_timeout_s", "on_step")
TEXT = FakeText()


class Listener:
    """Pass `listener.emit` to `submit`."""

    def __init__(self):
        self.events = []
        self._changed = threading.Condition()

    def emit(self, events):
        with self._changed:
            self.events += events
            self._changed.notify_all()

    def wait_until(self, condition):
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), WAIT_S), self.events

    def end(self):
        """The last event, checked to be the only one of its kind and in its place."""
        last = self.end_unchecked()
        assert_grammar(self.events)
        return last

    def end_unchecked(self):
        self.wait_until(lambda _: self.events and isinstance(self.events[-1], Finished | Failed))
        return self.events[-1]

    def ids(self, choice=0):
        return [i for t in self.tokens(choice) for i in t.ids]

    def text(self, choice=0):
        return "".join(t.text for t in self.tokens(choice))

    def tokens(self, choice=0):
        return [e for e in self.events if isinstance(e, Tokens) and e.choice == choice]

    @property
    def started(self):
        return next((e for e in self.events if isinstance(e, Started)), None)


def assert_grammar(events):
    *before, last = events
    assert isinstance(last, Finished | Failed)
    if not before:
        assert isinstance(last, Failed) or last.cause in ("aborted", "expired")
        return
    assert isinstance(before[0], Started)
    before = list(itertools.dropwhile(lambda event: isinstance(event, Prompted), before[1:]))
    assert all(isinstance(event, Tokens) for event in before)
    finished = [event.choice for event in before if event.finish]
    assert len(set(finished)) == len(finished), "a choice finishes once"
    for choice in finished:
        assert [e for e in before if e.choice == choice][-1].finish
    produced = sum(len(event.ids) for event in before)
    assert last.usage.output_tokens == produced


@contextmanager
def an_engine(*, before=lambda plan: None, text=None, start=True, **changes) -> Iterator[Engine]:
    """An engine over the fake runner, stopped at the end and then empty."""
    arguments = {k: changes.pop(k) for k in ENGINE_ARGUMENTS if k in changes}
    defaults = {"kv_blocks": 64, "block_tokens": 4, "max_batched_tokens": 16, "max_sequences": 8}
    defaults |= {"context_tokens": 200, "version": VERSION, "boot_id": "boot_1"}
    config = EngineConfig(**(defaults | {"waiting_tokens_max": 10_000} | changes))
    engine = Engine(
        runner=FakeRunner(config.kv_blocks, config.block_tokens, before),
        text=text or FakeText(),
        config=config,
        **arguments,
    )
    if start:
        engine.start()
    try:
        yield engine
    finally:
        engine.stop(WAIT_S)
    assert not engine._thread.is_alive()
    assert engine.load().kv_blocks_in_use == 0
    assert engine._stepper.scheduler.problems() == []
    assert not engine._accepted
    assert not engine._stepper._live


class Gate:
    """A `before` that lets one step pass for each `open()`, and says when one is waiting."""

    def __init__(self):
        self.plans = []
        self._permits = threading.Semaphore(0)
        self._arrived = threading.Semaphore(0)
        self._free = False

    def __call__(self, plan):
        self.plans.append(plan)
        self._arrived.release()
        if not self._free:
            assert self._permits.acquire(timeout=WAIT_S)

    def wait_for_step(self):
        assert self._arrived.acquire(timeout=WAIT_S)
        return self.plans[-1]

    def open(self, *, for_good=False):
        self._free = for_good
        self._permits.release()


def submitted(engine, request):
    listener = Listener()
    assert engine.submit(request, listener.emit) is None
    return listener


def assert_right(listener, request, choice=0):
    """Ids are the model's, cut where the model ends its text; text is their decode."""
    ids = listener.ids(choice)
    sampling = request.sampling
    model = expected(request.prompt_ids, sampling, choice, sampling.max_tokens)
    if EOS in model and not sampling.ignore_eos:
        model = model[: model.index(EOS) + 1]
    assert ids == model[: len(ids)]
    last = listener.tokens(choice)[-1]
    if last.finish == "length":
        assert len(ids) == request.sampling.max_tokens
    if last.finish is not None and last.stop is None:
        assert listener.text(choice) == TEXT.decode(ids)
    elif last.stop is not None:
        assert TEXT.decode(ids).startswith(listener.text(choice) + last.stop)


def wait_until(condition):
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it did not come about")
