"""A runner without a model: KV is a chained hash of the fed tokens, the next token their hash.

As in a transformer, the KV of a position depends on everything before it, and a draw reads the
KV of every position through the block table. So a block shared, evicted, copied or overwritten
wrongly changes the output. `expected` is the same model without blocks, steps or neighbours.
"""

import random
from collections.abc import Callable, Sequence

from core.protocol import Sampling, TokenLogprob
from worker.step import Draw, Opening, Row, Sampled, StepPlan, StepResult

VOCAB_SIZE = 300
_MASK = (1 << 64) - 1


def _chain(before: int, token: int) -> int:
    return ((before ^ token) * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & _MASK


def _next_token(kv: Sequence[int], sampling: Sampling, choice: int, index: int) -> int:
    """Greedy draws ignore (seed, choice, index)."""
    dice = 0 if sampling.temperature == 0 else hash((sampling.seed, choice, index))
    mixed = dice & _MASK
    for value in kv:
        mixed = _chain(mixed, value)
    return random.Random(mixed).randrange(VOCAB_SIZE)


def expected(prompt: Sequence[int], sampling: Sampling, choice: int, number: int) -> list[int]:
    """The first `number` output tokens."""
    kv: list[int] = []
    for token in prompt:
        kv.append(_chain(kv[-1] if kv else 0, token))
    output = []
    for index in range(number):
        output.append(_next_token(kv, sampling, choice, index))
        kv.append(_chain(kv[-1], output[-1]))
    return output


def logprob_of(token_id: int, number: int) -> TokenLogprob:
    top = tuple(((token_id + i) % VOCAB_SIZE, -0.5 - i) for i in range(number))
    return TokenLogprob(id=token_id, logprob=-0.5, top=top)


class FakeRunner:
    """Implements `worker.step.Runner`, and asserts what a plan promises.

    `before` is called with each plan first: to raise, to wait, to count.
    """

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        before: Callable[[StepPlan], None] = lambda plan: None,
        *,
        host_blocks: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.host_blocks = host_blocks
        self.kv: dict[tuple[int, int], int] = {}
        self.host_kv: dict[tuple[int, int], int] = {}
        self.slots: dict[int, Opening] = {}
        self.num_fed = 0
        self.num_moved = 0
        self.before = before

    def execute(self, plan: StepPlan) -> StepResult:
        self.before(plan)
        assert plan.rows
        self._assert_no_overlap(plan)
        self._move(plan)
        for row in plan.rows:
            self._write(row)
        sampled = tuple(self._draw(row, row.draw) for row in plan.rows if row.draw)
        targets = tuple(self._targets(row) for row in plan.rows if row.targets)
        return StepResult(sampled=sampled, targets=targets)

    def _move(self, plan: StepPlan) -> None:
        """All sources are read before any destination is written."""
        kv, host_kv = dict(self.kv), dict(self.host_kv)
        for moves, source, destination in (
            (plan.copies, kv, self.kv),
            (plan.moves_out, kv, self.host_kv),
            (plan.moves_in, host_kv, self.kv),
        ):
            for read, written in moves:
                for offset in range(self.block_tokens):
                    destination[written, offset] = source.get((read, offset), -1)
        self.num_moved += len(plan.moves_out) + len(plan.moves_in)

    def _write(self, row: Row) -> None:
        assert row.token_ids
        end = row.start + len(row.token_ids)
        assert len(row.blocks) == -(-end // self.block_tokens), "the table covers just the row"
        value = self.kv[self._slot(row, row.start - 1)] if row.start else 0
        for position, token in enumerate(row.token_ids, row.start):
            value = self.kv[self._slot(row, position)] = _chain(value, token)
        self.num_fed += len(row.token_ids)

    def _draw(self, row: Row, draw: Draw) -> Sampled:
        end = row.start + len(row.token_ids)
        if draw.opening is not None:
            self.slots[draw.slot] = draw.opening
        opening = self.slots[draw.slot]
        kv = [self.kv[self._slot(row, at)] for at in range(end)]
        token = _next_token(kv, opening.sampling, opening.choice, draw.index)
        wanted = opening.sampling.logprobs
        logprob = None if wanted is None else logprob_of(token, wanted)
        return Sampled(token_id=token, logprob=logprob)

    def _targets(self, row: Row) -> tuple[TokenLogprob, ...]:
        assert len(row.targets) <= len(row.token_ids)
        return tuple(logprob_of(token, row.target_logprobs) for token in row.targets)

    def _slot(self, row: Row, position: int) -> tuple[int, int]:
        block = row.blocks[position // self.block_tokens]
        assert 0 <= block < self.num_blocks
        return block, position % self.block_tokens

    def _assert_no_overlap(self, plan: StepPlan) -> None:
        for number, row in enumerate(plan.rows):
            written = set(row.blocks[row.start // self.block_tokens :])
            for other, reader in enumerate(plan.rows):
                assert other == number or not written & set(reader.blocks), "written while read"
        destinations = [destination for _, destination in (*plan.copies, *plan.moves_in)]
        assert len(set(destinations)) == len(destinations)
        host_blocks = [host_block for _, host_block in plan.moves_out]
        assert len(set(host_blocks)) == len(host_blocks)
        for host_block in (*host_blocks, *(host_block for host_block, _ in plan.moves_in)):
            assert 0 <= host_block < self.host_blocks
        assert len({row.sequence for row in plan.rows}) == len(plan.rows)
