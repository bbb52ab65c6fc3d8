"""An answer from the cache in a generation's place: nothing is placed, produced or waited for.

It goes through the same channel, and so through the tenant's safety policy as it is now. What it
costs is the policy's word; the tokens that it tells of were another request's.
"""

import asyncio

import msgspec

from core.metering import AttemptTotals, RequestTimings, Witness
from core.money import EndCause
from core.protocol import Usage
from gateway.answer_cache import Charge, charged
from gateway.conversation import ChoiceEnd, Done
from gateway.relay.channel import Channel
from gateway.relay.delivery import Times
from gateway.relay.job import Outcome
from gateway.replay import KeptAnswer

REPLICA = "cache"  # in a settled row, in the place of a replica


class CachedRun:
    """Of one hit."""

    untold_tokens = 0

    def __init__(self, kept: KeptAnswer, *, charge: Charge, channel: Channel) -> None:
        self._kept = kept
        self._channel = channel
        self.times = Times()
        told = kept.events[-1][0]
        assert isinstance(told, Done), "only whole answers are kept"
        prompt = told.usage.prompt_tokens
        self.usage = msgspec.structs.replace(
            told.usage, cached_tokens=prompt, cache_write_5m_tokens=0, cache_write_1h_tokens=0
        )
        self.charged = charged(charge, prompt) or Usage()
        self.totals: list[AttemptTotals] = []
        if self.charged != Usage():
            totals = AttemptTotals(attempt=1, replica_id=REPLICA, usage=self.charged)
            self.totals.append(totals)

    async def run(self) -> Outcome:
        """Tell all of it but the end, which is the exchange's to tell."""
        self.times.first_token_s = self.times.last_token_s = asyncio.get_running_loop().time()
        by_length = False
        for event, _ in self._kept.events[:-1]:
            by_length = by_length or (isinstance(event, ChoiceEnd) and event.finish == "length")
            self._channel.push(event)
            await self._channel.room()
        if self._channel.filtered:
            return Outcome(cause=EndCause.FILTERED)
        return Outcome(cause=EndCause.LENGTH if by_length else EndCause.COMPLETE)

    async def stop(self) -> None:
        """There is nothing under way."""

    def witnesses(self, now_ms: int) -> tuple[Witness, ...]:  # noqa: ARG002 - nothing is under way
        """None: it is over before a checkpoint."""
        return ()

    def timings(self, received_s: float, total_ms: float) -> RequestTimings:
        """As the caller felt them."""
        first_s = self.times.first_token_s
        first_ms = (first_s - received_s) * 1000 if first_s else None
        return RequestTimings(first_token_ms=first_ms, total_ms=total_ms)
