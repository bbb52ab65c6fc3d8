"""What happens to a sequence's block table: it is loaded, grows, is written, shared, stowed.

Between `sequence`, which knows no pool, and `blocks`, which knows no sequences. Decides
nothing: who may have a block is the scheduler's business.
"""

from collections.abc import Sequence as Many

from worker.blocks import BlockPool, Copy
from worker.prefix import Content
from worker.sequence import Sequence, Stowed
from worker.swap import Leaving


class Tables:
    """Of all sequences over one pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._block_tokens = pool.block_tokens

    def match(self, sequence: Sequence) -> list[Content]:
        """What of its tokens is published, up to those that it must compute itself."""
        assert sequence.chain is not None
        return self._pool.match(sequence.chain, sequence.hits_max)

    def room(self, sequence: Sequence) -> int:
        """Positions after `num_computed` that fit without taking a block from anybody."""
        index = sequence.num_computed // self._block_tokens
        blocks = sequence.blocks
        copy = index < len(blocks) and self._pool.is_shared(blocks[index])
        free = len(blocks) + self._pool.num_available - copy
        return free * self._block_tokens - sequence.num_computed

    def load(self, sequence: Sequence, hits: Many[Content]) -> None:
        """It is admitted with this prefix, and with what was stowed of it after that."""
        sequence.blocks = self._pool.hold(hits)
        sequence.table = None
        sequence.num_computed = len(hits) * self._block_tokens
        stowed = sequence.stowed
        # The tail is of use only right after all that came before it.
        if stowed and stowed.tail and stowed.num_computed // self._block_tokens == len(hits):
            sequence.blocks.append(self._pool.fetch(stowed.tail[0]))
            sequence.num_computed = stowed.num_computed
        self.unstow(sequence)
        for index, block in enumerate(sequence.blocks[: len(hits)], 1):
            self._pool.mark(block, sequence.kept_ms(index * self._block_tokens))

    def begin(self, sequence: Sequence) -> Copy | None:
        """Make the block of the first new position its own; the copy that this takes, if any."""
        index = sequence.num_computed // self._block_tokens
        if index == len(sequence.blocks):
            return None
        block = sequence.blocks[index]
        if not self._pool.is_shared(block):
            self._pool.begin_write(block)
            return None
        [copy] = self._pool.take(1)
        sequence.blocks[index] = copy
        sequence.table = None
        self._pool.release([block])
        return block, copy

    def grow(self, sequence: Sequence, positions: int) -> None:
        """Take blocks until they cover so many positions."""
        missing = self._pool.blocks_for(positions) - len(sequence.blocks)
        if missing > 0:
            sequence.blocks += self._pool.take(missing)
            sequence.table = None

    def computed(self, sequence: Sequence, number: int) -> None:
        """So many more positions have KV: what is full now is published."""
        size = self._block_tokens
        full = range(sequence.num_computed // size, (sequence.num_computed + number) // size)
        sequence.num_computed += number
        if not full:
            return
        assert sequence.chain is not None
        self._pool.publish(sequence.chain, sequence.blocks, full)
        for index in full:
            end = (index + 1) * size
            ttl_ms = sequence.kept_ms(end)
            if ttl_ms:
                self._pool.mark(sequence.blocks[index], ttl_ms)
                if sequence.cached_tokens is not None and end > sequence.num_counted:
                    sequence.written_tokens[ttl_ms] += size
        sequence.num_counted = max(sequence.num_counted, full.stop * size)

    def share(self, sequence: Sequence, fork: Sequence) -> None:
        """The fork holds the blocks of the prompt that both start with."""
        fork.num_computed = min(fork.num_prompt, fork.num_tokens - 1)
        fork.blocks = sequence.blocks[: self._pool.blocks_for(fork.num_computed)]
        fork.table = None
        self._pool.share(fork.blocks)

    def leaving(self, sequence: Sequence) -> Leaving | None:
        """What stowing would move, and spare; None where it would be in vain."""
        blocks, kept = self._to_stow(sequence), self._num_kept(sequence)
        full = blocks[: sequence.num_computed // self._block_tokens - kept]
        findable = all(map(self._pool.is_published, full))
        if not (blocks and findable and self._pool.can_stow(blocks)):
            return None
        return Leaving(
            blocks_out=self._pool.num_to_stow(blocks),
            blocks_in=len(blocks),
            tokens=sequence.num_computed - kept * self._block_tokens,
        )

    def stow(self, sequence: Sequence, copied: Copy | None) -> None:
        """Move to host memory what is lost otherwise. Its blocks are to be released next.

        `copied` is a copy of this step that is not to be made: its source still has the KV.
        """
        full = sequence.num_computed // self._block_tokens
        blocks = self._to_stow(sequence)
        held = self._pool.stow(blocks, copied)
        split = full - self._num_kept(sequence)
        sequence.stowed = Stowed(held[:split], held[split:], sequence.num_computed)

    def unstow(self, sequence: Sequence) -> None:
        """Let its host blocks go, if it has any."""
        if sequence.stowed is not None:
            self._pool.unstow([*sequence.stowed.blocks, *sequence.stowed.tail])
            sequence.stowed = None

    def release(self, sequence: Sequence) -> None:
        """Let its blocks go."""
        self._pool.release(sequence.blocks)
        sequence.blocks = []

    def _to_stow(self, sequence: Sequence) -> list[int]:
        end = self._pool.blocks_for(sequence.num_computed)
        return sequence.blocks[self._num_kept(sequence) : end]

    def _num_kept(self, sequence: Sequence) -> int:
        """Full blocks from the first on that others hold too."""
        full = sequence.num_computed // self._block_tokens
        blocks = sequence.blocks[:full]
        return next((i for i, b in enumerate(blocks) if not self._pool.is_shared(b)), full)
