"""What a request to a provider came to, as far as anyone has said.

    told       with the answer, or after it was cut: the provider's own totals
    estimated  what we read of the answer, counted by `gateway.providers.estimate`

A settled row says which, in place of a replica. A checkpoint is for when this gateway does not
live to settle, and two words about an attempt are merged to the larger: so what it says of an
estimate is half of it, to be too little and not too much.
"""

import msgspec

from core.metering import AttemptTotals, RequestTimings, Witness
from core.protocol import Usage
from core.providers import Told, provider_replica
from gateway.conversation import CallDelta, CallStart, Delta, StreamEvent, ThoughtDelta
from gateway.providers.estimate import PART, text_weight
from gateway.relay.delivery import Times

ATTEMPT = 1  # a provider is asked once: what follows a failure is another target's


class ProviderTotals:
    """Of one request. `prompt_tokens` is the estimate that it was admitted with."""

    def __init__(self, request_id: str, provider: str, *, prompt_tokens: int) -> None:
        self._request_id = request_id
        self._provider = provider
        self._prompt_tokens = prompt_tokens
        self._weight = 0  # of text without log probabilities
        self._thought_weight = 0  # within
        self._counted = 0  # tokens that came with theirs
        self.begun = False  # the provider has accepted it
        self.told: Usage | None = None
        self.is_final = False  # what is told is of all that was produced
        self.drained = False
        self.ended = False

    def take(self, event: StreamEvent) -> None:
        """Count what an event brings."""
        match event:
            case Delta(chances=chances) if chances:
                self._counted += len(chances)
            case Delta(text=text) | CallStart(name=text) | CallDelta(arguments=text):
                self._weight += text_weight(text)
            case ThoughtDelta(text=text):
                self._weight += text_weight(text)
                self._thought_weight += text_weight(text)
            case _:
                pass

    @property
    def output_tokens(self) -> int:
        """So far: counted where that can be done, else estimated."""
        return self._counted - (-self._weight // PART)

    @property
    def _thought_tokens(self) -> int:
        return -(-self._thought_weight // PART)

    @property
    def usage(self) -> Usage:
        """The best that is known."""
        told = self.told
        if told is None:
            return Usage(
                prompt_tokens=self._prompt_tokens,
                output_tokens=self.output_tokens,
                reasoning_tokens=self._thought_tokens,
            )
        if self.is_final:
            return told
        # Anthropic's dialect tells of a prompt at once, and of an answer only at its end.
        output = max(told.output_tokens, self.output_tokens)
        reasoning = max(told.reasoning_tokens, self._thought_tokens)
        return msgspec.structs.replace(told, output_tokens=output, reasoning_tokens=reasoning)

    @property
    def all(self) -> list[AttemptTotals]:
        """Once it has ended; none for a request that the provider did not accept."""
        if not (self.begun and self.ended):
            return []
        how: Told = "estimated"
        if self.is_final:
            how = "drained" if self.drained else "told"
        replica = provider_replica(self._provider, how)
        return [AttemptTotals(attempt=ATTEMPT, replica_id=replica, usage=self.usage)]

    def witnesses(self, now_ms: int) -> tuple[Witness, ...]:
        """A lower bound, while it runs or after."""
        if not self.begun:
            return ()
        known = self.told or Usage(prompt_tokens=self._prompt_tokens // 2)
        if not self.is_final:
            output = self.output_tokens // 2
            reasoning = min(known.reasoning_tokens, output)
            known = msgspec.structs.replace(known, output_tokens=output, reasoning_tokens=reasoning)
        return (
            Witness(
                request_id=self._request_id,
                attempt=ATTEMPT,
                source="checkpoint",
                usage=known,
                final=False,
                replica_id=provider_replica(self._provider, "estimated"),
                at_ms=now_ms,
            ),
        )

    def timings(self, times: Times, *, received_s: float, total_ms: float) -> RequestTimings:
        """What is known of them; a provider does not tell of its own."""
        first_ms = inter_ms = None
        gaps = self.usage.output_tokens - 1
        if times.first_token_s:
            first_ms = (times.first_token_s - received_s) * 1000
            if gaps > 0:
                inter_ms = (times.last_token_s - times.first_token_s) * 1000 / gaps
        return RequestTimings(
            queue_ms=(times.placed_s - times.armed_s) * 1000 if times.placed_s else None,
            first_token_ms=first_ms,
            inter_token_ms=inter_ms,
            total_ms=total_ms,
        )
