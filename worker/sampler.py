"""Chooses each row's next token, for all rows of a step at once, in the documented order.

    raw logprobs │ allowed ids, bad words, min_tokens, grammar ─ bias ─ repetition, frequency,
                 │ presence ─ the likeliest, or temperature ─ min_p ─ top-k ─ top-p ─ draw

A draw is a function of its logits, of its answer so far and of (seed, choice, index), and of
nothing else: not of the row's place in the batch, nor of what other rows ask for. What a row
has none of is not done; what no row has costs nothing. A row that cannot be drawn from is a
fault of its own. docs/sampling.md says it to users, `kernels.reference` to tests.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.protocol import TokenLogprob
from worker.sampler_columns import Columns, Slots, Use
from worker.sampler_constraints import Constraints
from worker.sampler_draws import draw_tokens
from worker.sampler_logprobs import raw, tell
from worker.sampler_masks import Fill, MaskError, Masks, apply_masks
from worker.sampler_penalties import Penalties
from worker.sampler_search import highest
from worker.step import Draw, Opening, Sampled

NO_NUMBERS = "the model's logits are not numbers"
NO_GRAMMARS = "grammars are not served here"
NOTHING_LEFT = "its constraints leave no token to choose from"

Rows = NDArray[np.int64]


class Sampler:
    """Draws for the slots it was told of.

    `eos_ids` end an answer unless it ignores them. Ids from `vocab_size` on are no tokens,
    though a model may have logits for them; None: all are. Without `masks` no grammar is let in.
    """

    def __init__(
        self,
        max_slots: int,
        *,
        vocab_size: int | None = None,
        eos_ids: Iterable[int] = (),
        masks: Masks | None = None,
    ) -> None:
        self._columns = Columns(max_slots)
        self._constraints = Constraints(max_slots, eos_ids)
        self._penalties = Penalties(max_slots)
        self._vocab_size = vocab_size
        self._masks = masks

    def sample(self, logits: Tensor, draws: Sequence[Draw]) -> tuple[Sampled, ...]:
        """One token for each row of `logits` (S, V) float32. Writes `logits` in place."""
        for draw in draws:
            if draw.opening is not None:
                self._open(draw.slot, draw.opening)
        if not draws:
            return ()
        self._cut(logits)
        step = _Step(self._columns, draws)
        asked = step.rows(Use.LOGPROBS)
        logprobs = raw(_take(logits, asked)) if len(asked) else None
        filled = self._change(logits, step) if step.used & Use.CHANGES else None
        tokens = self._choose(logits, step)
        ended = self._accept(step, tokens.numpy(), filled)
        told: dict[int, TokenLogprob] = {}
        if logprobs is not None:
            counts = self._columns.logprobs[step.slots[asked]].tolist()
            chances = tell(logprobs, tokens[torch.from_numpy(asked)], counts)
            told = dict(zip(asked.tolist(), chances, strict=True))
        return tuple(
            step.faults.get(row)
            or Sampled(token_id=token, logprob=told.get(row), ends=row in ended)
            for row, token in enumerate(tokens.tolist())
        )

    def tell(self, logits: Tensor, tokens: Tensor, counts: Sequence[int]) -> list[TokenLogprob]:
        """Raw logprobs of given tokens (R,), and of the `counts` likeliest. Writes `logits`."""
        self._cut(logits)
        return tell(raw(logits), tokens, counts)

    def _cut(self, logits: Tensor) -> None:
        if self._vocab_size is not None and self._vocab_size < logits.shape[1]:
            logits[:, self._vocab_size :] = -torch.inf

    def _open(self, slot: int, opening: Opening) -> None:
        self._columns.open(slot, opening)
        uses = self._columns.uses[slot]
        self._constraints.forget(slot)
        if uses & Use.CONSTRAINTS:
            self._constraints.open(slot, opening)
        if uses & Use.PENALTIES:
            self._penalties.open(slot, opening)
        if self._masks is not None:
            self._masks.open(slot, opening)

    def _change(self, logits: Tensor, step: "_Step") -> Fill | None:
        """All that happens to logits before a token is chosen from them."""
        spoilt = ~torch.isfinite(logits.amax(-1))
        if bool(spoilt.any()):
            step.fail(spoilt, NO_NUMBERS)
            logits[spoilt] = 0.0
        filled = None
        if step.used & Use.GRAMMAR:
            filled = self._fill(logits, step)
        if step.used & Use.CONSTRAINTS:
            self._constraints.apply(logits, step.slots, step.indexes, self._columns)
        penalised = step.rows(Use.PENALTIES)
        if len(penalised):
            self._penalties.apply(logits, penalised, step.slots[penalised])
        return filled

    def _fill(self, logits: Tensor, step: "_Step") -> Fill | None:
        if self._masks is None:
            step.fail(
                torch.from_numpy((step.uses & Use.GRAMMAR) != 0), NO_GRAMMARS, unanswerable=True
            )
            return None
        filled = self._masks.fill(step.slots.tolist())
        if filled is not None:
            apply_masks(logits, torch.tensor(filled.places, dtype=torch.int64), filled.bits)
            for place, message in filled.faults:
                step.faults.setdefault(place, _fault(message, unanswerable=True))
        return filled

    def _choose(self, logits: Tensor, step: "_Step") -> Tensor:
        tokens, peaks = highest(logits)
        if not bool(torch.isfinite(peaks).all()):
            # A row of minus infinities that somebody changed had numbers before.
            left = torch.from_numpy((step.uses & Use.CHANGES) != 0) & (peaks == -torch.inf)
            step.fail(left, NOTHING_LEFT, unanswerable=True)
            spoilt = ~torch.isfinite(peaks)
            step.fail(spoilt, NO_NUMBERS)
            logits[spoilt] = 0.0
            peaks[spoilt] = 0.0
        random = step.rows(Use.RANDOM)
        if len(random):
            rows = torch.from_numpy(random)
            asked = self._columns.asked(step.slots[random], step.indexes[random])
            tokens[rows] = draw_tokens(_take(logits, random), peaks[rows], asked)
        return tokens

    def _accept(self, step: "_Step", tokens: Rows, filled: Fill | None) -> set[int]:
        """Tell the slots of their tokens. Returns the rows whose grammar is complete."""
        constrained = step.rows(Use.CONSTRAINTS)
        if len(constrained):
            self._constraints.accept(step.slots[constrained], tokens[constrained])
        penalised = step.rows(Use.PENALTIES)
        if len(penalised):
            self._penalties.accept(step.slots[penalised], tokens[penalised])
        if filled is None:
            return set()
        return {
            row
            for row in filled.places
            if row not in step.faults and self._ends_grammar(step, row, int(tokens[row]))
        }

    def _ends_grammar(self, step: "_Step", row: int, token: int) -> bool:
        assert self._masks is not None
        slot, count = int(step.slots[row]), int(step.indexes[row]) + 1
        try:
            ends = self._masks.accept(slot, token)
        except MaskError as error:
            step.faults[row] = _fault(str(error), unanswerable=False)
            return False
        wanted = int(self._columns.min_tokens[slot])
        if ends and count < wanted:
            message = f"the grammar is complete after {count} tokens, and min_tokens is {wanted}"
            step.faults[row] = _fault(message, unanswerable=True)
        return ends


class _Step:
    """The rows of one call, and what became of those that failed."""

    def __init__(self, columns: Columns, draws: Sequence[Draw]) -> None:
        self.slots: Slots = np.array([draw.slot for draw in draws])
        self.indexes = np.array([draw.index for draw in draws])
        self.uses = columns.uses[self.slots]
        self.used = int(np.bitwise_or.reduce(self.uses))
        self.faults: dict[int, Sampled] = {}

    def rows(self, use: Use) -> Rows:
        """Those that need this part of sampling, rising."""
        return np.flatnonzero(self.uses & use) if self.used & use else _NO_ROWS

    def fail(self, rows: Tensor, message: str, *, unanswerable: bool = False) -> None:
        """Those where `rows` (S,) is true, unless they have failed before."""
        for row in rows.nonzero()[:, 0].tolist():
            self.faults.setdefault(row, _fault(message, unanswerable=unanswerable))


_NO_ROWS: Rows = np.zeros(0, dtype=np.int64)


def _fault(message: str, *, unanswerable: bool) -> Sampled:
    return Sampled(token_id=-1, fault=message, unanswerable=unanswerable)


def _take(logits: Tensor, rows: Rows) -> Tensor:
    """The rows, which rise; no copy when they are all."""
    return logits if len(rows) == len(logits) else logits[torch.from_numpy(rows)]
