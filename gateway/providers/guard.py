"""Whether a request may be sent to a provider now, by what this gateway has seen of it.

    our key is not taken ─► in a cooldown ─► let in

in that order. How many may be under way, at once and in a minute, is the fleet's to count
(`gateway.relay.provider_place`). A cooldown follows failures in a row, or at once a provider's
word that it has no room; it doubles while nothing gets through between, and ends with one request
as a probe. What a caller got wrong is an answer like any other. Everything here is of one gateway:
each learns for itself that a provider fails. Times are of one monotonic clock, in seconds.
"""

from typing import Literal

import msgspec

from core.providers import ProviderSettings
from gateway.providers.faults import AWAY, Fault, FaultKind, busy

KEY_RETRY_S = 60.0  # the provider may have been told about the key meanwhile

_MESSAGES: dict[str, str] = {
    "key": "its key was not taken",
    "cooldown": "it cools down",
}


class Guard:
    """Of one provider. Whoever was let in says how it ended, exactly once."""

    def __init__(self, settings: ProviderSettings) -> None:
        self.settings = settings
        self.running = 0
        self._failures = 0  # in a row
        self._cooldowns = 0  # in a row
        self._until_s = float("-inf")
        self._why: FaultKind = "error"
        self._probing = False
        self._key_until_s = float("-inf")

    def renew(self, settings: ProviderSettings) -> None:
        """The operator changed something: what was seen before may be over."""
        self.settings = settings
        self._failures = self._cooldowns = 0
        self._until_s = self._key_until_s = float("-inf")
        self._probing = False

    def enter(self, now_s: float) -> Fault | None:
        """None lets one in, and counts it."""
        if now_s < self._key_until_s:
            return Fault(kind="error", refusal=AWAY, detail=_MESSAGES["key"])
        if now_s < self._until_s or self._probing:
            return self._cooling(now_s)
        self.running += 1
        self._probing = self._cooldowns > 0
        return None

    def leave(self, now_s: float, end: Fault | Literal["answered", "unknown"]) -> None:
        """`unknown` is for one that was called off before there was any answer."""
        assert self.running > 0
        self.running -= 1
        match end:
            case "unknown":
                self._probing = False
            case Fault(key_dead=True):
                self._probing = False
                self._key_until_s = now_s + KEY_RETRY_S
            case Fault(kind="capacity"):
                asked_ms = end.refusal.retry_after_ms or 0
                self._cool(now_s, end.kind, at_least_s=asked_ms / 1000)
            case Fault(counts=True):
                self._failures += 1
                if self._failures >= self.settings.failures or self._cooldowns:
                    self._cool(now_s, end.kind)
            case _:
                self._failures = self._cooldowns = 0
                self._probing = False
                self._key_until_s = float("-inf")

    @property
    def key_dead(self) -> bool:
        """Whether the provider has said no to our key, and nothing has changed since."""
        return self._key_until_s > float("-inf")

    def _cool(self, now_s: float, why: FaultKind, *, at_least_s: float = 0.0) -> None:
        """From now on; what was under way when it began does not lengthen it twice."""
        self._probing = False
        if now_s < self._until_s:
            self._until_s = max(self._until_s, now_s + at_least_s)
            return
        doubled_ms = self.settings.cooldown_ms * 2 ** min(self._cooldowns, 30)
        wait_s = min(doubled_ms, self.settings.cooldown_max_ms) / 1000
        self._until_s = now_s + max(wait_s, at_least_s)
        self._cooldowns += 1
        self._why = why

    def _cooling(self, now_s: float) -> Fault:
        wait_s = max(self._until_s - now_s, self.settings.cooldown_ms / 1000)
        fault = busy(_MESSAGES["cooldown"], _ms(wait_s)).fault
        if self._why == "capacity":
            return fault
        refusal = msgspec.structs.replace(AWAY, retry_after_ms=fault.refusal.retry_after_ms)
        return msgspec.structs.replace(fault, kind=self._why, refusal=refusal)


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000 + 0.999))
