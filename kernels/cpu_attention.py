"""Attention over the paged cache, on a processor: gather, multiply, softmax, multiply.

Each layer follows the step's plan (`cpu_attention_plan`) with no Python per sequence beyond
it. Same results as `reference.paged_attention`, up to rounding. Letters as there.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu_attention_plan import AttentionPlan, Piece, Planner, Span

# Queries of a prefill handled at once. Measured on SmolLM2's heads in bf16, 512 queries over
# 2,048 positions: 14.5, 11.3, 18.8 and 23.9 ms for 32, 64, 128 and 256; torch's own SDPA 21.6.
TILE_TOKENS = 64


class PagedAttention:
    """Attention for one model's heads. Holds a scratch buffer: one step at a time."""

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_tokens: int,
        dtype: torch.dtype,
    ) -> None:
        self._planner = Planner(num_kv_heads=num_kv_heads, block_tokens=block_tokens, dtype=dtype)
        self._kv_heads = num_kv_heads
        self._group = num_heads // num_kv_heads
        self._head_dim = head_dim
        self._block_tokens = block_tokens
        self._dtype = dtype
        self._scale = head_dim**-0.5
        self._scratch = torch.empty(0, dtype=dtype)
        self._none = torch.zeros((), dtype=dtype)
        future = torch.full((TILE_TOKENS, TILE_TOKENS), -torch.inf, dtype=dtype)
        self._future = future.triu_(1)

    def plan(self, spans: Sequence[Span]) -> AttentionPlan:
        """What to read and write for spans that are packed in `packing_order`."""
        return self._planner.plan(spans)

    def write(self, plan: AttentionPlan, cache: Tensor, keys_values: Tensor) -> None:
        """Store a layer's new (T, 2 K, D), keys before values. Writes `cache` in place."""
        cache.view(-1, self._head_dim).index_put_((plan.slots,), keys_values)

    def attend(self, plan: AttentionPlan, queries: Tensor, cache: Tensor, out: Tensor) -> None:
        """Fill `out` (T, H, D) for `queries` (T, H, D). The layer's own KV is already written."""
        for piece in plan.pieces:
            end = piece.first + piece.sequences * piece.queries
            step = self._decode if piece.bias is not None else self._prefill
            step(piece, queries[piece.first : end], cache, out[piece.first : end])

    def _decode(self, piece: Piece, queries: Tensor, cache: Tensor, out: Tensor) -> None:
        assert piece.bias is not None
        shared, own = self._gathered(piece, cache)
        shape = (piece.sequences, self._kv_heads, self._group, self._head_dim)
        grouped = queries.reshape(shape).transpose(0, 1).reshape(-1, *shape[2:])
        scores = torch.baddbmm(piece.bias, grouped, own[0].transpose(1, 2), alpha=self._scale)
        if piece.shared:
            mixed = self._beside_shared(piece, grouped, scores, shared, own[1])
        else:
            mixed = torch.bmm(torch.softmax(scores, dim=-1), own[1])
        out.view(shape).transpose(0, 1).copy_(mixed.view(self._kv_heads, -1, *shape[2:]))

    def _beside_shared(
        self, piece: Piece, grouped: Tensor, scores: Tensor, shared: Tensor, own_values: Tensor
    ) -> Tensor:
        """The softmax over what is shared and what is own together; its share of either.

        The queries of all sequences on the shared keys are one matrix product per KV head.
        """
        all_queries = (self._kv_heads, -1, self._head_dim)
        on_shared = torch.baddbmm(
            self._none,
            grouped.view(all_queries),
            shared[0].transpose(1, 2),
            beta=0,
            alpha=self._scale,
        )
        on_own = scores.view(self._kv_heads, -1, piece.length)
        weights = torch.softmax(torch.cat((on_shared, on_own), dim=-1), dim=-1)
        mixed = torch.bmm(weights[..., : piece.shared], shared[1])
        on_own = weights[..., piece.shared :].view(scores.shape)
        return mixed.view(grouped.shape).baddbmm_(on_own, own_values)

    def _prefill(self, piece: Piece, queries: Tensor, cache: Tensor, out: Tensor) -> None:
        _, (keys, values) = self._gathered(piece, cache)
        shape = (piece.queries, self._kv_heads, self._group, self._head_dim)
        grouped, result = queries.reshape(shape), out.view(shape)
        for begin in range(0, piece.queries, TILE_TOKENS):
            end = min(begin + TILE_TOKENS, piece.queries)
            seen, count = piece.start + end, end - begin
            tile = grouped[begin:end].transpose(0, 1).reshape(shape[1], -1, shape[3])
            scores = torch.baddbmm(
                self._none, tile, keys[:, :seen].transpose(1, 2), beta=0, alpha=self._scale
            )
            own = scores.view(shape[1], count, shape[2], seen)[..., seen - count :]
            own += self._future[:count, None, :count]
            mixed = torch.bmm(torch.softmax(scores, dim=-1), values[:, :seen])
            result[begin:end].transpose(0, 1).copy_(mixed.view(shape[1], count, *shape[2:]))

    def _gathered(self, piece: Piece, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values: (2, K, shared, D), and (2, K · sequences, length, D)."""
        row = self._block_tokens * self._head_dim
        needed = piece.gather.shape[0] * row
        if self._scratch.shape[0] < needed:
            self._scratch = torch.empty(needed, dtype=self._dtype)
        gathered = self._scratch[:needed]
        torch.index_select(cache.view(-1, row), 0, piece.gather, out=gathered.view(-1, row))
        cut = 2 * self._kv_heads * piece.shared * self._head_dim
        shared = gathered[:cut].view(2, self._kv_heads, piece.shared, self._head_dim)
        heads = self._kv_heads * piece.sequences
        return shared, gathered[cut:].view(2, heads, piece.length, self._head_dim)
