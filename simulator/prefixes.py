"""A coarse hash chain for short prompts: `core.prefix` begins at 64 tokens, ours end before.

For routing only, as there: it decides where a request goes, never what it may read.
"""

import hashlib
from array import array
from collections.abc import Sequence

CHUNK_TOKENS = 8


def coarse_hashes(ids: Sequence[int], salt: bytes) -> tuple[str, ...]:
    """One hash for each whole chunk, each covering all before it."""
    return tuple(
        hashlib.blake2b(array("I", ids[:end]).tobytes(), key=salt, digest_size=8).hexdigest()
        for end in range(CHUNK_TOKENS, len(ids) + 1, CHUNK_TOKENS)
    )
