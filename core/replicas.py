"""A pool's replicas, and the choice of one for a ticket in a time that hardly grows with them.

    rooms    replicas that take work, the freest first: the first few are looked at, and as
             many that have seen the prefix. When the freest has no room, none has
    numbers  a replica's life to its name, since prefixes are remembered by life

Up to `looks_max` replicas the choice is the best of all. Invariant: a replica is in `rooms`
under what `room` says of it, if it is ready.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec

from core.placement import (
    PlacementRules,
    Replica,
    announce,
    best,
    candidates,
    fits,
    hold,
    holds_affinity,
    lane_takes,
    present,
    release,
    report,
    room,
    takes,
    usable,
)
from core.protocol import Load
from core.ranking import Ranking
from core.tickets import ReplicaView

Where = Literal["beside the lane", "in the lane", "anywhere"]


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a ticket asks of a replica."""

    blocks: int
    exclude: tuple[str, ...]
    matched: Mapping[int, int]  # replica number: hashes of the prefix it has seen
    hash_count: int


class Replicas:
    """`all` by name. Sums are of all replicas: `open` tickets, the `largest` in KV blocks."""

    def __init__(self, rules: PlacementRules) -> None:
        self._rules = rules
        self.all: dict[str, Replica] = {}
        self.rooms = Ranking()  # the freest first
        self.numbers: dict[int, str] = {}
        self.numbered = 0  # lives so far
        self.open = 0
        self.ready = 0  # as of the last announcement
        self.largest = 0
        self.empty_since_ms = 0  # without replicas; 0 while there are some

    def choose(
        self, wanted: Wanted, where: Where, *, protected: int, now_ms: int
    ) -> Replica | None:
        """The best that fits; `protected` is the number of one that is kept for another ticket."""
        able = [
            replica
            for replica in self._candidates(wanted, now_ms)
            if replica.number != protected and self._takes(replica, wanted.blocks, where)
        ]
        matched = {r.number: wanted.matched.get(r.number, 0) for r in able if self._is_loyal(r)}
        return best(able, matched, wanted.hash_count, self._rules)

    def protect(self, wanted: Wanted, now_ms: int) -> int:
        """The number of the replica to keep for a ticket that fits nowhere yet; 0 for none.

        The freest: while others are kept off it only grows freer, so the ticket's turn comes.
        """
        for replica in self._freest(wanted, now_ms):
            if replica.total >= wanted.blocks and usable(replica, now_ms, self._rules):
                return replica.number
        return 0

    def hopeless(self, blocks: int, *, now_ms: int, no_replica_ms: int) -> str | None:
        """Why no wait will help: no_replica, fits_never or None."""
        if not self.all:
            is_gone = now_ms - self.empty_since_ms >= no_replica_ms
            return "no_replica" if is_gone else None
        return "fits_never" if blocks > self.largest else None

    # Accounts.

    def hold(
        self, replica: Replica, ticket: str, placement: int, blocks: int, *, in_lane: bool
    ) -> None:
        """Open a ticket there."""
        hold(replica, ticket, placement, blocks, in_lane=in_lane)
        self.open += 1
        self._rank(replica)

    def release(self, replica: Replica, ticket: str, blocks: int, *, in_lane: bool) -> None:
        """Close what `hold` opened."""
        release(replica, ticket, blocks, in_lane=in_lane)
        self.open -= 1
        self._rank(replica)

    def report(self, name: str, load: Load) -> None:
        """What a replica says of itself; one that nobody announced is not known."""
        replica = self.all.get(name)
        if replica is not None:
            report(replica, load)
            self._rank(replica)

    def pause(self, replica: Replica, now_ms: int) -> None:
        """Leave one that declined, or died, alone for a moment."""
        rules = self._rules
        is_again = now_ms - replica.paused_until_ms < rules.decline_pause_max_ms
        longer_ms = min(rules.decline_pause_max_ms, 2 * replica.pause_ms)
        replica.pause_ms = longer_ms if is_again else rules.decline_pause_ms
        replica.paused_until_ms = now_ms + replica.pause_ms

    # Views.

    def announce(self, views: Iterable[ReplicaView], now_ms: int) -> None:
        """Replicas as a gateway has them in view; those in nobody's view go when they are idle."""
        for view in views:
            self._see(view, now_ms)
        for name, replica in list(self.all.items()):
            if replica.open == 0 and now_ms - replica.seen_ms > self._rules.replica_silent_ms:
                self._forget(name, replica)
        self.ready = sum(present(r, now_ms, self._rules) for r in self.all.values())
        self.largest = max((replica.total for replica in self.all.values()), default=0)
        if self.all:
            self.empty_since_ms = 0
        elif self.empty_since_ms == 0:
            self.empty_since_ms = now_ms

    def _see(self, view: ReplicaView, now_ms: int) -> None:
        known = self.all.get(view.replica)
        replica = announce(known, view, self.numbered + 1, now_ms)
        if replica is not known:
            if known is not None:  # what its last life held went with it
                self.open -= known.open
                del self.numbers[known.number]
            self.numbered = replica.number
            self.numbers[replica.number] = view.replica
            self.all[view.replica] = replica
        self._rank(replica)

    def _forget(self, name: str, replica: Replica) -> None:
        del self.all[name]
        del self.numbers[replica.number]
        self.rooms.drop(name)

    def _rank(self, replica: Replica) -> None:
        if replica.ready:
            self.rooms.put(replica.replica, -room(replica))
        else:
            self.rooms.drop(replica.replica)

    # Looking.

    def _candidates(self, wanted: Wanted, now_ms: int) -> Iterable[Replica]:
        if wanted.exclude:  # one that comes back: seldom, so all are looked at
            return candidates(self.all.values(), wanted.blocks, wanted.exclude, now_ms, self._rules)
        found: dict[str, Replica] = {}
        for taken, name in self.rooms.first(self._rules.looks_max):
            if -taken < wanted.blocks:
                break
            found[name] = self.all[name]
        for replica in self._seers(wanted.matched):
            found[replica.replica] = replica
        return [r for r in found.values() if usable(r, now_ms, self._rules)]

    def _seers(self, matched: Mapping[int, int]) -> Iterator[Replica]:
        """Those that have seen most of the prefix."""
        deepest = sorted(matched, key=lambda number: (-matched[number], number))
        for number in deepest[: self._rules.looks_max]:
            name = self.numbers.get(number)
            if name is not None:
                yield self.all[name]

    def _freest(self, wanted: Wanted, now_ms: int) -> Iterable[Replica]:
        if wanted.exclude:
            able = candidates(self.all.values(), wanted.blocks, wanted.exclude, now_ms, self._rules)
            return sorted(able, key=lambda replica: (-room(replica), replica.replica))
        return (self.all[name] for _, name in self.rooms.first(self._rules.looks_max))

    def _takes(self, replica: Replica, blocks: int, where: Where) -> bool:
        if where == "anywhere":
            return fits(replica, blocks)
        fit = takes if where == "beside the lane" else lane_takes
        return fit(replica, blocks, self._rules)

    def _is_loyal(self, replica: Replica) -> bool:
        return holds_affinity(replica, self.open, self.ready, self._rules)
