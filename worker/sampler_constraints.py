"""Allowed ids, bad words, min_tokens and logit bias, as lists of places in a step's logits.

A slot's lists are made when it is opened; those of a step are put together from them once for
as long as the same slots draw, so that a step of a decode only indexes. A place is a number
into the flattened logits: row * V + id.
"""

from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.protocol import Sampling
from worker.faults import BAD_WORD_TOKENS_MAX
from worker.sampler_columns import Columns, Slots
from worker.step import Opening

# Most tokens of an answer's end, kept to match bad words with.
_BEGUN_MAX = BAD_WORD_TOKENS_MAX - 1
# Neither is an id: what is before an answer's first token, and what matches whatever is there.
_BEFORE, _ANY = -2, -1
_NOTHING = np.zeros(0, dtype=np.int64)
_NO_WORDS = np.zeros((0, _BEGUN_MAX), dtype=np.int64)
_NO_BIAS = np.zeros(0, dtype=np.float32)

Ids = NDArray[np.int64]


class _Slot(msgspec.Struct, frozen=True):
    """What one slot's owner asked for."""

    allowed: Ids
    banned: Ids  # bad words of one token
    begun: Ids  # (W, _BEGUN_MAX): what precedes the last token of each longer one
    lasts: Ids  # (W,): that last token
    ends: Ids  # what ends an answer, where min_tokens is over 0
    biased: Ids
    bias: NDArray[np.float32]


class _Step(msgspec.Struct, frozen=True):
    """The same for the rows of a step. Places, and whose they are."""

    allowed_rows: Tensor
    allowed: Tensor
    banned: Tensor
    begun: Ids
    lasts: Ids
    last_slots: Ids
    ends: Ids
    end_rows: Ids
    biased: Tensor
    bias: Tensor


class Constraints:
    """Of all slots. `eos_ids` end an answer unless it ignores them."""

    def __init__(self, max_slots: int, eos_ids: Iterable[int]) -> None:
        self._eos_ids = tuple(eos_ids)
        self._slots: dict[int, _Slot] = {}
        # The last ids of each answer, the last of them at the end.
        self._tails = np.full((max_slots, _BEGUN_MAX), _BEFORE, dtype=np.int64)
        self._planned: tuple[int, ...] = ()
        self._step: _Step | None = None

    def forget(self, slot: int) -> None:
        """The slot is another answer's, which may have no constraints."""
        self._slots.pop(slot, None)
        self._step = None

    def open(self, slot: int, opening: Opening) -> None:
        """The slot is another answer's, which has constraints. It has been forgotten."""
        sampling = opening.sampling
        tail = opening.output_ids[-_BEGUN_MAX:]
        self._tails[slot] = _BEFORE
        self._tails[slot, _BEGUN_MAX - len(tail) :] = tail
        begun, lasts = _longer_words(sampling.bad_words)
        self._slots[slot] = _Slot(
            allowed=_ids(sampling.allowed_ids),
            banned=_ids(word[0] for word in sampling.bad_words if len(word) == 1),
            begun=begun,
            lasts=lasts,
            ends=_ids(self._ends(sampling)) if sampling.min_tokens else _NOTHING,
            biased=_ids(id_ for id_, _ in sampling.logit_bias),
            bias=np.array([value for _, value in sampling.logit_bias], dtype=np.float32),
        )

    def apply(self, logits: Tensor, slots: Slots, indexes: Ids, columns: Columns) -> None:
        """Forbid, then bias, in `logits` (S, V), whose rows draw for `slots` at `indexes`."""
        planned = tuple(slots.tolist())
        if self._step is None or planned != self._planned:
            self._step, self._planned = _plan(planned, self._slots, logits.shape[1]), planned
        step, flat = self._step, logits.view(-1)
        if len(step.allowed):
            kept = flat[step.allowed]
            logits[step.allowed_rows] = -torch.inf
            flat[step.allowed] = kept
        if len(step.banned):
            flat[step.banned] = -torch.inf
        if len(step.lasts):
            tails = self._tails[step.last_slots]
            complete = ((step.begun == tails) | (step.begun == _ANY)).all(1)
            flat[torch.from_numpy(step.lasts[complete])] = -torch.inf
        if len(step.ends):
            early = (indexes < columns.min_tokens[slots])[step.end_rows]
            flat[torch.from_numpy(step.ends[early])] = -torch.inf
        if len(step.biased):
            flat[step.biased] += step.bias

    def accept(self, slots: Slots, tokens: Ids) -> None:
        """Each of `slots` has drawn its token."""
        self._tails[slots, :-1] = self._tails[slots, 1:]
        self._tails[slots, -1] = tokens

    def _ends(self, sampling: Sampling) -> tuple[int, ...]:
        return sampling.stop_ids if sampling.ignore_eos else (*self._eos_ids, *sampling.stop_ids)


def _plan(slots: tuple[int, ...], of_slots: Mapping[int, _Slot], vocab: int) -> _Step:
    found = [(row, slot, of_slots[slot]) for row, slot in enumerate(slots) if slot in of_slots]

    def places(name: str) -> Ids:
        return np.concatenate(
            [_NOTHING, *(getattr(one, name) + row * vocab for row, _, one in found)]
        )

    last_slots = [np.full(len(one.lasts), slot) for _, slot, one in found]
    end_rows = [np.full(len(one.ends), row) for row, _, one in found]
    return _Step(
        allowed_rows=torch.tensor([row for row, _, one in found if len(one.allowed)]),
        allowed=torch.from_numpy(places("allowed")),
        banned=torch.from_numpy(places("banned")),
        begun=np.concatenate([_NO_WORDS, *(one.begun for _, _, one in found)]),
        lasts=places("lasts"),
        last_slots=np.concatenate([_NOTHING, *last_slots]),
        ends=places("ends"),
        end_rows=np.concatenate([_NOTHING, *end_rows]),
        biased=torch.from_numpy(places("biased")),
        bias=torch.from_numpy(np.concatenate([_NO_BIAS, *(one.bias for _, _, one in found)])),
    )


def _longer_words(words: tuple[tuple[int, ...], ...]) -> tuple[Ids, Ids]:
    longer = [word for word in words if len(word) > 1]
    begun = np.full((len(longer), _BEGUN_MAX), _ANY, dtype=np.int64)
    for row, word in zip(begun, longer, strict=True):
        row[_BEGUN_MAX - len(word) + 1 :] = word[:-1]
    return begun, _ids(word[-1] for word in longer)


def _ids(ids: Iterable[int]) -> Ids:
    return np.array(tuple(ids), dtype=np.int64)
