"""Kernels whose results for a token depend on that token's sequence alone, bit for bit.

Libraries choose other sums for other shapes, so here no shape depends on what else is in the
step, on how a prompt was cut into chunks or on the size of blocks:

    by rows     tiles of ROWS tokens, the last one padded: a row's place in a tile changes, its
                shape never does; `check_rows` proves that the place does not matter
    attention   a query at position p is row p % ROWS of its tile and meets KEYS positions at a
                time from position 0 on, so all its shapes follow from p; partial sums are
                added in that order

Slower than `cpu_attention` and `cpu_linear`: a lone decode pays for ROWS.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels import cpu_pointwise
from kernels.cpu_attention_plan import AttentionPlan, Piece, Planner, Span
from kernels.cpu_linear import PackedLinear, PlainLinear, can_pack

ROWS = 16
KEYS = 64


class NotInvariantError(Exception):
    """This machine's matrix products depend on where in a tile a row is."""


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` on `x` (T, …), ROWS of it at a time; what is added is cut off again."""
    pieces = []
    for begin in range(0, len(x), ROWS):
        tile = x[begin : begin + ROWS]
        count = len(tile)
        if count < ROWS:
            tile = torch.cat((tile, tile.new_zeros(ROWS - count, *tile.shape[1:])))
        # A view at any offset would be aligned in any way, and that too can choose a loop.
        pieces.append(function(tile.clone())[:count])
    return torch.cat(pieces)


class InvariantLinear:
    """A linear map by rows."""

    def __init__(self, *weights: Tensor) -> None:
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        self._product = PackedLinear(weight) if can_pack(weight.dtype) else PlainLinear(weight)
        check_rows(self._product, weight.new_empty(ROWS, weight.shape[1]))

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""
        return by_rows(self._product, x)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The product, plus `other`."""
        return self(x).add_(other)


class InvariantGated:
    """The gated product by rows."""

    def __init__(self, gate: Tensor, up: Tensor) -> None:
        self._both = InvariantLinear(gate, up)

    def __call__(self, x: Tensor) -> Tensor:
        """The gated product."""
        return by_rows(_silu_mul, self._both(x))


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`cpu_pointwise.rms_norm` by rows."""
    return by_rows(lambda tile: cpu_pointwise.rms_norm(tile, weight, eps), hidden)


def rope_in_place(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """`cpu_pointwise.rope_in_place` by rows."""
    width = heads.shape[1]

    def turned(tile: Tensor) -> Tensor:
        turning = tile[:, :width]
        cpu_pointwise.rope_in_place(turning, tile[:, width : width + 1], tile[:, width + 1 :])
        return turning

    wide = torch.cat((heads.float(), cos, sin), dim=1)
    heads.copy_(by_rows(turned, wide))


def check_rows(product: Callable[[Tensor], Tensor], like: Tensor) -> None:
    """Raise NotInvariantError unless each row of a tile gives the same bits at each place."""
    dice = torch.Generator().manual_seed(0)
    tile = torch.randn(like.shape, generator=dice).to(like.dtype)
    found = product(tile)
    for places in range(1, ROWS):
        if not torch.equal(product(tile.roll(places, 0)).roll(-places, 0), found):
            raise NotInvariantError(f"a product of {tuple(like.shape)} rounds by place")


class InvariantAttention:
    """`PagedAttention`, a query at a time as far as its numbers go. float32 inside."""

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
        self._scale = head_dim**-0.5
        # For each place of a tile of queries within the last tile of its keys.
        rows = torch.arange(KEYS).view(-1, ROWS, 1).repeat_interleave(self._group, dim=1)
        self._future = torch.zeros(KEYS // ROWS, ROWS * self._group, KEYS)
        self._future.masked_fill_(torch.arange(KEYS) > rows, -torch.inf)

    def plan(self, spans: Sequence[Span]) -> AttentionPlan:
        """What to read and write for spans that are packed in any order."""
        pieces, first = [], 0
        for span in spans:
            pieces.append(self._piece(first, span))
            first += span.count
        return AttentionPlan(slots=self._planner.slots(spans), pieces=tuple(pieces))

    def write(self, plan: AttentionPlan, cache: Tensor, keys_values: Tensor) -> None:
        """See `PagedAttention.write`."""
        cache.view(-1, self._head_dim).index_put_((plan.slots,), keys_values)

    def attend(self, plan: AttentionPlan, queries: Tensor, cache: Tensor, out: Tensor) -> None:
        """See `PagedAttention.attend`."""
        for piece in plan.pieces:
            gathered = cache.view(-1, self._head_dim).index_select(0, piece.gather).float()
            shape = (2, piece.length // KEYS, self._kv_heads, KEYS, self._head_dim)
            keys, values = gathered.view(shape)
            end = piece.start + piece.queries
            for tile in range(piece.start // ROWS, -(-end // ROWS)):
                begin = tile * ROWS
                here = slice(max(begin, piece.start) - begin, min(begin + ROWS, end) - begin)
                there = slice(
                    piece.first + here.start + begin - piece.start,
                    piece.first + here.stop + begin - piece.start,
                )
                asked = torch.zeros(ROWS, *queries.shape[1:])
                asked[here] = queries[there].float()
                out[there] = self._tile(tile, asked, keys, values)[here]

    def _tile(self, tile: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """(ROWS, H, D) for the queries at `tile * ROWS` and on."""
        parts, place = divmod(tile * ROWS, KEYS)
        parts += 1
        heads = queries.view(ROWS, self._kv_heads, self._group, self._head_dim).transpose(0, 1)
        asked = heads.reshape(1, self._kv_heads, -1, self._head_dim)
        asked = asked.expand(parts, -1, -1, -1).reshape(-1, *asked.shape[2:])
        scores = torch.bmm(asked, keys[:parts].flatten(0, 1).transpose(1, 2)).mul_(self._scale)
        scores = scores.view(parts, self._kv_heads, -1, KEYS)
        scores[-1] += self._future[place // ROWS]
        weights = torch.exp(scores.sub_(scores.amax(dim=(0, 3), keepdim=True)))
        mixed = torch.bmm(weights.flatten(0, 1), values[:parts].flatten(0, 1))
        # A cumulative sum is one addition after the other, however many there are.
        total = weights.sum(-1, keepdim=True).cumsum(0)[-1]
        share = mixed.view(parts, self._kv_heads, -1, self._head_dim).cumsum(0)[-1] / total
        return share.view(self._kv_heads, ROWS, -1, self._head_dim).transpose(0, 1).flatten(1, 2)

    def _piece(self, first: int, span: Span) -> Piece:
        end = span.start + span.count
        length = -(-end // KEYS) * KEYS
        # What lies after the end is hidden from everyone: any row that is a number will do.
        positions = np.arange(length).clip(max=end - 1)
        halves = np.arange(2 * self._kv_heads).reshape(2, 1, self._kv_heads, 1)
        blocks = np.array(span.blocks)[positions // self._block_tokens].reshape(1, -1, 1, KEYS)
        offsets = (positions % self._block_tokens).reshape(1, -1, 1, KEYS)
        rows = (blocks * (2 * self._kv_heads) + halves) * self._block_tokens + offsets
        return Piece(
            first=first,
            sequences=1,
            queries=span.count,
            shared=0,
            length=length,
            gather=torch.from_numpy(rows.reshape(-1)),
            bias=None,
            start=span.start,
        )


def _silu_mul(both: Tensor) -> Tensor:
    """`silu(gate) * up`, by operations that round alike in vectors and in their remainders."""
    gate, up = both.float().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(both.dtype)
