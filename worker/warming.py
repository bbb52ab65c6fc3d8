"""Synthetic generations through the whole engine, before anybody is sent to it.

A start-up's largest steps measure the runner alone (`worker.warm_up`). These go the way of a
request: admission, scheduler, sampler, detokenizer. A worker whose first answer would fail ends
instead of becoming ready.
"""

import asyncio
import os
from collections.abc import Sequence
from typing import Protocol

from core.protocol import Choice, Failed, Finished, Generate, Nack, Sampling
from worker.events import Emit, Event

GENERATIONS = 2  # side by side, so that a step has more than one row
# Together less than one block, so that nothing of them stays in the prefix cache.
PROMPT_TOKENS = 8
OUTPUT_TOKENS = 4
SALT = b"warm-up"


class WarmUpError(Exception):
    """The engine could not answer; the message says why."""


class Submitting(Protocol):
    """What is used of the engine."""

    def submit(self, request: Generate, emit: Emit) -> Nack | None:
        """Take a request, or say why not."""


async def warm(engine: Submitting, *, version: str, context_tokens: int) -> int:
    """The tokens that were made. Raises WarmUpError; a step that hangs is the watchdog's."""
    asked = [
        _generate(engine, _request(number, version, context_tokens))
        for number in range(GENERATIONS)
    ]
    return sum(await asyncio.gather(*asked))


async def _generate(engine: Submitting, request: Generate) -> int:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Finished | Failed] = loop.create_future()

    def tell(last: Finished | Failed) -> None:
        if not ended.done():
            ended.set_result(last)

    def emit(events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Finished | Failed):
                loop.call_soon_threadsafe(tell, event)

    refused = engine.submit(request, emit)
    if refused is not None:
        raise WarmUpError(f"a first request was refused: {refused.reason}")
    last = await ended
    if isinstance(last, Failed):
        raise WarmUpError(f"a first request failed: {last.code}: {last.message}")
    if not last.usage.output_tokens:
        raise WarmUpError(f"a first request made no token: {last.cause}")
    return last.usage.output_tokens


def _request(number: int, version: str, context_tokens: int) -> Generate:
    prompt = max(1, min(PROMPT_TOKENS, context_tokens - OUTPUT_TOKENS))
    tokens = max(1, min(OUTPUT_TOKENS, context_tokens - prompt))
    return Generate(
        request_id=f"warm-{os.urandom(8).hex()}",
        attempt=1,
        version=version,
        prompt_ids=(0,) * prompt,
        choices=(Choice(index=0),),
        sampling=Sampling(seed=number, max_tokens=tokens, min_tokens=tokens, temperature=0.0),
        tenant_salt=SALT,
    )
