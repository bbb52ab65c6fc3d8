"""How long a step may take before it counts as stuck: far longer than any of its size has.

A long prefill on a slow machine is no fault, and no setting knows beforehand how long one
takes. Pure.
"""

import msgspec

# A step may take so many times the slowest of its size so far. Sizes are powers of two.
FACTOR = 10.0
_SIZES = 40


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of the engine in progress; each is an object of its own."""

    tokens: int = 0  # that its step computes; 0 while that is not decided


class Patience:
    """Learns from each step that ends. One thread observes, another may ask."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._slowest_s = [0.0] * _SIZES

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens ended."""
        size = _size(tokens)
        self._slowest_s[size] = max(self._slowest_s[size], seconds)

    def bound_s(self, tokens: int) -> float:
        """Seconds that a step of so many tokens may take, the setting at least.

        Where none of its size has been seen, smaller ones tell: twice the tokens, twice the time.
        """
        size = _size(tokens)
        expected_s = max(
            slowest_s * 2.0 ** (size - smaller)
            for smaller, slowest_s in enumerate(self._slowest_s[: size + 1])
        )
        return max(self._least_s, FACTOR * expected_s)


def _size(tokens: int) -> int:
    return min(tokens.bit_length(), _SIZES - 1)
