"""Synthetic generations before a worker is ready: real ones, or it never is."""

import asyncio

import pytest

from core.protocol import Failed, Finished, Nack, Timings, Usage
from tests.support.engine_requests import VERSION, FakeText
from tests.support.fake_runner import FakeRunner
from worker.engine import Engine, EngineConfig
from worker.warming import GENERATIONS, OUTPUT_TOKENS, PROMPT_TOKENS, WarmUpError, warm

pytestmark = pytest.mark.anyio

BLOCK_TOKENS = 16
ABORTED = Finished(cause="aborted", usage=Usage(), timings=Timings(), journal_seq=0)


def an_engine(*, before=lambda plan: None, context_tokens=64):
    config = EngineConfig(
        version=VERSION,
        boot_id="boot",
        kv_blocks=8,
        block_tokens=BLOCK_TOKENS,
        context_tokens=context_tokens,
    )
    runner = FakeRunner(8, BLOCK_TOKENS, before)
    return Engine(runner=runner, text=FakeText(), config=config)


async def warmed(engine, context_tokens=64):
    engine.start()
    try:
        async with asyncio.timeout(20):
            return await warm(engine, version=VERSION, context_tokens=context_tokens)
    finally:
        await asyncio.to_thread(engine.stop, 5)


async def test_real_generations_run_and_leave_nothing_behind():
    engine = an_engine()
    assert await warmed(engine) == GENERATIONS * OUTPUT_TOKENS
    load = engine.load()
    assert load.steps > 0
    assert (load.kv_blocks_in_use, load.kv_blocks_cached) == (0, 0)
    assert PROMPT_TOKENS + OUTPUT_TOKENS < BLOCK_TOKENS, "no block is whole, so none is kept"


@pytest.mark.parametrize("context_tokens", [2, 3, 11, 12])
async def test_a_short_context_is_warmed_with_what_fits(context_tokens):
    assert await warmed(an_engine(context_tokens=context_tokens), context_tokens) > 0


async def test_an_engine_that_cannot_answer_is_not_ready():
    def fail(plan):
        raise ZeroDivisionError

    with pytest.raises(WarmUpError, match="a first request failed: internal"):
        await warmed(an_engine(before=fail))


class Scripted:
    """An engine of which only the last word is known."""

    def __init__(self, answer):
        self.answer = answer

    def submit(self, request, emit):
        if isinstance(self.answer, Nack):
            return self.answer
        emit([self.answer])
        emit([self.answer])  # whoever tells twice is heard once
        return None


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Nack(reason="full"), "refused: full"),
        (ABORTED, "made no token: aborted"),
        (Failed(code="x", message="y", retryable=True, usage=Usage()), "failed: x: y"),
    ],
)
async def test_the_reason_is_told(answer, said):
    with pytest.raises(WarmUpError, match=said):
        await warm(Scripted(answer), version=VERSION, context_tokens=64)
