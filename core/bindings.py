"""Which target a conversation is bound to: the first one drawn for it, while that is allowed.

`store/lua` holds the same for all gateways together (`bind`). A binding nobody asks for lapses.
"""

from collections.abc import Collection

import msgspec


class BindingRules(msgspec.Struct, frozen=True, kw_only=True):
    """How long a binding outlives its last request."""

    idle_ms: int = 3_600_000


class Bindings:
    """By conversation. Times are Unix milliseconds."""

    def __init__(self, rules: BindingRules) -> None:
        self._rules = rules
        self._bound: dict[str, tuple[str, int]] = {}

    def bind(self, name: str, drawn: str, allowed: Collection[str], now_ms: int) -> str:
        """The target it is bound to from now on: the one it was, or else the one drawn."""
        target, until_ms = self._bound.get(name, ("", 0))
        if now_ms >= until_ms or target not in allowed:
            target = drawn
        self._bound[name] = (target, now_ms + self._rules.idle_ms)
        return target
