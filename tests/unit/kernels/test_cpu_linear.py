"""Packed and plain products against torch."""

import pytest
import torch
from torch.nn import functional

from kernels.cpu_linear import (
    PackedGated,
    PackedLinear,
    PlainGated,
    PlainLinear,
    can_pack,
    gated,
    linear,
)

TYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
PACKING = [True] if can_pack(torch.float32) else []


@pytest.mark.parametrize("packed", [False, *PACKING])
@pytest.mark.parametrize("dtype", [d for d in TYPES if can_pack(d)])
@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize(("width", "out"), [(40, 24), (24, 40)])
def test_products_and_what_follows_them(packed, dtype, rows, width, out) -> None:
    torch.manual_seed(rows)
    weights = [(torch.randn(out, width) * 0.2).to(dtype) for _ in range(2)]
    x, other = torch.randn(rows, width).to(dtype), torch.randn(rows, out).to(dtype)
    kept = other.clone()
    one, two = (functional.linear(x.float(), weight.float()) for weight in weights)
    layer = PackedLinear(weights[0]) if packed else PlainLinear(weights[0])
    both = PackedGated(*weights) if packed else PlainGated(*weights)
    expected = [one, one + other.float(), functional.silu(one) * two]
    for found, wanted in zip([layer(x), layer.plus(x, other), both(x)], expected, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), wanted, atol=TYPES[dtype], rtol=TYPES[dtype])
    assert torch.equal(other, kept), "what is added stays as it was"


def test_weights_are_stacked_along_their_outputs() -> None:
    first, second, x = torch.randn(3, 8), torch.randn(5, 8), torch.randn(2, 8)
    torch.testing.assert_close(
        linear(first, second)(x), torch.cat((x @ first.T, x @ second.T), dim=1)
    )


def test_what_onednn_cannot_pack_runs_plainly() -> None:
    assert not can_pack(torch.float64)
    weight = torch.randn(3, 8, dtype=torch.float64)
    assert isinstance(linear(weight), PlainLinear)
    assert isinstance(gated(weight, weight), PlainGated)
