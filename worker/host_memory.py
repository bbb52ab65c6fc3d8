"""KV blocks in host memory, and a step's copies and moves of blocks, in every layer at once.

Knows neither contents nor holders: which block goes where is the plan's business.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.step import StepPlan


class HostMemory:
    """`num_blocks` blocks beside a cache; page-locked where the cache is on a device of its own.

    A cache's shape is (layers, blocks, 2, heads, block_tokens, head_dim). Here blocks come
    first, so that a block's layers lie together and travel in one piece.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._blocks = torch.empty(0)

    def move(self, cache: Tensor, plan: StepPlan) -> None:
        """Do what the plan says of blocks: every source is read before anything is written."""
        if not (plan.copies or plan.moves_out or plan.moves_in):
            return
        host = self.reserve(cache)
        copy_from, copy_to = _columns(plan.copies)
        out_from, out_to = _columns(plan.moves_out)
        in_from, in_to = _columns(plan.moves_in)
        copied = cache[:, copy_from]
        moved_out = cache[:, out_from].transpose(0, 1).to(host.device)
        moved_in = host[in_from].to(cache.device).transpose(0, 1)
        cache[:, copy_to] = copied
        cache[:, in_to] = moved_in
        host[out_to] = moved_out

    def reserve(self, cache: Tensor) -> Tensor:
        """Take the memory, as much as blocks of this cache need, unless it has it. The blocks."""
        shape = (self.num_blocks, cache.shape[0], *cache.shape[2:])
        if self._blocks.shape != shape or self._blocks.dtype != cache.dtype:
            self._blocks = torch.zeros(shape, dtype=cache.dtype, pin_memory=cache.is_cuda)
        return self._blocks


def _columns(moves: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    sources, destinations = torch.tensor(moves, dtype=torch.int64).reshape(-1, 2).unbind(1)
    return sources, destinations
