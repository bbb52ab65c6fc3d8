"""How many failed attempts the fleet makes again: a share of its recent requests, and a floor.

When replicas die one after the other, every retry is work for those that are left. Past the
budget a death is told to the client instead. `store/lua/spend_retry.lua` is the same for all
gateways together; this twin serves a gateway that is alone.
"""

import msgspec

from core.window import Window


class RetryRules(msgspec.Struct, frozen=True, kw_only=True):
    """The budget. What a window allows is its floor and its share together."""

    window_ms: int = 10_000
    permille: int = 200  # of the requests in the window
    floor: int = 50  # in a window


class RetryBudget:
    """The budget's state. Times are Unix milliseconds."""

    def __init__(self, rules: RetryRules) -> None:
        self._rules = rules
        self.requests = Window(span_ms=rules.window_ms)
        self.retries = Window(span_ms=rules.window_ms)

    def spend(self, *, requests: int, wanted: int, now_ms: int) -> bool:
        """Note new requests, and take `wanted` retries, or none of them."""
        self.requests.add(requests, now_ms)
        allowed = self._rules.floor + self._rules.permille * self.requests.total(now_ms) // 1000
        if self.retries.total(now_ms) + wanted > allowed:
            return False
        self.retries.add(wanted, now_ms)
        return True
