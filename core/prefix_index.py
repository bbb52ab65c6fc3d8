"""Which replicas have seen which prefix: the least recently used hash is forgotten first.

Owners are replica numbers, which are never used again, so that a replica's next life does
not inherit what its last one had cached.
"""

from collections import OrderedDict
from collections.abc import Sequence

import msgspec


class PrefixRules(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the index."""

    hashes_max: int = 65_536
    owners_max: int = 8  # replicas remembered for one hash, the latest


class PrefixIndex:
    """Hash to the numbers of the replicas that have seen it, oldest first."""

    def __init__(self, rules: PrefixRules) -> None:
        self._rules = rules
        self.owners: OrderedDict[str, list[int]] = OrderedDict()

    def matched(self, hashes: Sequence[str]) -> dict[int, int]:
        """For each replica number, how deep into the chain it has seen."""
        return {
            number: depth
            for depth, name in enumerate(hashes, start=1)
            for number in self.owners.get(name, ())
        }

    def record(self, hashes: Sequence[str], number: int) -> None:
        """This replica has the whole chain now."""
        for name in hashes:
            others = [n for n in self.owners.get(name, ()) if n != number]
            self.owners[name] = [*others, number][-self._rules.owners_max :]
            self.owners.move_to_end(name)
        while len(self.owners) > self._rules.hashes_max:
            self.owners.popitem(last=False)
