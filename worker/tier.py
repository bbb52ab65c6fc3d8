"""The blocks of one memory, device's or host's: who holds each, what it keeps, which goes first.

A block is free (no content), cached (no holder, content kept, may be evicted) or in use, and
the three always sum to the tier. Evicted first is, by last use, what no mark keeps: unmarked
contents, those past their mark's time, and the oldest marked ones above the bound on marks.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from worker.prefix import Content

_Order = OrderedDict[int, tuple[int, int]]  # block: (stamp, last use in ms), oldest first


class Tier:
    """`num_blocks` blocks, of which marks keep at most `marked_max` that nobody holds."""

    def __init__(self, num_blocks: int, marked_max: int) -> None:
        self.num_blocks = num_blocks
        self.marked_max = marked_max
        self.contents: list[Content | None] = [None] * num_blocks
        self.refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        # An OrderedDict removes from the middle in O(1), which a hit needs. One for each time to
        # live, so that those past it are at the front; they move to a list of their own.
        self._orders: dict[int, _Order] = {0: OrderedDict()}
        self._past: dict[int, _Order] = {}
        self._order_of: dict[int, _Order] = {}
        self._stamp = 0
        self._now_ms = 0

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now: free and cached ones."""
        return len(self._free) + len(self._order_of)

    @property
    def num_cached(self) -> int:
        """Blocks without a holder whose content can still be hit."""
        return len(self._order_of)

    @property
    def num_marked(self) -> int:
        """Of those, the ones that a mark keeps."""
        return sum(len(order) for ttl_ms, order in self._orders.items() if ttl_ms)

    def num_takeable(self, ttl_ms: int) -> int:
        """Blocks that can be taken for such a content: an unmarked one takes no marked one's."""
        return self.num_available - (0 if ttl_ms else min(self.num_marked, self.marked_max))

    def advance(self, now_ms: int) -> None:
        """Let marks lapse. Time never goes back: an earlier `now_ms` is taken for the last."""
        self._now_ms = max(self._now_ms, now_ms)
        for ttl_ms, past in self._past.items():
            order = self._orders[ttl_ms]
            while order:
                block, (stamp, used_ms) = next(iter(order.items()))
                if used_ms + ttl_ms > self._now_ms:
                    break
                del order[block]
                past[block] = (stamp, used_ms)
                self._order_of[block] = past

    def hold(self, block: int) -> None:
        """Add a holder."""
        self.refs[block] += 1
        order = self._order_of.pop(block, None)
        if order is not None:
            del order[block]

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one holder of each, given in table order.

        The tail is freed first and so evicted first: a prefix is worth more than what follows
        it, and a parent is never evicted before its child.
        """
        for block in reversed(blocks):
            assert self.refs[block] > 0, "released twice"
            self.refs[block] -= 1
            if self.refs[block]:
                continue
            content = self.contents[block]
            if content is None:
                self._free.append(block)
            else:
                self._list(block, content.ttl_ms)

    def take(self) -> tuple[int, Content | None]:
        """A block for writing, and the content that it held until now."""
        block = self._free.pop() if self._free else self._evict()
        content = self.contents[block]
        self.contents[block] = None
        self.refs[block] = 1
        return block, content

    def touch(self, block: int) -> None:
        """If nobody holds it, list it anew: its content was used elsewhere, or marked."""
        order = self._order_of.get(block)
        content = self.contents[block]
        if order is not None and content is not None:
            del order[block]
            self._list(block, content.ttl_ms)

    def forget(self, block: int) -> None:
        """Its content is nothing that anyone may hit."""
        self.contents[block] = None
        order = self._order_of.pop(block, None)
        if order is not None:
            del order[block]
            self._free.append(block)

    def problems(self, tables: Iterable[Sequence[int]]) -> list[str]:
        """What contradicts the block tables of all holders; empty when all is well."""
        held = Counter(block for table in tables for block in table)
        free = Counter(self._free)
        listed = Counter(block for order in self._all_orders() for block in order)
        found = []
        for block, refs in enumerate(self.refs):
            if refs != held[block]:
                found.append(f"block {block}: {refs} references, {held[block]} holders")
            has_content = self.contents[block] is not None
            if free[block] != (not refs and not has_content):
                found.append(f"block {block}: free {free[block]} times, {refs} references")
            if listed[block] != (not refs and has_content):
                found.append(f"block {block}: cached {listed[block]} times, {refs} references")
            if (block in self._order_of) != listed[block]:
                found.append(f"block {block}: cached in no order")
        return found

    def _list(self, block: int, ttl_ms: int) -> None:
        if ttl_ms not in self._orders:
            self._orders[ttl_ms] = OrderedDict()
            self._past[ttl_ms] = OrderedDict()
        self._stamp += 1
        order = self._order_of[block] = self._orders[ttl_ms]
        order[block] = (self._stamp, self._now_ms)

    def _evict(self) -> int:
        keeps = self.num_marked <= self.marked_max
        heads = [
            (keeps and bool(ttl_ms), *next(iter(order.items())), order)
            for ttl_ms, order in self._orders.items()
            if order
        ]
        heads += [(False, *next(iter(past.items())), past) for past in self._past.values() if past]
        _, block, _, order = min(heads, key=lambda head: (head[0], head[2]))
        del order[block]
        del self._order_of[block]
        return block

    def _all_orders(self) -> Iterable[_Order]:
        return (*self._orders.values(), *self._past.values())
