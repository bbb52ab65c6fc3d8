"""One engine step as plain data: what the scheduler decided, and what the runner answers.

Not a tensor in sight: a plan can be printed, compared and replayed. Prefill, chunk, decode
and the tail after a prefix hit are one thing, a row: feed these tokens at these positions.

    Row         token_ids  ├──────────────┤
    positions   0 … start  start … start + len(token_ids)
    KV          valid      written by this step, into the blocks of the row's table

A plan names every block a row reads or writes; the runner keeps no table of its own.
"""

from typing import Protocol

import msgspec

from core.protocol import TokenLogprob


class Draw(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How to choose the token that follows a row's last one.

    The random draw is a function of (seed, choice, index) alone: never of the row's place in
    the batch, of the step, or of what ran before.
    """

    seed: int  # 0 <= seed < 2**63
    choice: int  # index of the answer within its request
    index: int  # position in that answer's output, resumed tokens included
    temperature: float  # 0 is greedy
    top_p: float  # 1 is off
    top_k: int  # 0 is off
    logprobs: int | None  # None: none; n: the chosen token and the n likeliest


class Row(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Tokens of one sequence to compute in this step.

    `start` tokens already have valid KV in `blocks`; the row writes KV for positions
    `start` to `start + len(token_ids) - 1` and attends to everything at or before each.
    Position `p` lives in block `blocks[p // block_tokens]` at offset `p % block_tokens`;
    `blocks` covers exactly the positions up to the row's end.
    """

    sequence: int  # engine-wide number; never reused
    token_ids: tuple[int, ...]  # at least one
    start: int
    blocks: tuple[int, ...]
    draw: Draw | None  # None: the row ends inside its prefill, no logits are needed


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A step: first the copies, then the rows, all of them together.

    A copy duplicates one block's KV in every layer. All sources are read before any
    destination is written; no destination appears twice. Two rows never write one block,
    and no row writes a block that another row reads.
    """

    rows: tuple[Row, ...]  # at least one; decodes before prefills
    copies: tuple[tuple[int, int], ...] = ()  # (source block, destination block)

    @property
    def num_tokens(self) -> int:
        """Tokens fed in this step, all rows together."""
        return sum(len(row.token_ids) for row in self.rows)


class Sampled(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The token a row's draw chose. `logprob` is set when the draw asked for logprobs."""

    token_id: int
    logprob: TokenLogprob | None = None


class StepResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One entry for each row that has a draw, in the plan's row order."""

    sampled: tuple[Sampled, ...]


class Runner(Protocol):
    """Executes steps on the model. Called from one thread, one step at a time."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Write the plan's KV and draw its tokens.

        Any exception means that no row of the plan is to be trusted; blocks that no row
        writes keep their KV, and the next call must find the runner usable.
        """
        ...
