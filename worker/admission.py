"""The bounds of an engine, and its door: what fits ever, and what fits into the waiting list.

What fits beside all that runs already is for `scheduler` to say, by `forecast`.
"""

from collections import abc

import msgspec

from core.protocol import Nack
from worker.sequence import Sequence


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
    host_blocks: int = 0  # in host memory, for what is evicted and preempted; 0 is none
    marked_share: float = 0.5  # of either memory that cache marks may keep from eviction
    # Prefill beside decodes is bounded so that a step lasts at most `itl_target_ms`; where that
    # is 0, prompts of over a step are, by `itl_stretch` times a step of those decodes alone.
    itl_target_ms: float = 0.0
    itl_stretch: float = 1.6
    # What moving a block to or from host memory and a token's prefill take, until measured.
    copy_block_ms: float = 0.1
    token_ms: float = 0.1

    def __post_init__(self) -> None:
        for name in ("kv_blocks", "context_tokens", "block_tokens", "max_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.max_batched_tokens < self.max_sequences:
            raise ValueError("max_batched_tokens must hold one token of each of max_sequences")
        if self.waiting_tokens_max < 0 or self.patience_steps < 0:
            raise ValueError("waiting_tokens_max and patience_steps must not be negative")
        shares = (self.expected_share, self.headroom_share, self.marked_share)
        if min(shares) < 0 or max(shares) > 1 or self.headroom_share == 1:
            raise ValueError("expected_share, headroom_share and marked_share are shares of one")
        if self.host_blocks < 0 or self.itl_target_ms < 0:
            raise ValueError("host_blocks and itl_target_ms must not be negative")
        if self.itl_stretch and not self.itl_stretch >= 1:
            raise ValueError("itl_stretch is 0 or at least 1")
        if not (self.copy_block_ms > 0 and self.token_ms > 0):
            raise ValueError("copy_block_ms and token_ms must be above 0")

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

    In this order: `fits_never`, `full`; the detail is the arithmetic. A request larger than the
    whole bound enters an empty waiting list, or it never would.
    """
    for sequence in sequences:
        detail = _fits_never(config, sequence)
        if detail:
            return Nack(reason="fits_never", fits_never=True, detail=detail)
    tokens = prefill_tokens(sequences)
    if waiting_tokens and waiting_tokens + tokens > config.waiting_bound:
        detail = f"{waiting_tokens} tokens wait and {tokens} came, of {config.waiting_bound}"
        return Nack(reason="full", detail=detail)
    return None


def _fits_never(config: SchedulerConfig, sequence: Sequence) -> str:
    if sequence.num_tokens >= sequence.final_tokens:
        return f"{sequence.num_tokens} tokens leave none of {sequence.final_tokens} for an answer"
    blocks = config.blocks_for(sequence.positions_max)
    if blocks <= config.kv_blocks:
        return ""
    return (
        f"{sequence.positions_max} positions in blocks of {config.block_tokens} take {blocks}"
        f" blocks of {config.kv_blocks}"
    )
