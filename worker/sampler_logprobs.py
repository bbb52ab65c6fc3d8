"""Logprobs as they are told: raw, of the chosen token and of the likeliest.

Raw: neither temperature nor penalties, constraints or filters have a part in them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from core.protocol import TokenLogprob
from worker.sampler_search import likeliest

# Sorting more than is asked for keeps ties at the end out of what is told.
CANDIDATES_MIN = 64


def tell(logprobs: Tensor, tokens: Tensor, counts: Sequence[int]) -> list[TokenLogprob]:
    """For each row of `logprobs` (R, V) its token of `tokens` (R,), and `counts` likeliest."""
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    most = max(counts, default=0)
    if not most:
        tops: list[tuple[tuple[int, float], ...]] = [()] * len(counts)
    else:
        ids = _top(logprobs, most)
        values = logprobs.gather(1, ids)
        tops = [
            tuple(zip(row_ids[:count], row_values[:count], strict=True))
            for row_ids, row_values, count in zip(
                ids.tolist(), values.tolist(), counts, strict=True
            )
        ]
    return [
        TokenLogprob(id=token, logprob=logprob, top=top)
        for token, logprob, top in zip(tokens.tolist(), chosen.tolist(), tops, strict=True)
    ]


def _top(logprobs: Tensor, most: int) -> Tensor:
    """At least the `most` likeliest ids of each row, or all, in sampling order."""
    vocab = logprobs.shape[1]
    count = min(max(CANDIDATES_MIN, 2 * most), vocab)
    ids, sure = likeliest(logprobs, count)
    if count < vocab and bool((sure < most).any()):
        ids = likeliest(logprobs, vocab)[0]
    return ids[:, : min(most, vocab)]


def raw(logits: Tensor) -> Tensor:
    """Natural logarithms (R, V) of the model's own probabilities."""
    return torch.log_softmax(logits, dim=-1)
