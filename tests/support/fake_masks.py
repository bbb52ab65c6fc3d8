"""Grammars for the sampler's tests: a list of ids, one after another, then an end."""

from collections.abc import Sequence

import torch

from worker.sampler_masks import Fill, MaskError, words_of
from worker.step import Opening


class FakeMasks:
    """Implements `worker.sampler_masks.Masks`.

    A grammar's text is `3 5|6 9`: ids, and alternatives where there are several; the ends may
    follow it. A text that is no such thing is a fault.
    """

    def __init__(self, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._end_ids = list(end_ids)
        self._steps: dict[int, list[list[int]] | str] = {}
        self._at: dict[int, int] = {}

    def open(self, slot: int, opening: Opening) -> None:
        self._steps.pop(slot, None)
        grammar = opening.sampling.grammar
        if grammar is None:
            return
        try:
            steps = [list(map(int, step.split("|"))) for step in grammar.text.split()]
        except ValueError as error:
            self._steps[slot] = f"no grammar: {error}"
            return
        self._steps[slot] = steps
        self._at[slot] = len(opening.output_ids)

    def fill(self, slots: Sequence[int]) -> Fill | None:
        asked = {
            place: self._steps[slot] for place, slot in enumerate(slots) if slot in self._steps
        }
        faults = tuple((place, steps) for place, steps in asked.items() if isinstance(steps, str))
        places = tuple(place for place, steps in asked.items() if not isinstance(steps, str))
        if not asked:
            return None
        allowed = torch.zeros(len(places), words_of(self._vocab_size) * 32, dtype=torch.int64)
        for row, place in enumerate(places):
            allowed[row, self._allowed(slots[place])] = 1
        words = (allowed.unflatten(1, (-1, 32)) << torch.arange(32)).sum(-1)
        return Fill(places=places, bits=words.to(torch.int32), faults=faults)

    def accept(self, slot: int, token_id: int) -> bool:
        if token_id not in self._allowed(slot):
            raise MaskError(f"{token_id} is not allowed here")
        self._at[slot] += 1
        return self._at[slot] >= len(self._steps[slot])

    def _allowed(self, slot: int) -> list[int]:
        steps, at = self._steps[slot], self._at[slot]
        assert not isinstance(steps, str)
        return steps[at] if at < len(steps) else self._end_ids
