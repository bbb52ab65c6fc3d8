"""How large the pool is, and what is refused with which sum."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.memory import (
    LOADING_SHARE,
    Bound,
    Demand,
    DoesNotFitError,
    Wanted,
    check_weights,
    mask_demand,
    size_pool,
    sum_told,
)

MIB = 1024 * 1024
ROOMY = Bound(name="the machine", free=8000 * MIB)
TIGHT = Bound(name="cgroup limit 512 MiB, 112 MiB of it in use", free=400 * MIB)
STEP = Demand(purpose="for a largest step", size=100 * MIB)


def sized(bounds=(ROOMY,), demands=(STEP,), *, least=1, **wanted):
    return size_pool(
        bounds, demands, wanted=Wanted(**wanted), block_bytes=2 * MIB, least_blocks=least
    )


def test_a_share_is_of_what_the_tightest_bound_and_the_demands_leave():
    assert sized((ROOMY, TIGHT), share=0.5) == 75
    assert sized((ROOMY,), (), share=0.5) == 2000


def test_blocks_come_before_bytes_and_bytes_before_a_share():
    assert sized(blocks=7, size=64 * MIB, share=0.5) == 7
    assert sized(size=65 * MIB, share=0.5) == 32


@pytest.mark.parametrize(
    ("wanted", "setting"),
    [({"blocks": 151}, "HEADWORKS_KV_BLOCKS"), ({"size": 302 * MIB}, "HEADWORKS_KV_MEMORY_MB")],
)
def test_a_pool_over_what_is_left_is_refused_with_the_sum(wanted, setting):
    # vllm 10971, 15800: a KV space over the machine's memory got the process killed.
    with pytest.raises(DoesNotFitError) as refused:
        sized((ROOMY, TIGHT), **wanted, share=0.1)
    assert str(refused.value) == (
        "a KV pool of 151 blocks takes 302 MiB, and there is room for 300 MiB: 400 MiB free"
        " (cgroup limit 512 MiB, 112 MiB of it in use), less 100 MiB for a largest step."
        f" Lower {setting}, or give the worker more memory."
    )


def test_a_share_that_does_not_hold_one_step_is_refused():
    assert sized((TIGHT,), share=0.1, least=15) == 15
    with pytest.raises(DoesNotFitError, match=r"gives the KV pool 15 blocks .* needs 16"):
        sized((TIGHT,), share=0.1, least=16)


def test_few_blocks_that_were_asked_for_are_given_but_none_are_not():
    assert sized(blocks=1, least=32) == 1
    with pytest.raises(DoesNotFitError, match=r"HEADWORKS_KV_MEMORY_MB gives the KV pool 0 blocks"):
        sized(size=MIB)


def test_demands_over_everything_leave_nothing_and_not_less():
    with pytest.raises(DoesNotFitError, match=r"room for 0\.00 MiB"):
        sized((Bound(name="x", free=50 * MIB),), blocks=1)


def test_masks_of_every_sequence_are_counted():
    # vllm 14452, 15105, 27508: rows of the vocabulary for every sequence were not.
    assert mask_demand(sequences=1024, vocab_size=49_152).size == 1024 * 49_152 // 8 * 2
    assert mask_demand(sequences=1, vocab_size=33).size == 16


def test_weights_that_do_not_fit_are_refused_before_they_are_read():
    free = Bound(name="x", free=120 * MIB)
    check_weights((free,), 100 * MIB)
    with pytest.raises(DoesNotFitError, match=r"the weights take 101 MiB, .*\(x\), less 20 MiB"):
        check_weights((ROOMY, free), 101 * MIB)


@given(
    frees=st.lists(st.integers(0, 1 << 40), min_size=1, max_size=4),
    needs=st.lists(st.integers(0, 1 << 40), max_size=3),
    blocks=st.integers(0, 1000),
    size=st.integers(0, 1 << 40),
    share=st.floats(0.001, 1),
    block_bytes=st.integers(1, 1 << 30),
    least=st.integers(0, 100),
)
def test_whatever_is_given_fits_beside_the_demands(  # noqa: PLR0917 - each is drawn
    frees, needs, blocks, size, share, block_bytes, least
):
    bounds = [Bound(name=str(free), free=free) for free in frees]
    demands = [Demand(purpose="", size=need) for need in needs]
    wanted = Wanted(blocks=blocks, size=size, share=share)
    room = min(frees) - sum(needs)
    try:
        given_blocks = size_pool(
            bounds, demands, wanted=wanted, block_bytes=block_bytes, least_blocks=least
        )
    except DoesNotFitError:
        asked = blocks or (size or int(max(0, room) * share)) // block_bytes
        enough = 1 if blocks or size else least
        assert asked * block_bytes > room or asked < enough
    else:
        assert 0 <= given_blocks * block_bytes <= max(0, room)


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_weights_pass_exactly_where_there_is_room_for_them_and_their_reading(free, weights):
    fits = weights + round(weights * LOADING_SHARE) <= free
    try:
        check_weights((Bound(name="", free=free),), weights)
    except DoesNotFitError:
        assert not fits
    else:
        assert fits or not weights


def test_the_sum_is_told_without_a_pool_too():
    assert sum_told((ROOMY, TIGHT), (STEP,)) == (
        "400 MiB free (cgroup limit 512 MiB, 112 MiB of it in use), less 100 MiB for a largest step"
    )
