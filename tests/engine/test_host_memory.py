"""Moves of KV blocks between device and host memory: by themselves, and under real sequences."""

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engine_requests import a_sequence
from tests.support.one_thread import one_thread
from tests.support.tiny_llama import TinyLlama, write_hf
from worker.admission import SchedulerConfig
from worker.host_memory import HostMemory
from worker.models.llama import Llama
from worker.runner import ModelRunner
from worker.scheduler import Scheduler
from worker.step import Row, StepPlan
from worker.weights import load_weights

TINY = TinyLlama(hidden=48, heads=6, kv_heads=2, head_dim=8, vocab=300, context=400, tied=True)
BLOCKS, HOST_BLOCKS = 6, 4
ROW = Row(sequence=1, token_ids=(1,), start=0, blocks=(0,), draw=None)


def moves(sources: int, destinations: int) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    pair = st.tuples(st.integers(0, sources - 1), st.integers(0, destinations - 1))
    return st.lists(pair, unique_by=lambda move: move[1], max_size=destinations).map(tuple)


@given(
    copies=moves(BLOCKS, BLOCKS),
    moves_out=moves(BLOCKS, HOST_BLOCKS),
    moves_in=moves(HOST_BLOCKS, BLOCKS),
)
def test_every_source_is_read_before_any_destination_is_written(copies, moves_out, moves_in):
    written = {destination for _, destination in copies}
    moves_in = tuple(move for move in moves_in if move[1] not in written)
    generator = torch.Generator().manual_seed(0)
    cache = torch.rand(3, BLOCKS, 2, 2, 4, 8, generator=generator)
    memory = HostMemory(HOST_BLOCKS)
    first = tuple((block, block) for block in range(HOST_BLOCKS))
    memory.move(cache, StepPlan(rows=(ROW,), moves_out=first))
    device = [cache[:, block].clone() for block in range(BLOCKS)]
    host = [device[block] for block in range(HOST_BLOCKS)]
    cache.mul_(2)
    device = [cache[:, block].clone() for block in range(BLOCKS)]

    plan = StepPlan(rows=(ROW,), copies=copies, moves_out=moves_out, moves_in=moves_in)
    memory.move(cache, plan)
    expected = list(device)
    for source, destination in copies:
        expected[destination] = device[source]
    for source, destination in moves_in:
        expected[destination] = host[source]
    for block in range(BLOCKS):
        assert torch.equal(cache[:, block], expected[block])
    expected_host = list(host)
    for source, destination in moves_out:
        expected_host[destination] = device[source]
    back = tuple((block, block) for block in range(HOST_BLOCKS))
    memory.move(cache, StepPlan(rows=(ROW,), moves_in=back))
    for block in range(HOST_BLOCKS):
        assert torch.equal(cache[:, block], expected_host[block])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    with one_thread():
        path: Path = write_hf(tmp_path_factory.mktemp("tiny"), TINY)
        return Llama(load_weights(path, torch.float32), block_tokens=4)


def answers(
    model: Llama, kv_blocks: int, host_blocks: int, *, preempted: bool
) -> tuple[list[list[int]], int]:
    """All tokens of ten sequences, and how often one was swapped out."""
    config = SchedulerConfig(
        kv_blocks=kv_blocks,
        host_blocks=host_blocks,
        context_tokens=400,
        block_tokens=4,
        max_batched_tokens=24,
        max_sequences=6,
        expected_share=0,
        copy_block_ms=1e-9,
    )
    scheduler = Scheduler(config)
    runner = ModelRunner(model, kv_blocks=kv_blocks, block_tokens=4, host_blocks=host_blocks)
    dice = random.Random(4)
    sequences = [
        a_sequence([7, 8, 9, 7, 8, 9, 7, number % 3, *range(number + 3)], max_tokens=14)
        for number in range(10)
    ]
    for sequence in sequences:
        scheduler.add([sequence])
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        for sequence, _ in scheduler.complete(plan, runner.execute(plan)):
            if sequence.num_tokens == sequence.final_tokens:
                scheduler.finish(sequence)
        if preempted and scheduler.running and dice.random() < 0.3:
            scheduler.preempt(dice.choice(scheduler.running))
        assert scheduler.problems() == []
    return [sequence.tokens for sequence in sequences], scheduler.num_swaps


def test_swapped_out_and_in_a_sequence_goes_on_as_if_nothing_had_happened(model):
    with one_thread():
        alone, _ = answers(model, 200, 0, preempted=False)
        swapped, num_swaps = answers(model, 14, 40, preempted=True)
    assert num_swaps > 5
    assert swapped == alone
