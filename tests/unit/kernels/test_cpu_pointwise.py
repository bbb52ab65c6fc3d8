"""The processor's element-wise kernels against the specification."""

import pytest
import torch

from kernels import reference
from kernels.cpu_pointwise import rms_norm, rope_in_place, rope_rows

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rope_turns_a_part_of_a_wider_tensor_in_place(dtype: torch.dtype) -> None:
    factors = (1.0, 1.0, 2.0, 8.0)
    positions = torch.tensor([0, 3, 99])
    all_heads = torch.randn(3, 5, 8).to(dtype)
    before = all_heads.clone()
    cos, sin = reference.rope_tables(100, 8, 10_000.0, factors)
    expected = reference.rope(all_heads[:, :4], cos[positions], sin[positions])
    cos, sin = rope_rows(100, 8, 10_000.0, factors)
    rope_in_place(all_heads[:, :4], cos[positions][:, None], sin[positions][:, None])
    limits = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(all_heads[:, :4], expected, **limits)
    assert torch.equal(all_heads[:, 4], before[:, 4])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rms_norm(dtype: torch.dtype) -> None:
    hidden, weight = torch.randn(7, 64).to(dtype), torch.randn(64).to(dtype)
    expected, _ = reference.rms_norm(hidden, weight, 1e-5)
    limits = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(rms_norm(hidden, weight, 1e-5), expected, **limits)
