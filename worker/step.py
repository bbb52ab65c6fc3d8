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

from core.protocol import Sampling, TokenLogprob


class Opening(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """All that a slot's draws depend on, told once: with the first draw of its new owner."""

    choice: int  # index of the answer within its request
    sampling: Sampling
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]  # those so far: resumed ones, and new ones before a preemption


class Draw(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Choose the token that follows a row's last one, as the slot's opening says.

    A slot is a running sequence's place among `max_sequences`, where a runner keeps what it
    needs to draw without asking again. The random draw is a function of (seed, choice, index)
    alone: never of the slot, of the row's place in the batch, or of what ran before.
    """

    slot: int
    index: int  # position in that answer's output, resumed tokens included
    opening: Opening | None = None  # the slot is this sequence's from now on


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
    # Of the prompt's tokens that follow each of the row's, where their logprobs are asked for.
    targets: tuple[int, ...] = ()
    target_logprobs: int = 0  # and so many of the likeliest beside each


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A step: first the moves of blocks, then the rows, all of them together.

    A move duplicates one block's KV in every layer: within the pool, out to host memory, or in
    from there. All sources are read before any destination is written; no destination appears
    twice. Two rows never write one block, and no row writes a block that another row reads.
    """

    rows: tuple[Row, ...]  # at least one; decodes before prefills
    copies: tuple[tuple[int, int], ...] = ()  # (source block, destination block)
    moves_out: tuple[tuple[int, int], ...] = ()  # (block, host block)
    moves_in: tuple[tuple[int, int], ...] = ()  # (host block, block)

    @property
    def num_tokens(self) -> int:
        """Tokens fed in this step, all rows together."""
        return sum(len(row.token_ids) for row in self.rows)


class Sampled(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The token a row's draw chose. `logprob` is set when the slot's opening asks for it.

    With a `fault` there is no token (-1): this row's logits were no numbers, or its own
    constraints left nothing to choose from. No other row is touched by that.
    """

    token_id: int
    logprob: TokenLogprob | None = None
    ends: bool = False  # the grammar is at its end: nothing may follow
    fault: str = ""
    unanswerable: bool = False  # the fault is in what was asked: no replica would do better


class StepResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One entry for each row that has a draw, in the plan's row order."""

    sampled: tuple[Sampled, ...]
    targets: tuple[tuple[TokenLogprob, ...], ...] = ()  # for each row that has targets


class Runner(Protocol):
    """Executes steps on the model. Called from one thread, one step at a time."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Write the plan's KV and draw its tokens.

        Any exception means that no row of the plan is to be trusted; blocks that no row
        writes keep their KV, and the next call must find the runner usable.
        """
        ...
