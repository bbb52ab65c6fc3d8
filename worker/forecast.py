"""How much of the pool running sequences will still take: what admission is decided by.

A running sequence will still grow, though rarely to its limit, and admitting by what is free
today would only buy preemptions tomorrow. Changes nothing in the pool.
"""

import math

from worker.admission import SchedulerConfig
from worker.sequence import Sequence

# How fast the expected share follows finished sequences, and what a preemption adds to it:
# one wrong forecast outweighs two finished sequences that ended at once.
_LEARN = 1 / 16
_PREEMPTED = 1 / 8


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
