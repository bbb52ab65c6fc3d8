"""What one step's attention reads and writes on a processor: plain indices, once a step.

Two kinds of piece:

    decode    sequences with one query each, batched, padded to the longest of the piece; those
              that share their first blocks read them once, as one matrix for all of them
    prefill   one sequence, its queries in tiles, each against just what its last one sees

Letters as in `kernels.reference`; a layer's cache is (N, 2, K, B, D), contiguous.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Positions that a decode piece gathers at once, so that the copy is read back from cache.
GATHER_TOKENS = 4096
# Padding a short sequence up to this many positions costs less than a piece of its own.
PAD_TOKENS = 256
# Sharing fewer positions than this does not pay for a product and a softmax in two parts.
SHARED_TOKENS_MIN = 64

Table = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True)
class Span:
    """Packed tokens of one sequence: `count` of them, at positions from `start` on."""

    start: int
    count: int
    blocks: tuple[int, ...]  # covers positions 0 to start + count


@dataclass(frozen=True)
class Piece:
    """`gather` lists rows of B · D in a layer's cache: first those shared, then each one's own."""

    first: int  # packed token
    sequences: int
    queries: int  # of each sequence
    shared: int  # positions that all of them read from the same blocks, a multiple of B
    length: int  # positions after those gathered for each sequence, a multiple of B
    gather: Tensor  # (2 · K · (shared / B + sequences · length / B),)
    bias: Tensor | None  # decode: (K · sequences, 1, length), -inf where padded
    start: int  # prefill: position of the first query


@dataclass(frozen=True)
class AttentionPlan:
    """The same for every layer."""

    slots: Tensor  # (T, 2 K) rows of D in a layer's cache
    pieces: tuple[Piece, ...]


def packing_order(spans: Sequence[Span]) -> list[int]:
    """The order in which a step's spans must be packed.

    Decodes come first, and of them those with the same first block beside each other, each
    group longest first; then the rest as they came.
    """
    alike: dict[int, list[int]] = defaultdict(list)
    for place, span in enumerate(spans):
        if span.count == 1:
            alike[span.blocks[0]].append(place)

    def longest_first(place: int) -> int:
        return -len(spans[place].blocks)

    groups = [sorted(group, key=longest_first) for group in alike.values() if len(group) > 1]
    alone = sorted((g[0] for g in alike.values() if len(g) == 1), key=longest_first)
    prefills = [place for place, span in enumerate(spans) if span.count > 1]
    return [*(place for group in groups for place in group), *alone, *prefills]


class Planner:
    """Plans for one model's heads and one size of block."""

    def __init__(self, *, num_kv_heads: int, block_tokens: int, dtype: torch.dtype) -> None:
        self._kv_heads = num_kv_heads
        self._block_tokens = block_tokens
        self._dtype = dtype

    def plan(self, spans: Sequence[Span]) -> AttentionPlan:
        """What to read and write for spans that are packed in `packing_order`."""
        decodes = sum(span.count == 1 for span in spans)
        pieces = [*self._decode_pieces(spans[:decodes])]
        first = decodes
        for span in spans[decodes:]:
            pieces.append(self._prefill_piece(first, span))
            first += span.count
        return AttentionPlan(slots=self.slots(spans), pieces=tuple(pieces))

    def slots(self, spans: Sequence[Span]) -> Tensor:
        """Where the spans' new keys and values go: (T, 2 K) rows of D in a layer's cache."""
        blocks, offsets = [], []
        for span in spans:
            positions = np.arange(span.start, span.start + span.count)
            blocks.append(np.array(span.blocks)[positions // self._block_tokens])
            offsets.append(positions % self._block_tokens)
        halves = np.arange(2 * self._kv_heads)
        rows = np.concatenate(blocks)[:, None] * (2 * self._kv_heads) + halves
        slots = rows * self._block_tokens + np.concatenate(offsets)[:, None]
        return torch.from_numpy(slots)

    def _decode_pieces(self, spans: Sequence[Span]) -> Iterator[Piece]:
        first = 0
        while first < len(spans):
            shared, group = self._sharing(spans, first)
            longest = len(spans[first].blocks) - shared
            end = first + 1
            while end < group and self._joins(spans[end], shared, longest, end - first):
                end += 1
            yield self._decode_piece(first, spans[first:end], shared, longest)
            first = end

    def _sharing(self, spans: Sequence[Span], first: int) -> tuple[int, int]:
        """How many blocks the spans from `first` on share, and where those that do end.

        Too few are none, and then anything may follow. A block is only shared where every
        position of it is in the past: nobody writes it any more.
        """
        end = first
        while end < len(spans) and spans[end].blocks[0] == spans[first].blocks[0]:
            end += 1
        past = min(span.start for span in spans[first:end]) // self._block_tokens
        tables = np.array([span.blocks[:past] for span in spans[first:end]])
        differs = (tables != tables[0]).any(axis=0).nonzero()[0]
        shared = int(differs[0]) if len(differs) else past
        if end - first > 1 and shared * self._block_tokens >= SHARED_TOKENS_MIN:
            return shared, end
        return 0, len(spans)

    def _joins(self, span: Span, shared: int, longest: int, members: int) -> bool:
        own, padded = len(span.blocks) - shared, longest * self._block_tokens
        close = padded <= PAD_TOKENS or 2 * own >= longest
        return close and own <= longest and (members + 1) * padded <= GATHER_TOKENS

    def _decode_piece(self, first: int, spans: Sequence[Span], shared: int, own: int) -> Piece:
        # A row's own first block fills its table up: whatever it holds, it is that row's.
        tables = np.array(
            [(*s.blocks[shared:], *s.blocks[:1] * (own + shared - len(s.blocks))) for s in spans]
        )
        length, begin = own * self._block_tokens, shared * self._block_tokens
        ends = torch.tensor([span.start + 1 - begin for span in spans])
        hidden = torch.arange(length) >= ends[:, None]
        bias = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -torch.inf)
        rows = [self._gather_rows(np.array([spans[0].blocks[:shared]], dtype=np.int64))]
        return Piece(
            first=first,
            sequences=len(spans),
            queries=1,
            shared=begin,
            length=length,
            gather=torch.cat([*rows, self._gather_rows(tables)]),
            bias=bias.repeat(self._kv_heads, 1)[:, None],
            start=0,
        )

    def _prefill_piece(self, first: int, span: Span) -> Piece:
        return Piece(
            first=first,
            sequences=1,
            queries=span.count,
            shared=0,
            length=len(span.blocks) * self._block_tokens,
            gather=self._gather_rows(np.array([span.blocks])),
            bias=None,
            start=span.start,
        )

    def _gather_rows(self, tables: Table) -> Tensor:
        halves = np.arange(2 * self._kv_heads)[:, None, None]
        return torch.from_numpy((tables * (2 * self._kv_heads) + halves).reshape(-1))
