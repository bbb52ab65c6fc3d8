"""Matrix products with weights that never change, on a processor.

A weight is reordered once into the layout that oneDNN's inner loops read; with the ordinary
layout every call pays for that again (SmolLM2 at 8 rows, bf16: 21 ms a step against 33).
What follows a product (silu, times, plus) is done while its result is still in registers.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Linear(Protocol):
    """`x @ weight.T` for `x` (T, in) and a weight of (out, in); results are (T, out)."""

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""
        ...

    def silu(self, x: Tensor) -> Tensor:
        """`silu` of the product."""
        ...

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """The product, times `other`."""
        ...

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The product, plus `other`."""
        ...


def linear(*weights: Tensor) -> Linear:
    """One linear map for weights stacked along their outputs, packed where oneDNN can."""
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    return PackedLinear(weight) if can_pack(weight.dtype) else PlainLinear(weight)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN has this machine's instructions for `dtype`."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001 - no public name
    return dtype == torch.float32


def has_bfloat16() -> bool:
    """Whether this machine multiplies bfloat16 itself.

    oneDNN accepts it on any AVX-512 and emulates it there, at two thirds of float32's speed.
    """
    bf16 = torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001 - no public name
    return bf16 or torch.cpu._is_amx_tile_supported()  # noqa: SLF001 - no public name


class PackedLinear:
    """A weight in oneDNN's own layout."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)  # noqa: SLF001 - the op that torch.compile's freezing packs with; it has no public name
        self._product: Any = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 - as above

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""
        out: Tensor = self._product(x, self._weight, None, "none", [], "")
        return out

    def silu(self, x: Tensor) -> Tensor:
        """`silu` of the product."""
        out: Tensor = self._product(x, self._weight, None, "swish", [], "")
        return out

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """The product, times `other`."""
        out: Tensor = self._product.binary(x, other, self._weight, None, "mul")
        return out

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The product, plus `other`."""
        out: Tensor = self._product.binary(x, other, self._weight, None, "add")
        return out


class PlainLinear:
    """The same by torch alone, for machines without oneDNN's instructions."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""
        return functional.linear(x, self._weight)

    def silu(self, x: Tensor) -> Tensor:
        """`silu` of the product."""
        return functional.silu(self(x))

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """The product, times `other`."""
        return self(x).mul_(other)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The product, plus `other`."""
        return self(x).add_(other)
