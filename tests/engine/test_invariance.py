"""A sequence's tokens are those of its solo cold run, whatever the engine does meanwhile.

In batch-invariant mode exactly; otherwise up to near-ties, which are counted. Seven ways to
be run, greedy and seeded; INVARIANCE_CASES of them in all (`make soak`: 2,000).
"""

import os
from pathlib import Path

import msgspec
import pytest
import torch

from tests.support.invariance import WAYS, Case, Way, World, a_case, margin
from tests.support.small_model import small_model_directory
from tests.support.tiny_llama import TinyLlama
from tests.support.transformers_llama import logits_along, transformers_llama
from worker.runner import ModelRunner
from worker.step import Row, Runner, StepPlan, StepResult
from worker.weights import load_weights

CASES = int(os.environ.get("INVARIANCE_CASES", "100"))
# Sums of a few thousand float32 products in another order differ by about 1e-5 of a logit.
EPSILON = 1e-3
# Of a way's cases. Logits nearer than a rounding are rarer than one in a thousand tokens.
DIVERGENT_SHARE_MAX = 0.05
TINY = TinyLlama(layers=2, hidden=48, heads=6, kv_heads=2, head_dim=8, vocab=300, context=2048)

pytestmark = pytest.mark.usefixtures("one_torch_thread")
MODES = {"exact": True, "fast": False}


class Judge:
    """Compares answers up to the first difference, by another engine's logits of it."""

    def __init__(self, directory: Path) -> None:
        self._model = transformers_llama(load_weights(directory, torch.float32))
        self.divergences: list[float] = []

    def hear(self, case: Case, solo: list[int], varied: list[int]) -> None:
        if solo == varied:
            return
        assert len(solo) == len(varied)
        first = next(
            at for at, pair in enumerate(zip(solo, varied, strict=True)) if len({*pair}) > 1
        )
        logits = logits_along(self._model, case.prompt, solo[: first + 1])[-1]
        gap = margin(logits, case, first)
        assert gap < EPSILON, (case, solo, varied, gap)
        self.divergences.append(gap)


def _cases(way: Way) -> list[Case]:
    seeds = range(WAYS.index(way), CASES, len(WAYS))
    return [a_case(seed, vocab=TINY.vocab, longest=180, max_tokens=8) for seed in seeds]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_a_case_run_in_any_way_is_its_solo_run(mode: str, way: Way, checkpoint: Path) -> None:
    world = World(checkpoint, exact=MODES[mode])
    judge = None if MODES[mode] else Judge(checkpoint)
    cases = _cases(way)
    for case in cases:
        solo = world.solo(case)
        varied = world.varied(case, way, solo)
        if judge is None:
            assert varied == solo, case
        else:
            judge.hear(case, solo, varied)
    assert judge is None or len(judge.divergences) <= DIVERGENT_SHARE_MAX * len(cases)
    # The way was really taken.
    assert way != "preemption" or world.preemptions > world.swaps == 0
    assert way != "swap" or (world.swaps and world.moved_in)
    assert way != "prefix" or world.hits > 0


# llama.cpp #7052: eight slots with one prompt gave five to eight texts at temperature 0.
@pytest.mark.parametrize("mode", MODES)
def test_one_prompt_in_eight_slots_gives_one_text(mode: str, checkpoint: Path) -> None:
    world = World(checkpoint, exact=MODES[mode])
    case = msgspec.structs.replace(
        a_case(1, vocab=TINY.vocab, longest=90, max_tokens=40), sampling={}
    )
    texts = {tuple(world.solo(case)), *map(tuple, world.together([case] * 8))}
    assert len(texts) == 1


@pytest.mark.model
@pytest.mark.parametrize("way", ["batch", "chunk", "prefix"])
def test_the_small_real_model_is_exact_too(way: Way, tmp_path: Path) -> None:
    world = World(small_model_directory(tmp_path), exact=True)
    case = a_case(WAYS.index(way), vocab=40_000, longest=50, max_tokens=4)
    solo = world.solo(case)
    assert world.varied(case, way, solo) == solo


class _OneBlockOff(ModelRunner):
    """Reads a decode's second block where its first is."""

    def execute(self, plan: StepPlan) -> StepResult:
        def off(row: Row) -> Row:
            blocks = (*row.blocks[1:2], *row.blocks[1:]) if len(row.blocks) > 1 else row.blocks
            return msgspec.structs.replace(row, blocks=blocks) if row.start else row

        return super().execute(msgspec.structs.replace(plan, rows=tuple(map(off, plan.rows))))


class _Stale(ModelRunner):
    """Loses what a decode writes: whatever was there before stays."""

    def execute(self, plan: StepPlan) -> StepResult:
        rows = [row for row in plan.rows if row.start]
        if not rows:
            return super().execute(plan)
        row = rows[0]
        index, offset = divmod(row.start, self.block_tokens)
        slot = (slice(None), row.blocks[index], slice(None), slice(None), offset)
        before = self._cache[slot].clone()
        result = super().execute(plan)
        self._cache[slot] = before
        return result


def _planted(kind: type[ModelRunner]):
    def plant(runner: ModelRunner) -> Runner:
        runner.__class__ = kind
        return runner

    return plant


@pytest.mark.parametrize(("fault", "way"), [(_OneBlockOff, "chunk"), (_Stale, "batch")])
def test_a_planted_fault_is_noticed(fault: type[ModelRunner], way: Way, checkpoint: Path) -> None:
    right, wrong = (
        World(checkpoint, exact=False),
        World(checkpoint, exact=False, plant=_planted(fault)),
    )
    judge = Judge(checkpoint)
    noticed = 0
    for seed in range(10):
        case = a_case(seed, vocab=TINY.vocab, longest=180, max_tokens=8)
        solo = right.solo(case)
        try:
            judge.hear(case, solo, wrong.varied(case, way, solo))
        except AssertionError:
            noticed += 1
    assert noticed > 0
