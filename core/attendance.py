"""Which gateways a pool hears from, in which epoch, and whether it knows what they hold.

A lost memory is a new epoch: nothing is placed in it before the gateways had time to say what
runs. Invariant: its clock never goes back.
"""

from core.pool_rules import PoolRules
from core.ranking import Ranking
from core.tickets import Renew


class Attendance:
    """An epoch of "" is a pool that nobody has spoken to yet."""

    def __init__(self, rules: PoolRules) -> None:
        self._rules = rules
        self.now_ms = 0
        self.epoch = ""
        self.started_ms = 0
        self.gateways = Ranking()  # by the end of their lease
        self.owing: set[str] = set()  # gateways whose tickets are not all known

    def advance(self, now_ms: int) -> None:
        """Move the clock, unless that is backwards."""
        self.now_ms = max(self.now_ms, now_ms) if self.epoch else now_ms

    def heard(self, gateway: str) -> bool:
        """Extend the gateway's lease; false when it had none. The first one begins the epoch."""
        if not self.epoch:
            self.epoch = f"{self.now_ms}-{gateway}"
            self.started_ms = self.now_ms
        known = gateway in self.gateways
        self.gateways.put(gateway, self.now_ms + self._rules.lease_ms)
        return known

    def is_behind(self, renew: Renew, *, known: bool) -> bool:
        """Whether the gateway must announce what it holds, because that was lost or let go."""
        if renew.announces:
            self.owing.discard(renew.gateway)
            return False
        if not known or renew.epoch != self.epoch:
            self.owing.add(renew.gateway)
        return renew.gateway in self.owing

    def is_open(self) -> bool:
        """Whether tickets may be placed: not before a new epoch knows what is running."""
        age_ms = self.now_ms - self.started_ms
        if age_ms < self._rules.reannounce_ms or not self.epoch:
            return False
        return not self.owing or age_ms >= self._rules.reannounce_max_ms

    def lapsed(self) -> str | None:
        """The gateway that has been silent for longest, if for a whole lease."""
        for lease_ms, gateway in self.gateways.first(1):
            if lease_ms <= self.now_ms:
                return gateway
        return None

    def let_go(self, gateway: str, *, all_of_it: bool) -> None:
        """Its tickets are gone, or so many of them as one call takes."""
        if all_of_it:
            self.gateways.drop(gateway)
            self.owing.discard(gateway)
        else:
            self.owing.add(gateway)  # one that comes back before the rest are gone
