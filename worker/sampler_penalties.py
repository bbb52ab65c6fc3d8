"""Repetition, frequency and presence: what an answer has said already becomes less likely.

Only tokens that occurred are touched, so a slot keeps which those are and how often the output
had each, not a row of the vocabulary. Invariant: `ids[slot, :length[slot]]` are distinct.
"""

from collections import Counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.sampler_columns import Slots
from worker.step import Opening

_WIDTH_MIN = 256


class Penalties:
    """Of all slots; only those that were opened with a penalty take part in a step."""

    def __init__(self, max_slots: int) -> None:
        self._ids = np.full((max_slots, _WIDTH_MIN), -1, dtype=np.int64)
        self._counts = np.zeros((max_slots, _WIDTH_MIN), dtype=np.float32)  # in the output
        self._length = np.zeros(max_slots, dtype=np.int64)
        self._repetition = np.ones(max_slots, dtype=np.float32)
        self._frequency = np.zeros(max_slots, dtype=np.float32)
        self._presence = np.zeros(max_slots, dtype=np.float32)

    def open(self, slot: int, opening: Opening) -> None:
        """The slot is another answer's, which has penalties."""
        sampling = opening.sampling
        counts = Counter(opening.output_ids)
        if sampling.repetition_penalty != 1:
            counts.update(dict.fromkeys(opening.prompt_ids, 0))
        self._widen(len(counts))
        self._ids[slot] = -1
        self._ids[slot, : len(counts)] = list(counts)
        self._counts[slot, : len(counts)] = list(counts.values())
        self._length[slot] = len(counts)
        self._repetition[slot] = sampling.repetition_penalty
        self._frequency[slot] = sampling.frequency_penalty
        self._presence[slot] = sampling.presence_penalty

    def apply(self, logits: Tensor, rows: NDArray[np.int64], slots: Slots) -> None:
        """Penalise in the `rows` of `logits` (S, V), which draw for `slots`."""
        width = int(self._length[slots].max(initial=1))
        ids = self._ids[slots, :width]
        which, column = np.nonzero(ids >= 0)
        owner = slots[which]
        flat = logits.view(-1)
        places = torch.from_numpy(rows[which] * logits.shape[1] + ids[which, column])
        counts = torch.from_numpy(self._counts[owner, column])
        values = flat[places]
        repetition = torch.from_numpy(self._repetition[owner])
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= torch.from_numpy(self._frequency[owner]) * counts
        values -= torch.from_numpy(self._presence[owner]) * (counts > 0)
        flat[places] = values

    def accept(self, slots: Slots, tokens: NDArray[np.int64]) -> None:
        """Each of `slots` has drawn its token."""
        width = int(self._length[slots].max(initial=1))
        found = self._ids[slots, :width] == tokens[:, None]
        known = found.any(1)
        self._counts[slots[known], found[known].argmax(1)] += 1
        fresh, ids = slots[~known], tokens[~known]
        if len(fresh):
            self._widen(width + 1)
            at = self._length[fresh]
            self._ids[fresh, at] = ids
            self._counts[fresh, at] = 1
            self._length[fresh] += 1

    def _widen(self, width: int) -> None:
        missing = width - self._ids.shape[1]
        if missing > 0:
            more = max(missing, self._ids.shape[1])
            self._ids = np.pad(self._ids, ((0, 0), (0, more)), constant_values=-1)
            self._counts = np.pad(self._counts, ((0, 0), (0, more)))
