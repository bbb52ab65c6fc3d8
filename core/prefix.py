"""A coarse hash chain over a prompt, by which requests find the replica that has seen it.

For routing only: the engine keeps its own fine chain, and a match here promises nothing.
Chunks sit at the same places for every prompt of one model and grow with depth, so that at
most `PREFIX_HASHES_MAX` of them cover the context and short prompts still have a few. Under
another salt nothing matches.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

from core.tickets import PREFIX_HASHES_MAX

CHUNK_TOKENS = 64  # the first chunks
HASH_BYTES = 8
SALT_BYTES_MAX = 64  # of a BLAKE2b key


def prefix_hashes(ids: Sequence[int], *, salt: bytes, context_tokens: int) -> tuple[str, ...]:
    """One hash of 16 hex digits for each whole chunk, each covering all before it."""
    assert 0 < len(salt) <= SALT_BYTES_MAX
    words = array("I", ids)
    words_bytes = memoryview(words).cast("B")
    hashes: list[str] = []
    start, digest = 0, b""
    for end in accumulate(chunk_sizes(context_tokens)):
        if end > len(words):
            break
        chunk = words_bytes[start * words.itemsize : end * words.itemsize]
        digest = hashlib.blake2b(digest + bytes(chunk), key=salt, digest_size=HASH_BYTES).digest()
        hashes.append(digest.hex())
        start = end
    return tuple(hashes)


@lru_cache(maxsize=256)  # one entry for each context length served
def chunk_sizes(context_tokens: int) -> tuple[int, ...]:
    """Sizes in tokens: doubling every k chunks, for the largest k that covers the context."""
    every = next(k for k in range(PREFIX_HASHES_MAX, 0, -1) if sum(_sizes(k)) >= context_tokens)
    return tuple(_sizes(every))


def _sizes(every: int) -> Iterator[int]:
    return (CHUNK_TOKENS << (i // every) for i in range(PREFIX_HASHES_MAX))
