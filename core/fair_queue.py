"""Who waits, and who is next: classes by rank and share, tenants by virtual token counter.

Knows no replicas and no clock. Inside a class the tenant with the smallest counter is next
(VTC: Sheng et al., "Fairness in Serving Large Language Models", 2024, algorithm 2): charged
for what it is served, over its weight, and lifted on re-entry, so that idling saves nothing
up. A lower class is next while its share of what higher ones were given is owed to it.
"""

from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from core.protocol import ServiceClass
from core.ranking import Ranking

CLASSES: tuple[ServiceClass, ...] = ("interactive", "standard", "batch")  # by rank
COST_UNITS = 1_000  # of one input token at weight 1
OUTPUT_TOKEN_COST = 2  # input tokens
SHARE_ONE = 1_000  # a share is in thousandths


class QueueRules(msgspec.Struct, frozen=True, kw_only=True):
    """Shares are of the KV blocks given to higher classes, in thousandths."""

    share_standard: int = 100
    share_batch: int = 10
    credit_blocks_max: int = 1_024  # how much share a class may save up
    queue_max: int = 4_096  # tickets in one class
    tenants_max: int = 16_384  # whose counters are remembered


class Head(msgspec.Struct, frozen=True):
    """The next ticket. `owed` says that it is next for its class's share, not its rank."""

    service_class: ServiceClass
    tenant: str
    ticket: str
    owed: bool


class FairQueue:
    """Waiting tickets of one pool, and every tenant's counter."""

    def __init__(self, rules: QueueRules) -> None:
        self._rules = rules
        self._share = {"standard": rules.share_standard, "batch": rules.share_batch}
        self.waiting: dict[str, Ranking] = {name: Ranking() for name in CLASSES}
        self.tickets: dict[tuple[str, str], OrderedDict[str, None]] = {}
        self.counts: dict[str, int] = dict.fromkeys(CLASSES, 0)
        self.credits: dict[str, int] = dict.fromkeys(CLASSES, 0)
        self.floors: dict[str, int] = dict.fromkeys(CLASSES, 0)
        self.counters = Ranking()
        self.base = 0  # counter of a tenant not remembered

    def __len__(self) -> int:
        return sum(self.counts.values())

    def is_full(self, service_class: ServiceClass) -> bool:
        """Whether no ticket may join but one that is coming back."""
        return self.counts[service_class] >= self._rules.queue_max

    def position(self, service_class: ServiceClass) -> int:
        """Tickets waiting in this class and above."""
        rank = CLASSES.index(service_class)
        return sum(self.counts[name] for name in CLASSES[: rank + 1])

    def place(self, service_class: ServiceClass, tenant: str, *, joined: bool) -> int:
        """Tickets served up to and with the tenant's last one, or one more that would join.

        At most: of its own class every other tenant has as many turns as it has itself.
        """
        rank = CLASSES.index(service_class)
        ahead = sum(self.counts[name] for name in CLASSES[:rank])
        own = len(self.tickets.get((service_class, tenant), ()))
        others = len(self.waiting[service_class]) - (own > 0)
        before = own - joined
        return ahead + min(self.counts[service_class] - joined, before + others * (before + 1)) + 1

    def push(
        self, service_class: ServiceClass, tenant: str, ticket: str, *, at_head: bool = False
    ) -> None:
        """Join behind the tenant's own tickets of that class, or come back before them."""
        tickets = self.tickets.setdefault((service_class, tenant), OrderedDict())
        if not tickets:
            self.enter(service_class, tenant)
            self.waiting[service_class].put(tenant, self.counter(tenant))
        tickets[ticket] = None
        if at_head:
            tickets.move_to_end(ticket, last=False)
        self.counts[service_class] += 1

    def remove(self, service_class: ServiceClass, tenant: str, ticket: str) -> None:
        """Leave, from wherever in the queue."""
        tickets = self.tickets[service_class, tenant]
        del tickets[ticket]
        self.counts[service_class] -= 1
        if not tickets:
            del self.tickets[service_class, tenant]
            self.waiting[service_class].drop(tenant)
            self.leave(service_class, tenant)
        if self.counts[service_class] == 0:
            self.credits[service_class] = min(0, self.credits[service_class])

    def enter(self, service_class: ServiceClass, tenant: str) -> None:
        """Lift the counter of a tenant that was not waiting, so that idling saves nothing up."""
        waiting = self.waiting[service_class].first(1)
        lowest = waiting[0][0] if waiting else self.floors[service_class]
        if self.counter(tenant) < lowest:
            self._set_counter(tenant, lowest)

    def leave(self, service_class: ServiceClass, tenant: str) -> None:
        """Remember where the last tenant to leave stood, for who enters an empty class."""
        self.floors[service_class] = max(self.floors[service_class], self.counter(tenant))

    def head(self, skipped: Iterable[tuple[str, str]]) -> Head | None:
        """Next by owed share, then by rank; passing over (class, tenant) pairs already tried."""
        tried = set(skipped)
        owed = [name for name in CLASSES[1:] if self._is_owed(name)]
        for is_owed, names in ((True, owed), (False, CLASSES)):
            for name in names:
                for _, tenant in self.waiting[name].first(len(tried) + 1):
                    if (name, tenant) not in tried:
                        ticket = next(iter(self.tickets[name, tenant]))
                        return Head(name, tenant, ticket, is_owed)
        return None

    def served(self, service_class: ServiceClass, blocks: int, *, owed: bool) -> None:
        """Account one ticket's KV blocks to the shares of the classes below it, or to its own."""
        if owed:
            self.credits[service_class] -= SHARE_ONE * blocks
        most = SHARE_ONE * self._rules.credit_blocks_max
        for name in CLASSES[CLASSES.index(service_class) + 1 :]:
            if self.counts[name]:
                earned = self.credits[name] + self._share[name] * blocks
                self.credits[name] = min(most, earned)

    def counter(self, tenant: str) -> int:
        """Weighted tokens served so far, in `COST_UNITS`."""
        known = self.counters.get(tenant)
        return self.base if known is None else known

    def charge(self, tenant: str, cost: int) -> None:
        """Move the counter by `cost`, which may be negative when an estimate was high."""
        if cost:
            self._set_counter(tenant, max(0, self.counter(tenant) + cost))

    def _is_owed(self, service_class: ServiceClass) -> bool:
        above = self.position(service_class) - self.counts[service_class]
        waits = self.counts[service_class] > 0 and above > 0
        return waits and self.credits[service_class] >= SHARE_ONE

    def _set_counter(self, tenant: str, counter: int) -> None:
        self.counters.put(tenant, counter)
        for name in CLASSES:
            if tenant in self.waiting[name]:
                self.waiting[name].put(tenant, counter)
        if len(self.counters) > self._rules.tenants_max:
            lowest, forgotten = self.counters.first(1)[0]
            self.counters.drop(forgotten)
            self.base = max(self.base, lowest)


def cost(*, input_tokens: int, output_tokens: int, weight: int) -> int:
    """What serving these tokens moves a counter by; `input_tokens` are uncached ones."""
    return (input_tokens + OUTPUT_TOKEN_COST * output_tokens) * COST_UNITS // weight
