"""Where an attempt's time goes: each millisecond of its life belongs to one phase.

    queue     none of its choices runs: before its first step, and while preempted
    prefill   one runs, and there is no token yet
    decode    one runs, after the first token; what is computed again after a preemption too

Pure.
"""

from typing import Literal

from core.protocol import Timings

Phase = Literal["queue", "prefill", "decode"]


class Phases:
    """Begins in the queue. Times are milliseconds on one clock that never goes back."""

    def __init__(self, now_ms: float) -> None:
        self._spent: dict[Phase, float] = {"queue": 0.0, "prefill": 0.0, "decode": 0.0}
        self._since_ms = now_ms
        self._runs = False
        self._has_token = False

    @property
    def now(self) -> Phase:
        """The phase it is in."""
        if not self._runs:
            return "queue"
        return "decode" if self._has_token else "prefill"

    def runs(self, now_ms: float, *, any_choice: bool) -> None:
        """Whether any of its choices runs from now on."""
        if any_choice is not self._runs:
            self._account(now_ms)
            self._runs = any_choice

    def token(self, now_ms: float) -> None:
        """It has a token."""
        if not self._has_token:
            self._account(now_ms)
            self._has_token = True

    def timings(self, now_ms: float) -> Timings:
        """Until now."""
        self._account(now_ms)
        return Timings(
            queue_ms=self._spent["queue"],
            prefill_ms=self._spent["prefill"],
            decode_ms=self._spent["decode"],
        )

    def _account(self, now_ms: float) -> None:
        self._spent[self.now] += now_ms - self._since_ms
        self._since_ms = now_ms
