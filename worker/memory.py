"""How large the KV pool may be: what is free, less what a worst step takes, in plain numbers.

Measuring is `machine`'s part. A refusal carries the whole sum, so that whoever reads it knows
which of its numbers to change. Pure.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec

_Bytes = Annotated[int, msgspec.Meta(ge=0)]

# Of the loaded weights, what stands beside them while they are read: the file's pages count as
# used until they are dropped, and each tensor is converted and packed before its source goes.
LOADING_SHARE = 0.2
# The share of a step's sampled rows that has a grammar is not known: all of them. One bit for
# each token of the vocabulary, in the matcher's words and in the sampler's.
MASK_COPIES = 2


class DoesNotFitError(Exception):
    """The message holds the arithmetic, and names what to change."""


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """One limit on this process's memory, and what it leaves."""

    name: str
    free: _Bytes


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that something else than the KV pool will take."""

    purpose: str
    size: _Bytes


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """How large the operator wants the pool: the first of these that is not 0."""

    blocks: int = 0
    size: int = 0  # bytes
    share: float = 0.0  # of what is left

    @property
    def setting(self) -> str:
        """What decides."""
        if self.blocks:
            return "HEADWORKS_KV_BLOCKS"
        return "HEADWORKS_KV_MEMORY_MB" if self.size else "HEADWORKS_KV_MEMORY_SHARE"


def check_weights(bounds: Sequence[Bound], weights_bytes: int) -> None:
    """Before anything is read. Raises DoesNotFitError."""
    loading = Demand(purpose="to read them", size=round(weights_bytes * LOADING_SHARE))
    left, told = _left(bounds, (loading,))
    if weights_bytes > left:
        raise DoesNotFitError(
            f"the weights take {megabytes(weights_bytes)}, and there is room for"
            f" {megabytes(left)}: {told}. Give the worker more memory, or a smaller model."
        )


def mask_demand(*, sequences: int, vocab_size: int) -> Demand:
    """For `sequences` that each obey a grammar."""
    words = -(-vocab_size // 32) * 4
    return Demand(purpose="grammar masks", size=sequences * words * MASK_COPIES)


def size_pool(
    bounds: Sequence[Bound],
    demands: Sequence[Demand],
    *,
    wanted: Wanted,
    block_bytes: int,
    least_blocks: int,
) -> int:
    """Blocks for the pool. Raises DoesNotFitError.

    What is wanted in blocks or bytes is granted or refused, never cut down. A share has to
    hold `least_blocks`: those of one step.
    """
    left, told = _left(bounds, demands)
    blocks = wanted.blocks or (wanted.size or int(left * wanted.share)) // block_bytes
    if blocks * block_bytes > left:
        raise DoesNotFitError(
            f"a KV pool of {blocks} blocks takes {megabytes(blocks * block_bytes)}, and there is"
            f" room for {megabytes(left)}: {told}."
            f" Lower {wanted.setting}, or give the worker more memory."
        )
    least = 1 if wanted.blocks or wanted.size else least_blocks
    if blocks < least:
        raise DoesNotFitError(
            f"{wanted.setting} gives the KV pool {blocks} blocks of {megabytes(block_bytes)}, and"
            f" it needs {least}; there is room for {megabytes(left)}: {told}."
            f" Raise {wanted.setting}, or give the worker more memory."
        )
    return blocks


def sum_told(bounds: Sequence[Bound], demands: Sequence[Demand] = ()) -> str:
    """The tightest bound less the demands, in words."""
    return _left(bounds, demands)[1]


def megabytes(size: int) -> str:
    """For a person: with a fraction where that is most of it."""
    value = size / (1024 * 1024)
    return f"{value:.2f} MiB" if value < 10 else f"{value:.0f} MiB"  # noqa: PLR2004 - two digits tell


def _left(bounds: Sequence[Bound], demands: Sequence[Demand]) -> tuple[int, str]:
    """What the tightest bound leaves after the demands, and the sum in words."""
    tightest = min(bounds, key=lambda bound: bound.free)
    left = max(0, tightest.free - sum(demand.size for demand in demands))
    less = (f"less {megabytes(demand.size)} {demand.purpose}" for demand in demands if demand.size)
    return left, ", ".join((f"{megabytes(tightest.free)} free ({tightest.name})", *less))
