"""What marks promise, kept by prefix and by looking at who holds what: no blocks' bookkeeping.

A prefix is a root and the tokens up to a block's end. The book knows for each how long a mark
keeps it and when it was last held, and judges what a step lost of the device's cache.
"""

from collections.abc import Iterable

from worker.blocks import BlockPool
from worker.sequence import TTL_MS, Sequence

Prefix = tuple[bytes, tuple[int, ...]]


class PrefixBook:
    """Of one pool. `now_ms` is that of the last step."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._kept_ms: dict[Prefix, int] = {}
        self._now_ms = 0
        self._used_ms: dict[int, int] = {}  # block: when it was last held

    def before_step(self, now_ms: int, running: Iterable[Sequence]) -> None:
        """Time goes on; what is held now is in use now."""
        self._now_ms = max(self._now_ms, now_ms)
        self.after_event(running)
        self._kept_before = self._cached(kept=True)
        self._loose_before = self._cached(kept=False)
        self._num_cached_before = self._pool.num_cached

    def judge_step(self) -> None:
        """No kept prefix left the device while one stayed that nothing keeps.

        Not asked where there are more kept ones than marks may keep.
        """
        on_device = {self._prefix(content) for content in self._pool.device.contents if content}
        lost = set(self._kept_before.values()) - on_device
        stayed = {
            block
            for block, prefix in self._loose_before.items()
            if prefix in on_device and not self._pool.device.refs[block]
        }
        # Copies of one content count too: a mark that comes with one of them keeps them all.
        if self._num_cached_before - len(self._loose_before) <= self._pool.device.marked_max:
            assert not (lost and stayed), f"{lost} were kept and left, {stayed} stayed"

    def after_event(self, running: Iterable[Sequence]) -> None:
        """Look who holds what."""
        size = self._pool.block_tokens
        for sequence in running:
            for index, block in enumerate(sequence.blocks):
                self._used_ms[block] = self._now_ms
                end = (index + 1) * size
                kept = [TTL_MS["5m"], TTL_MS["1h"]]
                asked = [ttl for ttl in kept if any(
                    mark_ttl == ttl and end <= min(tokens, sequence.num_prompt)
                    for mark_ttl, tokens in sequence.marks
                )]  # fmt: skip
                # After a flush a holder's block may be unpublished, and another's found.
                if asked and self._pool.is_published(block):
                    prefix = (sequence.root, tuple(sequence.tokens[:end]))
                    if max(asked) > self._kept_ms.get(prefix, 0):
                        self._kept_ms[prefix] = max(asked)
                        for copy in self._pool.device.contents[block].device:
                            self._used_ms[copy] = self._now_ms  # a longer mark is a use of all

    def forget_unknown(self) -> None:
        """A mark lasts as long as its content is known."""
        known = {self._prefix(content) for content in self._pool._published._index}
        for prefix in self._kept_ms.keys() - known:
            del self._kept_ms[prefix]

    def _cached(self, *, kept: bool) -> dict[int, Prefix]:
        found = {}
        contents = [content for content in self._pool.device.contents if content is not None]
        for block, content in enumerate(self._pool.device.contents):
            if content is None or self._pool.device.refs[block]:
                continue
            if not kept and contents.count(content) > 1:  # its mark may have come with the other
                continue
            prefix = self._prefix(content)
            until_ms = self._used_ms.get(block, 0) + self._kept_ms.get(prefix, 0)
            if (prefix in self._kept_ms and until_ms > self._now_ms) == kept:
                found[block] = prefix
        return found

    @staticmethod
    def _prefix(content) -> Prefix:
        tokens: list[int] = []
        link = content
        while link is not None:
            tokens[:0] = link.tokens
            link = link.parent
        return content.root, tuple(tokens)
