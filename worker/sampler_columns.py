"""What each slot's owner asked of its draws, as columns: a step gathers them by slot.

Filled when a slot is opened, and by nobody else. `uses` says which parts of sampling a slot
has any need of, so that a step does nothing for features that none of its rows asks for.
"""

import enum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.sampler_draws import Asked
from worker.step import Opening

Slots = NDArray[np.int64]  # a slot for each row of a step's logits

# Dividing by less would make an infinity of a difference of logits; this is greedy already.
TEMPERATURE_MIN = 1e-30


class Use(enum.IntFlag):
    """Parts of sampling."""

    RANDOM = enum.auto()  # temperature is over 0
    LOGPROBS = enum.auto()
    CONSTRAINTS = enum.auto()  # allowed ids, bad words, min_tokens, logit bias
    GRAMMAR = enum.auto()
    PENALTIES = enum.auto()

    CHANGES = CONSTRAINTS | GRAMMAR | PENALTIES  # of logits, before a token is chosen


class Columns:
    """One entry for each of `max_slots`."""

    def __init__(self, max_slots: int) -> None:
        self.uses = np.zeros(max_slots, dtype=np.int64)
        self.min_tokens = np.zeros(max_slots, dtype=np.int64)
        self.logprobs = np.zeros(max_slots, dtype=np.int64)  # how many beside the chosen one
        self._temperature = np.ones(max_slots, dtype=np.float32)
        self._top_p = np.ones(max_slots, dtype=np.float64)
        self._top_k = np.zeros(max_slots, dtype=np.int64)
        self._min_p = np.zeros(max_slots, dtype=np.float32)
        self._seed = np.zeros(max_slots, dtype=np.int64)
        self._choice = np.zeros(max_slots, dtype=np.int64)

    def open(self, slot: int, opening: Opening) -> None:
        """The slot is another answer's."""
        sampling = opening.sampling
        self.uses[slot] = _uses(opening)
        self.min_tokens[slot] = sampling.min_tokens
        self.logprobs[slot] = sampling.logprobs or 0
        self._temperature[slot] = max(sampling.temperature, TEMPERATURE_MIN)
        self._top_p[slot] = sampling.top_p
        self._top_k[slot] = sampling.top_k
        self._min_p[slot] = sampling.min_p
        self._seed[slot] = sampling.seed
        self._choice[slot] = opening.choice

    def asked(self, slots: Slots, indexes: NDArray[np.int64]) -> Asked:
        """Of rows that draw at random, at `indexes` of their answers."""
        return Asked(
            temperature=_tensor(self._temperature[slots]),
            top_p=_tensor(self._top_p[slots]),
            top_k=_tensor(self._top_k[slots]),
            min_p=_tensor(self._min_p[slots]),
            seed=_tensor(self._seed[slots]),
            choice=_tensor(self._choice[slots]),
            index=_tensor(indexes),
        )


def _uses(opening: Opening) -> int:
    sampling = opening.sampling
    constrained = bool(
        sampling.allowed_ids or sampling.bad_words or sampling.logit_bias or sampling.min_tokens
    )
    penalised = (
        sampling.repetition_penalty != 1
        or sampling.frequency_penalty != 0
        or sampling.presence_penalty != 0
    )
    return (
        (sampling.temperature > 0) * Use.RANDOM
        | (sampling.logprobs is not None) * Use.LOGPROBS
        | constrained * Use.CONSTRAINTS
        | (sampling.grammar is not None) * Use.GRAMMAR
        | penalised * Use.PENALTIES
    )


def _tensor(column: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(column)
