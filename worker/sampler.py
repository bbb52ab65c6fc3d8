"""Chooses each row's next token, for all rows of a step at once.

A draw is a function of its logits and of (seed, choice, index), and of nothing else: not of
the row's place in the batch, nor of what other rows ask for. The order is that of
`kernels.reference.filtered_probabilities`: temperature, top-k, top-p, then one uniform
number inverts the cumulative distribution from the likeliest token down.

Only the likeliest tokens of a row are sorted, more of them where its draw falls outside, and
the whole row at the last. The token is the same whichever is enough.
"""

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from core.protocol import TokenLogprob
from kernels.philox import uniform
from kernels.reference import sampling_order
from worker.step import Draw, Opening, Sampled

# Tokens sorted at first, and then. Of SmolLM2's 49,152 logits the likeliest 256 take 0.1 ms
# to find and sorting all takes 19 ms.
CANDIDATES = (256, 8192)
# Dividing by less would make an infinity of a difference of logits; this is greedy already.
TEMPERATURE_MIN = 1e-30


class Sampler:
    """Draws for the slots it was told of."""

    def __init__(self) -> None:
        self._slots: dict[int, Opening] = {}

    def sample(self, logits: Tensor, draws: Sequence[Draw]) -> tuple[Sampled, ...]:
        """One token for each row of `logits` (S, V) float32, chosen as the row's draw says."""
        for draw in draws:
            if draw.opening is not None:
                self._slots[draw.slot] = draw.opening
        return sample(logits, [AskedDraw.of(self._slots[draw.slot], draw.index) for draw in draws])


class AskedDraw(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A draw and all that it depends on."""

    seed: int
    choice: int
    index: int
    temperature: float
    top_p: float
    top_k: int
    logprobs: int | None

    @classmethod
    def of(cls, opening: Opening, index: int) -> "AskedDraw":
        """The draw at `index` of an answer."""
        sampling = opening.sampling
        return cls(
            seed=sampling.seed,
            choice=opening.choice,
            index=index,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            logprobs=sampling.logprobs,
        )


def sample(logits: Tensor, draws: Sequence[AskedDraw]) -> tuple[Sampled, ...]:
    """One token for each row of `logits` (S, V) float32, chosen as the row's draw says."""
    tokens = torch.argmax(logits, dim=-1)  # the lowest id among equals
    random = [row for row, draw in enumerate(draws) if draw.temperature > 0]
    if random:
        rows = torch.tensor(random)
        tokens[rows] = draw_tokens(logits[rows], [draws[row] for row in random])
    told = _logprobs(logits, draws, tokens)
    return tuple(
        Sampled(token_id=token, logprob=told.get(row)) for row, token in enumerate(tokens.tolist())
    )


def draw_tokens(
    logits: Tensor, draws: Sequence[AskedDraw], candidates: Sequence[int] = CANDIDATES
) -> Tensor:
    """Token ids (S,) for rows of temperature over 0. Does not change `logits`."""
    asked = _Asked(draws)
    scaled = (logits - logits.amax(-1, keepdim=True)).div_(asked.temperature[:, None]).exp_()
    total = scaled.sum(-1, keepdim=True, dtype=torch.float64)
    tokens = torch.empty(len(draws), dtype=torch.int64)
    rest = torch.arange(len(draws))
    for count in (*(size for size in candidates if size < logits.shape[1]), logits.shape[1]):
        ids, sure = _likeliest(logits[rest], count)
        cumulative = (scaled[rest].gather(1, ids).double() / total[rest]).cumsum(1)
        place, settled = asked.invert(rest, cumulative, sure)
        tokens[rest] = ids.gather(1, place[:, None])[:, 0]
        rest = rest[~settled]
        if not len(rest):
            break
    return tokens


class _Asked:
    """The draws of a batch, as columns."""

    def __init__(self, draws: Sequence[AskedDraw]) -> None:
        temperature = torch.tensor([draw.temperature for draw in draws])
        self.temperature = temperature.clamp(min=TEMPERATURE_MIN)
        self._top_k = torch.tensor([draw.top_k for draw in draws])
        self._top_p = torch.tensor([draw.top_p for draw in draws], dtype=torch.float64)
        words = torch.tensor([(draw.seed, draw.choice, draw.index) for draw in draws])
        self._chance = uniform(*words.unbind(1))

    def invert(self, rows: Tensor, cumulative: Tensor, sure: Tensor) -> tuple[Tensor, Tensor]:
        """Where each of `rows` lands in its order, and whether the first `sure` settle that.

        `cumulative` (rows, n) holds shares of the whole vocabulary's probability, so that
        each filter is a bound on it.
        """
        top_k, top_p, chance = self._top_k[rows], self._top_p[rows], self._chance[rows]
        bounded, open_ended = top_k > 0, (top_k == 0) & (top_p >= 1.0)
        last = torch.where(bounded, top_k, cumulative.shape[1]).clamp_(max=cumulative.shape[1]) - 1
        mass = torch.where(bounded, _at(cumulative, last), 1.0)
        # The nucleus ends with the first token that reaches top_p of what top_k has left, and
        # in any case where the probabilities have run out.
        reaching = _count_below(cumulative, top_p * mass)
        ends = torch.minimum(reaching, _count_below(cumulative, cumulative[:, -1]))
        ends = torch.minimum(ends, last)
        kept = torch.where(open_ended, 1.0, _at(cumulative, ends))
        passed = (cumulative <= (chance * kept)[:, None]).sum(1)
        place = torch.minimum(passed, ends)
        decisive = torch.where(open_ended, place, ends) < sure
        return place, torch.where(bounded, top_k <= sure, decisive)


def _likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest ids (S, count) in sampling order, and how many of them are sure.

    `topk` breaks ties as it likes: among the values equal to the last one it may have passed
    over a lower id, so only those above it are sure to be in their place.
    """
    if count == logits.shape[1]:
        return sampling_order(logits), torch.full((len(logits),), count)
    ids = torch.topk(logits, count, dim=-1).indices.sort(dim=-1).values
    values = logits.gather(1, ids)
    sure = (values > values.amin(-1, keepdim=True)).sum(-1)
    return ids.gather(1, sampling_order(values)), sure


def _count_below(cumulative: Tensor, bound: Tensor) -> Tensor:
    return (cumulative < bound[:, None]).sum(1)


def _at(cumulative: Tensor, index: Tensor) -> Tensor:
    return cumulative.gather(1, index[:, None])[:, 0]


def _logprobs(
    logits: Tensor, draws: Sequence[AskedDraw], tokens: Tensor
) -> dict[int, TokenLogprob]:
    """For the rows that asked. Raw: neither temperature nor filters have a part in it."""
    asked = {row: draw.logprobs for row, draw in enumerate(draws) if draw.logprobs is not None}
    if not asked:
        return {}
    rows = torch.tensor(list(asked))
    logprobs = torch.log_softmax(logits[rows], dim=-1)
    chosen = logprobs.gather(1, tokens[rows][:, None])[:, 0].tolist()
    # Sorting more than asked for keeps ties at the end out of what is told.
    count = min(max(CANDIDATES[0], *asked.values()), logits.shape[1])
    ids, _ = _likeliest(logits[rows], count)
    top = zip(ids.tolist(), logprobs.gather(1, ids).tolist(), strict=True)
    return {
        row: TokenLogprob(
            id=token,
            logprob=logprob,
            top=tuple(zip(row_ids[:wanted], row_logprobs[:wanted], strict=True)),
        )
        for (row, wanted), token, logprob, (row_ids, row_logprobs) in zip(
            asked.items(), tokens[rows].tolist(), chosen, top, strict=True
        )
    }
