"""Paged attention on a processor against the specification, over mixes of spans."""

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import reference
from kernels.cpu_attention import TILE_TOKENS, PagedAttention
from kernels.cpu_attention_plan import (
    GATHER_TOKENS,
    PAD_TOKENS,
    SHARED_TOKENS_MIN,
    Span,
    packing_order,
)

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8
SCALE = HEAD_DIM**-0.5
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def _spans(
    sizes: list[tuple[int, int]], block_tokens: int, sharing: int = 0
) -> tuple[list[Span], int]:
    """Spans of (start, count) over shuffled blocks, and the size of the pool they need.

    With `sharing` every second one begins with the same so many blocks, where it is longer.
    """
    needed = [-(-(start + count) // block_tokens) for start, count in sizes]
    free = list(range(sum(needed) + 3))
    random.Random(7).shuffle(free)
    ids = iter(free)
    spans = [
        Span(start, count, tuple(itertools.islice(ids, blocks)))
        for (start, count), blocks in zip(sizes, needed, strict=True)
    ]
    longest = max(spans, key=lambda span: span.start)
    for place in range(0, len(spans), 2):
        span = spans[place]
        own = min(sharing, span.start // block_tokens)
        spans[place] = Span(span.start, span.count, longest.blocks[:own] + span.blocks[own:])
    return [spans[place] for place in packing_order(spans)], len(free)


def _expected(
    queries: torch.Tensor, keys_values: torch.Tensor, cache: torch.Tensor, spans: list[Span]
) -> torch.Tensor:
    block_tokens = cache.shape[3]
    slots = [
        span.blocks[position // block_tokens] * block_tokens + position % block_tokens
        for span in spans
        for position in range(span.start, span.start + span.count)
    ]
    keys, values = keys_values.split(KV_HEADS, dim=1)
    reference.write_kv(cache, keys, values, torch.tensor(slots))
    longest = max(len(span.blocks) for span in spans)
    return reference.paged_attention(
        queries,
        cache,
        tables=torch.tensor([(*s.blocks, *[0] * (longest - len(s.blocks))) for s in spans]),
        query_starts=torch.tensor([0, *itertools.accumulate(span.count for span in spans)]),
        context_lengths=torch.tensor([span.start + span.count for span in spans]),
        scale=SCALE,
    )


def _check(
    sizes: list[tuple[int, int]],
    block_tokens: int,
    dtype: torch.dtype = torch.float32,
    sharing: int = 0,
) -> None:
    torch.manual_seed(len(sizes))
    spans, num_blocks = _spans(sizes, block_tokens, sharing)
    tokens = sum(span.count for span in spans)
    heads = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)
    cache = torch.randn(num_blocks, 2, KV_HEADS, block_tokens, HEAD_DIM).to(dtype)
    own_cache = cache.clone()
    expected = _expected(heads[:, :HEADS], heads[:, HEADS:], cache, spans)
    attention = PagedAttention(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_tokens=block_tokens,
        dtype=dtype,
    )
    plan = attention.plan(spans)
    attention.write(plan, own_cache, heads[:, HEADS:])
    assert torch.equal(own_cache, cache), "only the spans' own slots are written"
    found = torch.full((tokens, HEADS, HEAD_DIM), torch.nan, dtype=dtype)
    attention.attend(plan, heads[:, :HEADS], own_cache, found)
    limits = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(found, expected, **limits)


@given(
    sizes=st.lists(
        st.tuples(st.integers(0, 90), st.one_of(st.just(1), st.integers(1, 80))),
        min_size=1,
        max_size=6,
    ),
    block_tokens=st.sampled_from([1, 4, 16]),
)
def test_any_mix_of_prefills_chunks_and_decodes(
    sizes: list[tuple[int, int]], block_tokens: int
) -> None:
    _check(sizes, block_tokens)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_mixed_step_in_both_types(dtype: torch.dtype) -> None:
    _check([(0, 1), (30, 1), (0, 40), (17, 23), (500, 1), (64, 64)], 16, dtype)


@pytest.mark.parametrize("count", [TILE_TOKENS - 1, TILE_TOKENS, TILE_TOKENS + 1, 3 * TILE_TOKENS])
def test_prefills_around_the_edge_of_a_tile(count: int) -> None:
    _check([(0, count), (5, count)], 16)


def test_decodes_of_very_different_lengths_are_split_into_pieces() -> None:
    long = 4 * PAD_TOKENS
    sizes = [(long, 1), (long // 2 + 17, 1), (long // 4, 1), (3, 1), (0, 1)]
    spans, _ = _spans(sizes, 16)
    attention = PagedAttention(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_tokens=16,
        dtype=torch.float32,
    )
    assert [piece.sequences for piece in attention.plan(spans).pieces] == [2, 1, 2]
    _check(sizes, 16)


def test_a_piece_gathers_no_more_than_its_bound_unless_one_sequence_does() -> None:
    sizes = [(GATHER_TOKENS // 2 - 1, 1)] * 3 + [(GATHER_TOKENS + 1, 1)]
    spans, _ = _spans(sizes, 16)
    attention = PagedAttention(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_tokens=16,
        dtype=torch.float32,
    )
    assert [piece.sequences for piece in attention.plan(spans).pieces] == [1, 2, 1]


@given(
    sizes=st.lists(
        st.tuples(st.integers(0, 300), st.sampled_from([1, 1, 1, 5])), min_size=2, max_size=8
    ),
    block_tokens=st.sampled_from([1, 4, 16, 32]),
    sharing=st.integers(1, 200),
)
def test_decodes_that_share_their_first_blocks(
    sizes: list[tuple[int, int]], block_tokens: int, sharing: int
) -> None:
    _check(sizes, block_tokens, sharing=sharing)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_what_is_shared_is_gathered_once(dtype: torch.dtype) -> None:
    shared = SHARED_TOKENS_MIN // 16
    sizes = [(SHARED_TOKENS_MIN + 5 * n, 1) for n in range(6)]
    _check(sizes, 16, dtype, sharing=shared)
    spans, _ = _spans(sizes, 16, shared)
    attention = PagedAttention(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_tokens=16,
        dtype=dtype,
    )
    assert [(p.sequences, p.shared) for p in attention.plan(spans).pieces] == [(4, 64), (2, 0)]


def test_decodes_with_one_first_block_are_packed_beside_each_other() -> None:
    spans = [Span(3, 1, (2,)), Span(20, 1, (7, 8)), Span(40, 1, (3, 4, 5)), Span(50, 1, (7, 9, 6))]
    assert packing_order(spans) == [3, 1, 2, 0]


def test_decodes_are_packed_first_and_longest_first() -> None:
    spans = [Span(0, 5, (1,)), Span(3, 1, (2,)), Span(40, 1, (3, 4, 5)), Span(0, 2, (6,))]
    assert packing_order(spans) == [2, 1, 0, 3]
