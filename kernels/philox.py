"""Philox4x32-10: random numbers as a pure function of a key and a counter.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
There is no state to keep, save or share: the n-th number of a stream is computed when it is
wanted, by whoever wants it, and is the same on every machine.
"""

import torch
from torch import Tensor

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words from four counter words and two key words.

    All are int64 tensors of one shape, each value a 32-bit word: products of two words wrap
    past 63 bits, but the words cut from them are right all the same.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((right >> 32) & _MASK) ^ c1 ^ k0,
            right & _MASK,
            ((left >> 32) & _MASK) ^ c3 ^ k1,
            left & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: Tensor, choice: Tensor, index: Tensor) -> Tensor:
    """One float64 in [0, 1) for each (seed, choice, index), all int64 of one shape, >= 0.

    The seed is the key; the index takes two counter words, the choice the other two. 53 bits.
    """
    counter = (index & _MASK, index >> 32, choice & _MASK, choice >> 32)
    first, second, _, _ = philox(counter, (seed & _MASK, seed >> 32))
    bits = (first << 21) | (second >> 11)
    return bits.double() * torch.finfo(torch.float64).eps / 2
