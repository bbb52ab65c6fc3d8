"""Packed and plain products against torch."""

import pytest
import torch
from torch.nn import functional

from kernels.cpu_linear import PackedLinear, PlainLinear, can_pack, linear

KINDS = [PlainLinear, *([PackedLinear] if can_pack(torch.float32) else [])]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [d for d in TOLERANCE if can_pack(d)])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_products_and_what_follows_them(kind, dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(rows)
    weight = (torch.randn(24, 40) * 0.2).to(dtype)
    x, other = torch.randn(rows, 40).to(dtype), torch.randn(rows, 24).to(dtype)
    kept = other.clone()
    product = functional.linear(x.float(), weight.float())
    wide = other.float()
    expected = [product, functional.silu(product), product * wide, product + wide]
    layer = kind(weight)
    found = [layer(x), layer.silu(x), layer.times(x, other), layer.plus(x, other)]
    limits = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    for one, wanted in zip(found, expected, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.float(), wanted, **limits)
    assert torch.equal(other, kept), "what is added or multiplied stays as it was"


def test_weights_are_stacked_along_their_outputs() -> None:
    first, second, x = torch.randn(3, 8), torch.randn(5, 8), torch.randn(2, 8)
    torch.testing.assert_close(
        linear(first, second)(x), torch.cat((x @ first.T, x @ second.T), dim=1)
    )


def test_what_onednn_cannot_pack_runs_plainly() -> None:
    assert not can_pack(torch.float64)
    assert isinstance(linear(torch.randn(3, 8, dtype=torch.float64)), PlainLinear)
