"""What fits: ever, into the waiting list, and beside what already runs.

The first two are refusals at the door (`refuse`). The third is a forecast: a running sequence
will still grow, though rarely to its limit, and admitting by what is free today would only
buy preemptions tomorrow. Nothing here changes the pool.
"""

import math
from collections import abc

import msgspec

from core.protocol import Nack
from worker.sequence import Sequence

# How fast the expected share follows finished sequences, and what a preemption adds to it:
# one wrong forecast outweighs two finished sequences that ended at once.
_LEARN = 1 / 16
_PREEMPTED = 1 / 8


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one engine. Raises ValueError when they contradict each other."""

    kv_blocks: int
    context_tokens: int  # of the model: prompt and output together
    block_tokens: int = 16
    max_batched_tokens: int = 512  # in one step
    max_sequences: int = 32  # running at once
    waiting_tokens_max: int = 0  # 0: one step's prefill, `max_batched_tokens`
    patience_steps: int = 128  # a sequence that waited longer is passed by nobody
    expected_share: float = 0.5  # of its remaining output that a sequence will use, at first
    headroom_share: float = 0.03  # of the pool that admission leaves free

    def __post_init__(self) -> None:
        for name in ("kv_blocks", "context_tokens", "block_tokens", "max_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.max_batched_tokens < self.max_sequences:
            raise ValueError("max_batched_tokens must hold one token of each of max_sequences")
        if self.waiting_tokens_max < 0 or self.patience_steps < 0:
            raise ValueError("waiting_tokens_max and patience_steps must not be negative")
        if not (0 <= self.expected_share <= 1 and 0 <= self.headroom_share < 1):
            raise ValueError("expected_share and headroom_share are shares of one")

    @property
    def waiting_bound(self) -> int:
        """Most prefill tokens in the waiting list."""
        return self.waiting_tokens_max or self.max_batched_tokens

    def blocks_for(self, positions: int) -> int:
        """Blocks that cover this many positions."""
        return -(-positions // self.block_tokens)


def prefill_tokens(sequences: abc.Sequence[Sequence]) -> int:
    """Tokens one request has to feed before it produces any; its choices share the prompt."""
    first, *forks = sequences
    return first.num_tokens + sum(fork.num_output for fork in forks)


def refuse(
    config: SchedulerConfig, sequences: abc.Sequence[Sequence], waiting_tokens: int
) -> Nack | None:
    """Whether one request may enter, beside `waiting_tokens` that wait already.

    In this order: `fits_never`, `full`. A request larger than the whole bound enters an empty
    waiting list, or it never would.
    """
    for sequence in sequences:
        no_room_in_context = sequence.num_tokens >= sequence.final_tokens
        if no_room_in_context or config.blocks_for(sequence.positions_max) > config.kv_blocks:
            return Nack(reason="fits_never", fits_never=True)
    if waiting_tokens and waiting_tokens + prefill_tokens(sequences) > config.waiting_bound:
        return Nack(reason="full")
    return None


class Forecast:
    """Learns which share of their allowed output sequences use, and expects it of the next."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.share = config.expected_share
        self.headroom = math.ceil(config.headroom_share * config.kv_blocks)

    def blocks(self, sequence: Sequence) -> int:
        """Blocks it is expected to hold at the end, and at least those for its tokens now."""
        allowed = sequence.final_tokens - sequence.num_tokens
        positions = sequence.num_tokens + math.ceil(self.share * allowed)
        return self._config.blocks_for(min(positions, sequence.positions_max))

    def blocks_with_forks(self, sequence: Sequence) -> int:
        """The same for a sequence and the choices that will share its prompt's full blocks."""
        shared = sequence.num_prompt // self._config.block_tokens
        return self.blocks(sequence) + sum(self.blocks(fork) - shared for fork in sequence.forks)

    def growth(self, sequence: Sequence) -> int:
        """Blocks that a running sequence is expected to take yet."""
        return max(0, self.blocks_with_forks(sequence) - len(sequence.blocks))

    def finished(self, sequence: Sequence) -> None:
        """It ended by itself: learn how much it used."""
        used = sequence.num_new / (
            sequence.final_tokens - sequence.num_prompt - sequence.num_resumed
        )
        self.share += (used - self.share) * _LEARN

    def preempted(self) -> None:
        """The forecast was too low."""
        self.share = min(1.0, self.share + _PREEMPTED)
