"""Matrix products with weights that never change, on a processor.

A weight is laid out once as the library wants it that is fastest for its type:

    bfloat16   oneDNN's own blocks; with the ordinary layout every call pays for a reordering
               (SmolLM2 at 8 rows on AMX: 21 ms a step against 33), and what follows a product
               is done while its result is still in registers
    float32    MKL's matrices, contiguous along their longer side, which is 1.1 to 2 times as
               fast as oneDNN's blocks at 1 to 8 rows and no slower above

`cpu_invariant` has a third kind, for when a row's result must not depend on other rows.
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

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The product, plus `other`."""
        ...


class Gated(Protocol):
    """`silu(x @ gate.T) * (x @ up.T)` for `x` (T, in); results are (T, out)."""

    def __call__(self, x: Tensor) -> Tensor:
        """The gated product."""
        ...


def linear(*weights: Tensor) -> Linear:
    """One linear map for weights stacked along their outputs."""
    weight = _stacked(*weights)
    return PackedLinear(weight) if _is_packed(weight.dtype) else PlainLinear(weight)


def gated(gate: Tensor, up: Tensor) -> Gated:
    """The two products of a SwiGLU, and what becomes of them."""
    kind = PackedGated if _is_packed(gate.dtype) else PlainGated
    return kind(gate, up)


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


class PackedGated:
    """Two of oneDNN's, the second of which takes the first's result in passing."""

    def __init__(self, gate: Tensor, up: Tensor) -> None:
        self._gate, self._up = PackedLinear(gate), PackedLinear(up)

    def __call__(self, x: Tensor) -> Tensor:
        """The gated product."""
        return self._up.times(x, self._gate.silu(x))


class PlainLinear:
    """A weight as torch's own matrix product takes it: (in, out), along its longer side."""

    def __init__(self, weight: Tensor) -> None:
        wide = weight.shape[0] >= weight.shape[1]
        self._weight = weight.t().contiguous() if wide else weight.contiguous().t()

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""
        return torch.mm(x, self._weight)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The product, plus `other`."""
        return torch.addmm(other, x, self._weight)


class PlainGated:
    """Both weights side by side: one product is long enough for two threads where two are not."""

    def __init__(self, gate: Tensor, up: Tensor) -> None:
        self._both = PlainLinear(_stacked(gate, up))

    def __call__(self, x: Tensor) -> Tensor:
        """The gated product."""
        gate, up = self._both(x).chunk(2, dim=-1)
        return functional.silu(gate, inplace=True).mul_(up)


def _is_packed(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and can_pack(dtype)


def _stacked(*weights: Tensor) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(weights)
