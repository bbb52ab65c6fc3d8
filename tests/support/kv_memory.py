"""A runner whose KV says what it is: each position holds its root and every token up to it.

Not a hash and not the pool's bookkeeping again: what a row reads is compared, position by
position, with what its sequence has said. KV that was lent to another tenant, evicted while in
use, moved to the wrong place, or read before it had arrived is named at once.
"""

from collections.abc import Callable, Sequence

from worker.sequence import Sequence as Choice
from worker.step import Row, Sampled, StepPlan, StepResult

Position = tuple[bytes, tuple[int, ...]]
Block = list[Position | None]
ALPHABET = 3


class KVMemory:
    """Implements `worker.step.Runner` over device and host blocks. `owner` is by number."""

    def __init__(
        self,
        num_blocks: int,
        host_blocks: int,
        block_tokens: int,
        owner: Callable[[int], Choice],
    ) -> None:
        self.block_tokens = block_tokens
        self.device: list[Block] = [[None] * block_tokens for _ in range(num_blocks)]
        self.host: list[Block] = [[None] * block_tokens for _ in range(host_blocks)]
        self.fed: dict[int, set[int]] = {}  # sequence: positions that it computed
        self._owner = owner
        self._slots: dict[int, int] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        self._move(plan)
        assert len({row.sequence for row in plan.rows}) == len(plan.rows)
        for row in plan.rows:
            self._assert_reads_its_own(row)
        written = [block for row in plan.rows for block in self._written(row)]
        assert len(written) == len(set(written)), "two rows write one block"
        for row in plan.rows:
            for block in self._written(row):
                readers = [other.sequence for other in plan.rows if block in other.blocks]
                assert readers == [row.sequence], "a block is written while another reads it"
        for row in plan.rows:
            self._write(row)
        return StepResult(sampled=tuple(self._draw(row) for row in plan.rows if row.draw))

    def spoil(self, plan: StepPlan) -> None:
        """The step failed half-way: all that it was to write is nothing."""
        for row in plan.rows:
            for block in self._written(row):
                start = max(0, row.start - row.blocks.index(block) * self.block_tokens)
                self.device[block][start:] = [None] * (self.block_tokens - start)
        for _, block in (*plan.copies, *plan.moves_in):
            self.device[block] = [None] * self.block_tokens
        for _, host_block in plan.moves_out:
            self.host[host_block] = [None] * self.block_tokens

    def _move(self, plan: StepPlan) -> None:
        moves = [(self.device, to, list(self.device[source])) for source, to in plan.copies]
        moves += [(self.host, to, list(self.device[source])) for source, to in plan.moves_out]
        moves += [(self.device, to, list(self.host[source])) for source, to in plan.moves_in]
        places = [(memory is self.host, to) for memory, to, _ in moves]
        assert len(places) == len(set(places)), "one block is the destination of two moves"
        for memory, to, values in moves:
            memory[to] = values

    def _written(self, row: Row) -> Sequence[int]:
        return row.blocks[row.start // self.block_tokens :]

    def _assert_reads_its_own(self, row: Row) -> None:
        sequence = self._owner(row.sequence)
        end = row.start + len(row.token_ids)
        assert row.token_ids == tuple(sequence.tokens[row.start : end])
        assert row.token_ids
        assert len(row.blocks) == -(-end // self.block_tokens), "the table covers just the row"
        assert len(set(row.blocks)) == len(row.blocks)
        for position in range(row.start):
            block, offset = divmod(position, self.block_tokens)
            expected = (sequence.root, tuple(sequence.tokens[: position + 1]))
            assert self.device[row.blocks[block]][offset] == expected, (
                f"sequence {row.sequence} reads other KV at {position}"
            )

    def _write(self, row: Row) -> None:
        sequence = self._owner(row.sequence)
        for position in range(row.start, row.start + len(row.token_ids)):
            block, offset = divmod(position, self.block_tokens)
            value = (sequence.root, tuple(sequence.tokens[: position + 1]))
            self.device[row.blocks[block]][offset] = value
            self.fed.setdefault(row.sequence, set()).add(position)

    def _draw(self, row: Row) -> Sampled:
        draw, sequence = row.draw, self._owner(row.sequence)
        assert draw is not None
        assert row.start + len(row.token_ids) == sequence.num_tokens
        assert draw.index == sequence.num_output
        if draw.opening is not None:
            self._slots[draw.slot] = row.sequence
            opened = (*draw.opening.prompt_ids, *draw.opening.output_ids)
            assert opened == tuple(sequence.tokens)
        assert self._slots[draw.slot] == row.sequence, "the slot was opened by another"
        return Sampled(token_id=(sum(sequence.tokens) + sequence.choice) % ALPHABET)
