"""Which prompt prefixes this gateway has lately seen served, and how many tokens they save.

Only an estimate, for charging a tenant's input limit less what is probably cached; the charge
is trued up when the engine says. Hashes are salted per tenant, so one table serves all.
"""

from collections import OrderedDict
from itertools import islice

from core.prefix import chunk_sizes


class PrefixMemory:
    """The newest `hashes_max` hashes."""

    def __init__(self, hashes_max: int = 100_000) -> None:
        self._hashes_max = hashes_max
        self._seen: OrderedDict[str, None] = OrderedDict()

    def cached_tokens(self, hashes: tuple[str, ...], context_tokens: int) -> int:
        """Tokens of the longest prefix all of whose hashes have been seen."""
        matched = 0
        for prefix in hashes:
            if prefix not in self._seen:
                break
            matched += 1
        return sum(islice(chunk_sizes(context_tokens), matched)) if matched else 0

    def remember(self, hashes: tuple[str, ...]) -> None:
        """A prompt with these was served."""
        for prefix in hashes:
            self._seen[prefix] = None
            self._seen.move_to_end(prefix)
        while len(self._seen) > self._hashes_max:
            self._seen.popitem(last=False)
