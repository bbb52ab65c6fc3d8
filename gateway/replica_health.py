"""What this gateway has seen of each replica's present life: whom to pass over when placing.

Each gateway learns by itself, within a few requests. Nothing is kept of a replica that has
not failed, so that a healthy fleet costs nothing. A pool is never passed over as a whole: the
dispatcher takes excluded replicas back where there are no others.
"""

from collections.abc import Callable, Iterable

from core.tickets import ReplicaView
from gateway.breaker import Breaker, BreakerRules

LIVES_MAX = 4_096


class Watch:
    """One attempt on one life of a replica, from its beginning on."""

    def __init__(self, health: "ReplicaHealth", boot_id: str, begun_ms: int) -> None:
        self._health = health
        self._boot_id = boot_id
        self._begun_ms = begun_ms
        self._got_on = False

    def got_on(self) -> None:
        """It has its first token, or another."""
        if not self._got_on:
            self._got_on = True
            self._health.got_on(self._boot_id, self._begun_ms)

    def finished(self) -> None:
        """It ended as it should, whatever it ended with."""
        self._health.finished(self._boot_id)

    def failed(self) -> None:
        """It came to nothing, by the replica's fault."""
        self._health.failed(self._boot_id, self._begun_ms)


class ReplicaHealth:
    """The breakers, by boot id. `now_ms` is a monotonic clock."""

    def __init__(self, rules: BreakerRules, now_ms: Callable[[], int]) -> None:
        self._rules = rules
        self._now_ms = now_ms
        self._breakers: dict[str, Breaker] = {}

    def watch(self, boot_id: str) -> Watch:
        """An attempt begins there."""
        return Watch(self, boot_id, self._now_ms())

    def shunned(self, replicas: Iterable[ReplicaView]) -> frozenset[str]:
        """Those of these replicas that the next request should not go to."""
        if not self._breakers:
            return frozenset()
        now_ms = self._now_ms()
        return frozenset(
            view.replica
            for view in replicas
            if (breaker := self._breakers.get(view.boot_id)) and not breaker.allows(now_ms)
        )

    def is_failing(self, boot_id: str) -> bool:
        """Whether this life is passed over for what happened lately."""
        breaker = self._breakers.get(boot_id)
        return breaker is not None and breaker.is_failing(self._now_ms())

    @property
    def open_count(self) -> int:
        """Lives that are passed over now."""
        return sum(breaker.is_open for breaker in self._breakers.values())

    def keep(self, boot_ids: Iterable[str]) -> None:
        """These are all the lives there are: forget the others, and those that are well."""
        if not self._breakers:
            return
        now_ms, alive = self._now_ms(), set(boot_ids)
        self._breakers = {
            boot_id: breaker
            for boot_id, breaker in self._breakers.items()
            if boot_id in alive and not breaker.is_idle(now_ms)
        }

    # What a watch tells.

    def failed(self, boot_id: str, begun_ms: int) -> None:
        """See `Breaker`."""
        breaker = self._breakers.get(boot_id)
        if breaker is None:
            if len(self._breakers) >= LIVES_MAX:
                return
            breaker = self._breakers[boot_id] = Breaker(self._rules)
        breaker.failed(begun_ms, self._now_ms())

    def got_on(self, boot_id: str, begun_ms: int) -> None:
        """See `Breaker`."""
        breaker = self._breakers.get(boot_id)
        if breaker is not None:
            breaker.got_on(begun_ms)

    def finished(self, boot_id: str) -> None:
        """See `Breaker`."""
        breaker = self._breakers.get(boot_id)
        if breaker is not None:
            breaker.finished(self._now_ms())
