"""Attention over the paged cache, on a processor: gather, multiply, softmax, multiply.

Once a step, `plan` sorts out which tokens attend to which blocks; each layer then follows
that plan with no Python per sequence beyond it. Two kinds of piece:

    decode    sequences with one query each, batched, padded to the longest of the piece
    prefill   one sequence, its queries in tiles, each against just what its last one sees

Same results as `reference.paged_attention`, up to rounding. Letters as there; the cache of
one layer is (N, 2, K, B, D), contiguous.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Queries of a prefill handled at once. Measured on SmolLM2's heads in bf16, 512 queries over
# 2,048 positions: 14.5, 11.3, 18.8 and 23.9 ms for 32, 64, 128 and 256; torch's own SDPA 21.6.
TILE_TOKENS = 64
# Positions that a decode piece gathers at once, so that the copy is read back from cache.
GATHER_TOKENS = 4096
# Padding a short sequence up to this many positions costs less than a piece of its own.
PAD_TOKENS = 256


@dataclass(frozen=True)
class Span:
    """Packed tokens of one sequence: `count` of them, at positions from `start` on."""

    start: int
    count: int
    blocks: tuple[int, ...]  # covers positions 0 to start + count


@dataclass(frozen=True)
class _Piece:
    first: int  # packed token
    sequences: int
    queries: int  # of each sequence
    length: int  # positions gathered for each sequence, a multiple of the block
    gather: Tensor  # (2 · K · sequences · blocks,) rows of B · D in a layer's cache
    bias: Tensor | None  # decode: (K · sequences, 1, length), -inf where padded
    start: int  # prefill: position of the first query


@dataclass(frozen=True)
class AttentionPlan:
    """What one step reads and writes, the same for every layer."""

    slots: Tensor  # (T, 2 K) rows of D in a layer's cache
    pieces: tuple[_Piece, ...]


def packing_order(spans: Sequence[Span]) -> list[int]:
    """The order in which a step's spans must be packed: decodes, longest first, then the rest."""
    return sorted(range(len(spans)), key=lambda i: (spans[i].count > 1, -len(spans[i].blocks)))


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
        decodes = sum(span.count == 1 for span in spans)
        pieces = [*self._decode_pieces(spans[:decodes])]
        first = decodes
        for span in spans[decodes:]:
            pieces.append(self._prefill_piece(first, span))
            first += span.count
        return AttentionPlan(slots=self._slots(spans), pieces=tuple(pieces))

    def write(self, plan: AttentionPlan, cache: Tensor, keys_values: Tensor) -> None:
        """Store a layer's new (T, 2 K, D), keys before values. Writes `cache` in place."""
        cache.view(-1, self._head_dim).index_put_((plan.slots,), keys_values)

    def attend(self, plan: AttentionPlan, queries: Tensor, cache: Tensor, out: Tensor) -> None:
        """Fill `out` (T, H, D) for `queries` (T, H, D). The layer's own KV is already written."""
        for piece in plan.pieces:
            keys, values = self._gathered(piece, cache)
            end = piece.first + piece.sequences * piece.queries
            step = self._decode if piece.bias is not None else self._prefill
            step(piece, queries[piece.first : end], keys, values, out[piece.first : end])

    def _decode(
        self, piece: _Piece, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor
    ) -> None:
        assert piece.bias is not None
        shape = (piece.sequences, self._kv_heads, self._group, self._head_dim)
        grouped = queries.reshape(shape).transpose(0, 1).reshape(-1, *shape[2:])
        scores = torch.baddbmm(piece.bias, grouped, keys.transpose(1, 2), alpha=self._scale)
        mixed = torch.bmm(torch.softmax(scores, dim=-1), values)
        out.view(shape).transpose(0, 1).copy_(mixed.view(self._kv_heads, -1, *shape[2:]))

    def _prefill(
        self, piece: _Piece, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor
    ) -> None:
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

    def _gathered(self, piece: _Piece, cache: Tensor) -> tuple[Tensor, Tensor]:
        row = self._block_tokens * self._head_dim
        needed = piece.gather.shape[0] * row
        if self._scratch.shape[0] < needed:
            self._scratch = torch.empty(needed, dtype=self._dtype)
        gathered = self._scratch[:needed].view(-1, row)
        torch.index_select(cache.view(-1, row), 0, piece.gather, out=gathered)
        both = gathered.view(2, self._kv_heads * piece.sequences, piece.length, self._head_dim)
        return both[0], both[1]

    def _decode_pieces(self, spans: Sequence[Span]) -> Iterator[_Piece]:
        first = 0
        while first < len(spans):
            longest = len(spans[first].blocks)
            end = first + 1
            while end < len(spans) and self._joins(spans[end], longest, end - first):
                end += 1
            yield self._decode_piece(first, spans[first:end], longest)
            first = end

    def _joins(self, span: Span, longest: int, members: int) -> bool:
        padded = longest * self._block_tokens
        close = padded <= PAD_TOKENS or 2 * len(span.blocks) >= longest
        return close and (members + 1) * padded <= GATHER_TOKENS

    def _decode_piece(self, first: int, spans: Sequence[Span], blocks: int) -> _Piece:
        # A row's own first block fills its table up: whatever it holds, it is that row's.
        tables = np.array([(*s.blocks, *s.blocks[:1] * (blocks - len(s.blocks))) for s in spans])
        length = blocks * self._block_tokens
        ends = torch.tensor([span.start + 1 for span in spans])
        hidden = torch.arange(length) >= ends[:, None]
        bias = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -torch.inf)
        return _Piece(
            first=first,
            sequences=len(spans),
            queries=1,
            length=length,
            gather=self._gather_rows(tables),
            bias=bias.repeat(self._kv_heads, 1)[:, None],
            start=0,
        )

    def _prefill_piece(self, first: int, span: Span) -> _Piece:
        return _Piece(
            first=first,
            sequences=1,
            queries=span.count,
            length=len(span.blocks) * self._block_tokens,
            gather=self._gather_rows(np.array([span.blocks])),
            bias=None,
            start=span.start,
        )

    def _gather_rows(self, tables: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Tensor:
        halves = np.arange(2 * self._kv_heads)[:, None, None]
        return torch.from_numpy((tables * (2 * self._kv_heads) + halves).reshape(-1))

    def _slots(self, spans: Sequence[Span]) -> Tensor:
        blocks, offsets = [], []
        for span in spans:
            positions = np.arange(span.start, span.start + span.count)
            blocks.append(np.array(span.blocks)[positions // self._block_tokens])
            offsets.append(positions % self._block_tokens)
        halves = np.arange(2 * self._kv_heads)
        rows = np.concatenate(blocks)[:, None] * (2 * self._kv_heads) + halves
        slots = rows * self._block_tokens + np.concatenate(offsets)[:, None]
        return torch.from_numpy(slots)
