"""What is done about a request before it is submitted, off the event loop."""

import asyncio
import threading

import pytest

from core.protocol import Grammar
from tests.support.engine_requests import a_request
from worker import preparation
from worker.preparation import Preparation

pytestmark = pytest.mark.anyio
HELD = a_request(grammar=Grammar(kind="json_object"))


class SlowEngine:
    """Prepares when it is let."""

    def __init__(self):
        self.prepared = []
        self.gate = threading.Event()

    def prepare(self, request):
        assert self.gate.wait(10)
        self.prepared.append(request)


async def test_a_request_without_a_grammar_passes_at_once():
    engine = SlowEngine()
    assert await Preparation().of(a_request(), engine)
    assert not engine.prepared


async def test_a_request_waits_for_its_grammar_and_the_loop_does_not():
    engine, way = SlowEngine(), Preparation()
    waiting = asyncio.create_task(way.of(HELD, engine))
    assert await way.of(a_request(), engine)
    await asyncio.sleep(0.01)
    assert not waiting.done()
    engine.gate.set()
    assert await waiting
    assert engine.prepared == [HELD]


async def test_too_many_that_wait_are_refused(monkeypatch):
    monkeypatch.setattr(preparation, "WAITING_MAX", 3)
    engine, way = SlowEngine(), Preparation()
    waiting = [asyncio.create_task(way.of(HELD, engine)) for _ in range(3)]
    await asyncio.sleep(0)
    assert not await way.of(HELD, engine)
    engine.gate.set()
    assert all(await asyncio.gather(*waiting))
    assert await way.of(HELD, engine)
