"""Random draws: temperature, min_p, top-k, top-p, then one number inverts what is left.

The order is that of `kernels.reference.filtered_probabilities`, and so are the tokens. Every
filter keeps the likeliest so many of a row, hence is a bound on its order; only the likeliest
are sorted, more of them where a draw falls outside, and the whole row at the last.
"""

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from kernels.philox import uniform
from worker.sampler_search import likeliest, total

# Tokens sorted at first, and then. Of SmolLM2's 49,152 logits the likeliest 256 take 0.1 ms
# to find and sorting all takes 19 ms.
CANDIDATES = (256, 8192)
# Numbers sorted at once: bounds the memory that whole rows take.
SORTED_MAX = 1 << 20


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of the draws of R rows. Columns of shape (R,)."""

    temperature: Tensor  # float32, over 0
    top_p: Tensor  # float64
    top_k: Tensor  # int64; 0 is off
    min_p: Tensor  # float32; 0 is off
    seed: Tensor  # int64, as are choice and index
    choice: Tensor
    index: Tensor


def draw_tokens(
    logits: Tensor, peaks: Tensor, asked: Asked, candidates: Sequence[int] = CANDIDATES
) -> Tensor:
    """Token ids (R,) for `logits` (R, V), whose largest are `peaks` (R,), all finite.

    Does not change `logits`.
    """
    vocab = logits.shape[1]
    scaled = (logits - peaks[:, None]).div_(asked.temperature[:, None]).exp_()
    whole = total(scaled)
    bounds = _Bounds(asked, scaled)
    tokens = torch.empty(len(logits), dtype=torch.int64)
    rest = torch.arange(len(logits))
    for count in (*(size for size in candidates if size < vocab), vocab):
        unsettled = []
        for rows in torch.split(rest, max(1, SORTED_MAX // count)):
            ids, sure = likeliest(_take(logits, rows), count)
            shares = _take(scaled, rows).gather(1, ids).double().div_(whole[rows])
            place, settled = bounds.invert(rows, shares.cumsum(1), sure)
            tokens[rows] = ids.gather(1, place[:, None])[:, 0]
            unsettled.append(rows[~settled])
        rest = torch.cat(unsettled)
        if not len(rest):
            break
    return tokens


class _Bounds:
    """How far into its order each row's draw may reach, and where in it the draw falls."""

    def __init__(self, asked: Asked, scaled: Tensor) -> None:
        vocab = scaled.shape[1]
        self._limit = torch.where(asked.top_k > 0, asked.top_k, vocab).clamp_(max=vocab)
        if bool((asked.min_p > 0).any()):
            likely = (scaled >= asked.min_p[:, None]).sum(1)  # the likeliest is 1 here
            self._limit = torch.minimum(self._limit, likely)
        self._vocab = vocab
        self._top_p = asked.top_p
        self._chance = uniform(asked.seed, asked.choice, asked.index)

    def invert(self, rows: Tensor, cumulative: Tensor, sure: Tensor) -> tuple[Tensor, Tensor]:
        """Where each of `rows` lands in its order, and whether the first `sure` settle that.

        `cumulative` (rows, n) holds shares of the whole vocabulary's probability, so that
        each filter is a bound on it.
        """
        limit, top_p, chance = self._limit[rows], self._top_p[rows], self._chance[rows]
        bounded = limit < self._vocab
        open_ended = ~bounded & (top_p >= 1.0)
        last = limit.clamp(max=cumulative.shape[1]) - 1
        mass = torch.where(bounded, _at(cumulative, last), 1.0)
        # The nucleus ends with the first token that reaches top_p of what the limit has left,
        # and in any case where the probabilities have run out.
        reaching = _count_below(cumulative, top_p * mass)
        ends = torch.minimum(reaching, _count_below(cumulative, cumulative[:, -1]))
        ends = torch.minimum(ends, last)
        kept = torch.where(open_ended, 1.0, _at(cumulative, ends))
        passed = (cumulative <= (chance * kept)[:, None]).sum(1)
        place = torch.minimum(passed, ends)
        decisive = torch.where(open_ended, place, ends) < sure
        return place, torch.where(bounded, limit <= sure, decisive)


def _take(matrix: Tensor, rows: Tensor) -> Tensor:
    """The rows, which rise; no copy when they are all."""
    return matrix if len(rows) == len(matrix) else matrix[rows]


def _count_below(cumulative: Tensor, bound: Tensor) -> Tensor:
    return (cumulative < bound[:, None]).sum(1)


def _at(cumulative: Tensor, index: Tensor) -> Tensor:
    return cumulative.gather(1, index[:, None])[:, 0]
