"""What this gateway remembers of pools that sent requests away, and whom it spares the way.

The decisions are `gateway.overload`'s. Invariant: nothing here outlives `hold_ms_max`, so that
no mark is left on a pool that has room again; and at most `SIGHTINGS_MAX` are kept.
"""

from collections import OrderedDict
from collections.abc import Callable

from core.protocol import ServiceClass
from core.tickets import Arm, Dropped
from gateway.overload import OverloadRules, Sighting, foresee, shortened
from store.dispatch import Dispatch

SIGHTINGS_MAX = 4_096  # tenants by pool and class

_Key = tuple[str, str, ServiceClass]


class Shortage:
    """One for each gateway. `now_ms` tells Unix milliseconds."""

    def __init__(
        self, dispatch: Dispatch, now_ms: Callable[[], int], rules: OverloadRules | None = None
    ) -> None:
        self._dispatch = dispatch
        self._now_ms = now_ms
        self._rules = rules or OverloadRules()
        self._sightings: OrderedDict[_Key, Sighting] = OrderedDict()

    def saw(self, arm: Arm, dropped: Dropped) -> None:
        """The pool sent this one away."""
        now_ms = self._now_ms()
        key = (arm.pool, arm.tenant, arm.service_class)
        left_ms = arm.deadline_ms - now_ms
        self._sightings[key] = Sighting(dropped=dropped, left_ms=left_ms, at_ms=now_ms)
        self._sightings.move_to_end(key)
        if len(self._sightings) > SIGHTINGS_MAX:
            self._sightings.popitem(last=False)

    def foreseen(
        self, pool: str, tenant: str, service_class: ServiceClass, deadline_ms: int
    ) -> Dropped | None:
        """What the pool would say to such a request now, if that is known."""
        now_ms = self._now_ms()
        last = self._sightings.get((pool, tenant, service_class))
        return foresee(last, left_ms=deadline_ms - now_ms, now_ms=now_ms, rules=self._rules)

    def shortened(self, pool: str, asked: int | None, most: int) -> int | None:
        """`max_tokens`, or what the tenant's policy makes of it while others wait."""
        return shortened(asked, most, self._dispatch.congestion_ms(pool), self._rules)
