"""The invariant kernels: a row's bits never depend on what else is there. And right, too."""

import itertools
import random

import pytest
import torch
from torch.nn import functional

from kernels import cpu_invariant, cpu_pointwise, reference
from kernels.cpu_attention_plan import Span
from kernels.cpu_invariant import (
    InvariantAttention,
    InvariantGated,
    InvariantLinear,
    NotInvariantError,
    check_rows,
)
from kernels.cpu_linear import PlainLinear

TYPES = [torch.float32, torch.bfloat16]
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16
COUNTS = range(1, 71)


def _assert_rows_are_alone(function, rows: torch.Tensor) -> None:
    """`f(a[:1]) == f(a)[:1]`, for every count, every row and every place."""
    whole = function(rows)
    for count in COUNTS:
        assert torch.equal(function(rows[:count]), whole[:count]), count
        assert torch.equal(function(rows[-count:]), whole[-count:]), count
    for row in range(len(rows)):
        assert torch.equal(function(rows[row : row + 1]), whole[row : row + 1]), row


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("out", "width"), [(96, 48), (48, 160), (50, 33)])
def test_a_row_of_a_product_is_the_same_whatever_rows_are_beside_it(dtype, out, width) -> None:
    torch.manual_seed(out)
    weights = [torch.randn(out, width).to(dtype) * width**-0.5 for _ in range(2)]
    rows = torch.randn(COUNTS[-1], width).to(dtype)
    _assert_rows_are_alone(InvariantLinear(*weights), rows)
    _assert_rows_are_alone(InvariantGated(*weights), rows)


@pytest.mark.parametrize("dtype", TYPES)
def test_so_is_a_row_of_a_norm_and_a_head_that_is_turned(dtype) -> None:
    torch.manual_seed(1)
    rows, weight = torch.randn(COUNTS[-1], 48).to(dtype), torch.randn(48).to(dtype)
    _assert_rows_are_alone(lambda x: cpu_invariant.rms_norm(x, weight, 1e-5), rows)
    cos, sin = cpu_pointwise.rope_rows(1, HEAD_DIM, 1e4, ())

    def turned(heads: torch.Tensor) -> torch.Tensor:
        heads = heads.clone()
        tables = [table.expand(len(heads), 1, -1) for table in (cos + 0.3, sin - 0.2)]
        cpu_invariant.rope_in_place(heads, *tables)
        return heads

    _assert_rows_are_alone(turned, torch.randn(COUNTS[-1], 5, HEAD_DIM).to(dtype))


@pytest.mark.parametrize("dtype", TYPES)
def test_products_norms_and_turns_are_right(dtype) -> None:
    torch.manual_seed(2)
    limits = {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {}
    gate, up = (torch.randn(24, 40).to(dtype) * 0.2 for _ in range(2))
    x, other = torch.randn(21, 40).to(dtype), torch.randn(21, 24).to(dtype)
    one, two = x.float() @ gate.float().T, x.float() @ up.float().T
    close = torch.testing.assert_close
    close(InvariantLinear(gate).plus(x, other).float(), one + other.float(), **limits)
    close(InvariantGated(gate, up)(x).float(), functional.silu(one) * two, **limits)
    weight = torch.randn(40).to(dtype)
    norm = reference.rms_norm(x, weight, 1e-5)[0]
    close(cpu_invariant.rms_norm(x, weight, 1e-5), norm, **limits)
    heads = torch.randn(21, 3, HEAD_DIM).to(dtype)
    cos, sin = reference.rope_tables(21, HEAD_DIM, 1e4)
    wanted = reference.rope(heads, cos, sin)
    wide = cpu_pointwise.rope_rows(21, HEAD_DIM, 1e4, ())
    cpu_invariant.rope_in_place(heads, *(table[:, None] for table in wide))
    close(heads, wanted, **limits)


def test_a_product_that_rounds_by_place_is_found_out() -> None:
    plain = PlainLinear(torch.randn(8, 8))
    places = torch.linspace(1, 1 + 1e-6, cpu_invariant.ROWS)[:, None]
    like = torch.empty(cpu_invariant.ROWS, 8)
    check_rows(plain, like)
    with pytest.raises(NotInvariantError):
        check_rows(lambda x: plain(x) * places, like)


def _paged(length: int, block_tokens: int, seed: int) -> tuple[tuple[int, ...], int]:
    blocks = list(range(-(-length // block_tokens) + 4))
    random.Random(seed).shuffle(blocks)
    return tuple(blocks[: len(blocks) - 4]), len(blocks)


def _attended(
    heads: torch.Tensor, cuts: tuple[int, ...], block_tokens: int, beside: int, seed: int
) -> torch.Tensor:
    """One sequence's attention in the given chunks, beside others of `beside` tokens."""
    length, dtype = len(heads), heads.dtype
    attention = InvariantAttention(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_tokens=block_tokens,
        dtype=dtype,
    )
    blocks, used = _paged(length, block_tokens, seed)
    extra = -(-beside // block_tokens)
    cache = torch.randn(used + extra, 2, KV_HEADS, block_tokens, HEAD_DIM).to(dtype)
    found = torch.empty(length, HEADS, HEAD_DIM, dtype=dtype)
    for start, end in itertools.pairwise((0, *cuts, length)):
        own = Span(start, end - start, blocks[: -(-end // block_tokens)])
        other = [Span(0, beside, tuple(range(used, used + extra)))] if beside else []
        rows = torch.cat((torch.randn(beside, *heads.shape[1:]).to(dtype), heads[start:end]))
        plan = attention.plan([*other, own])
        attention.write(plan, cache, rows[:, HEADS:])
        out = torch.empty(len(rows), HEADS, HEAD_DIM, dtype=dtype)
        attention.attend(plan, rows[:, :HEADS], cache, out)
        found[start:end] = out[beside:]
    return found


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("length", [1, 15, 64, 65, 200])
def test_attention_is_the_same_in_any_chunks_blocks_and_company(dtype, length) -> None:
    torch.manual_seed(length)
    heads = torch.randn(length, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)
    alone = _attended(heads, (), 16, 0, 0)
    cuts = [tuple(range(1, length)), tuple(range(7, length, 7)), (length // 2,) * (length > 1)]
    for cut, block_tokens, beside in zip(cuts, (1, 24, 16), (3, 0, 100), strict=True):
        assert torch.equal(_attended(heads, cut, block_tokens, beside, length), alone)
    keys, values = heads[:, HEADS:].float().split(KV_HEADS, dim=1)
    cache = torch.stack((keys, values)).transpose(1, 2)[None]  # one block of the whole length
    wanted = reference.paged_attention(
        heads[:, :HEADS].float(),
        cache,
        tables=torch.tensor([[0]]),
        query_starts=torch.tensor([0, length]),
        context_lengths=torch.tensor([length]),
        scale=HEAD_DIM**-0.5,
    )
    limit = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(alone.float(), wanted, atol=limit, rtol=limit)
