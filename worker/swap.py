"""Whether a preempted sequence is computed again or moved to host memory and back.

Both end with the same KV; the cheaper one is chosen. What others hold, or what host memory has
already, is counted for neither: it will be hit.
"""

import msgspec


class Leaving(msgspec.Struct, frozen=True, kw_only=True):
    """What a sequence loses when it stops, in blocks and in tokens."""

    blocks_out: int  # to be moved to host memory
    blocks_in: int  # to be moved back, at its next admission
    tokens: int  # to be computed again instead


def swap_is_cheaper(leaving: Leaving, *, copy_block_ms: float, token_ms: float) -> bool:
    """By the measured time of a move and of a token's prefill. Equal is computed again."""
    moved_ms = (leaving.blocks_out + leaving.blocks_in) * copy_block_ms
    return moved_ms < leaving.tokens * token_ms
