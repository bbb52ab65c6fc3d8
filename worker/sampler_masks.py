"""What the sampler needs of structured output: which tokens each slot's grammar allows next.

The sampler asks, applies and tells; what a grammar is, is its implementer's business, and so is
compiling one, which takes longer than a step and is done before the sequence is scheduled.
Invariant: no slot's trouble is another's. It is told as that slot's, in words.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from worker.step import Opening

BITS = 32  # tokens in one word of a mask
ROWS_AT_ONCE = 16  # unpacked, a mask takes three times its row of logits


class MaskError(Exception):
    """A slot's grammar does not take its token. The message is for the request's owner."""


class Fill(msgspec.Struct, frozen=True, kw_only=True):
    """Masks for those of some slots that have a grammar; for the others nothing is said."""

    places: tuple[int, ...]  # in the list of slots that was asked about, rising
    # (len(places), words_of(V)) int32: bit `i % 32` of word `i // 32` is 1 where token `i` may
    # follow. Owned by the implementer, who may write to it again at the next `fill`.
    bits: Tensor
    faults: tuple[tuple[int, str], ...] = ()  # (place, why it cannot be masked); not in `places`


class Masks(Protocol):
    """Grammars of the slots. Called from the engine's thread alone."""

    def open(self, slot: int, opening: Opening) -> None:
        """The slot is this answer's from now on, and whatever it held before is over.

        Called for every opening, with a grammar or without. `opening.output_ids` have been
        accepted already, by whoever drew them; after a preemption they are this slot's own.
        A grammar that cannot be opened is a fault at the next `fill`. Never raises.
        """
        ...

    def fill(self, slots: Sequence[int]) -> Fill | None:
        """Masks for the next draw of `slots`, in their order; None when none has a grammar.

        Does not advance anything: a step that fails may be followed by the same question. A
        grammar at its end allows the tokens that end an answer, and no others.
        """
        ...

    def accept(self, slot: int, token_id: int) -> bool:
        """A token was drawn, an end included; whether the grammar is complete with it.

        Called only for slots that the last `fill` masked. Complete means that nothing but an
        end could follow, so that the answer need not wait for one. Raises MaskError.
        """
        ...


def words_of(vocab_size: int) -> int:
    """Words of a mask of so many tokens."""
    return -(-vocab_size // BITS)


def apply_masks(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set what `bits` (R, words) forbid to minus infinity in `rows` (R,) of `logits` (S, V).

    Writes `logits` in place.
    """
    bit = torch.arange(BITS, dtype=torch.int32, device=bits.device)
    for at in range(0, len(rows), ROWS_AT_ONCE):
        some, words = rows[at : at + ROWS_AT_ONCE], bits[at : at + ROWS_AT_ONCE]
        allowed = (words[:, :, None] >> bit).bitwise_and_(1).flatten(1)[:, : logits.shape[1]]
        logits[some] = logits[some].masked_fill_(allowed == 0, -torch.inf)
