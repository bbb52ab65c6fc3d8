"""What a generation's attempts are known to have cost, and how long its parts took."""

import msgspec

from core.metering import AttemptTotals, RequestTimings, Witness
from core.money import EndCause
from core.protocol import Timings, Usage
from gateway.relay.delivery import Times


class Totals:
    """Those of the attempts that have ended. One that did nothing has none."""

    def __init__(self, request_id: str, *, prompt_tokens: int) -> None:
        self._request_id = request_id
        self._prompt_tokens = prompt_tokens
        self.ended: list[AttemptTotals] = []
        self.engine_timings = Timings()

    @property
    def usage(self) -> Usage:
        """The answer's: the prompt once, the output of all attempts."""
        usages = [total.usage for total in self.ended]
        return msgspec.structs.replace(
            usages[-1] if usages else Usage(),
            prompt_tokens=self._prompt_tokens,
            output_tokens=sum(usage.output_tokens for usage in usages),
            reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
        )

    @property
    def failed_cause(self) -> EndCause:
        """What a failure is called: one that cost nothing never started."""
        return EndCause.FAILED if self.ended else EndCause.NOT_STARTED

    def witnesses(self, running: AttemptTotals | None, now_ms: int) -> tuple[Witness, ...]:
        """Every attempt's so far, as a checkpoint tells them."""
        return tuple(
            Witness(
                request_id=self._request_id,
                attempt=total.attempt,
                source="checkpoint",
                usage=total.usage,
                final=False,
                replica_id=total.replica_id,
                at_ms=now_ms,
            )
            for total in (*self.ended, *([running] if running else []))
        )

    def timings(self, times: Times, *, received_s: float, total_ms: float) -> RequestTimings:
        """What is known of them."""
        gaps = self.usage.output_tokens - 1
        first_ms = inter_ms = None
        if times.first_token_s:
            first_ms = (times.first_token_s - received_s) * 1000
            if gaps > 0:
                inter_ms = (times.last_token_s - times.first_token_s) * 1000 / gaps
        return RequestTimings(
            queue_ms=(times.placed_s - times.armed_s) * 1000 if times.placed_s else None,
            prefill_ms=self.engine_timings.prefill_ms if times.first_token_s else None,
            first_token_ms=first_ms,
            inter_token_ms=inter_ms,
            total_ms=total_ms,
        )
