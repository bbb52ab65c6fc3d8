"""One sequence run in every way an engine may come to run it, beside its solo cold run.

The real scheduler, runner and sampler; no threads, no text. A case says what is asked; a way
says what happens meanwhile. The solo run is the reference: it began with an empty cache, alone,
in one chunk.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import torch

from core.protocol import Sampling
from kernels.cpu import FAST, INVARIANT
from kernels.philox import uniform
from kernels.reference import filtered_probabilities, sampling_order
from tests.support.engine_requests import a_sequence
from worker.admission import SchedulerConfig
from worker.models.llama import Llama
from worker.runner import ModelRunner
from worker.scheduler import Scheduler
from worker.sequence import Sequence as Running
from worker.step import Runner
from worker.weights import load_weights

Way = Literal["batch", "chunk", "block", "prefix", "preemption", "swap", "resume"]
WAYS: tuple[Way, ...] = ("batch", "chunk", "block", "prefix", "preemption", "swap", "resume")
POSITIONS = 2048  # of a pool
CROWDED = 224  # of one that is too small for all that run
HOST_POSITIONS = 1024
BLOCK, CHUNK = 16, 512
ALWAYS_SWAP = 1e-9  # what a move is said to cost
STEPS_MAX = 2000
PREEMPTED_SHARE = 0.5  # of the steps after which somebody is preempted, where anybody is


class Case(msgspec.Struct, frozen=True):
    """What is asked, and the dice of everything else that happens."""

    seed: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: dict[str, float | int]

    def sequence(self, outputs: Sequence[int] = ()) -> Running:
        return a_sequence(self.prompt, outputs=outputs, max_tokens=self.max_tokens, **self.sampling)


def a_case(seed: int, *, vocab: int, longest: int, max_tokens: int) -> Case:
    """Greedy or seeded; lengths mostly long ones, and often at the edge of a block."""
    dice = random.Random(seed)
    length = max(1, round(longest ** dice.random() ** 0.5))
    if dice.random() < 0.3:
        length = max(1, length // BLOCK * BLOCK + dice.choice([-1, 0, 1]))
    drawn = {"temperature": dice.choice([0.6, 1.0]), "top_p": dice.choice([0.9, 1.0])}
    sampling = dice.choice([{}, drawn | {"seed": dice.randrange(1 << 62)}])
    prompt = tuple(dice.randrange(3, vocab) for _ in range(length))
    return Case(seed, prompt, max_tokens, sampling)


class _How(msgspec.Struct, frozen=True):
    """What differs from a solo run, but for the neighbours."""

    positions: int = POSITIONS
    host_positions: int = 0
    block: int = BLOCK
    chunk: int = CHUNK
    before: Running | None = None  # runs to its end first
    preempts: bool = False  # it or another, again and again


class World:
    """A model's runners for several sizes of block. `plant` may put a fault into each."""

    def __init__(
        self,
        directory: Path,
        *,
        exact: bool,
        plant: Callable[[ModelRunner], Runner] = lambda runner: runner,
    ) -> None:
        self._directory = directory
        self._kernels = INVARIANT if exact else FAST
        self._plant = plant
        self._runners: dict[int, Runner] = {}
        self.preemptions = self.swaps = self.moved_in = self.hits = 0

    def solo(self, case: Case) -> list[int]:
        """The reference."""
        return self._run(case.sequence(), [], random.Random(case.seed), _How())

    def varied(self, case: Case, way: Way, solo: Sequence[int]) -> list[int]:
        """All output tokens of the case when it is run in such a way."""
        dice = random.Random(case.seed + 1)
        # In a crowd they take the blocks that it had to leave.
        length = 100 if way in {"preemption", "swap"} else 60
        others = [self._other(dice, case, length) for _ in range(dice.randrange(3, 8))]
        asked, how = case.sequence(), _How()
        match way:
            case "batch":
                pass
            case "chunk":
                how = _How(chunk=dice.randrange(8, 70))
            case "block":
                how = _How(block=dice.choice([1, 4, 32]))
            case "prefix":
                told = dice.choice([len(case.prompt), dice.randrange(len(case.prompt) + 1)])
                how = _How(before=a_sequence([*case.prompt[:told], 7, 8, 9], max_tokens=3))
            case "preemption":
                how = _How(positions=CROWDED, preempts=True)
            case "swap":
                how = _How(positions=CROWDED, preempts=True, host_positions=HOST_POSITIONS)
            case "resume":
                asked = case.sequence(solo[: dice.randrange(1, len(solo))])
        return self._run(asked, others, dice, how)

    def together(self, cases: Sequence[Case]) -> list[list[int]]:
        """Several at once, all there from the first step on."""
        sequences = [case.sequence() for case in cases]
        scheduler = _scheduler(_How())
        for sequence in sequences:
            scheduler.add([sequence])
        self._drive(scheduler, self._runner(BLOCK), [], random.Random(0))
        return [sequence.tokens[sequence.num_prompt :] for sequence in sequences]

    def _other(self, dice: random.Random, case: Case, length: int) -> Running:
        """A neighbour, half of the time with the same beginning."""
        same = case.prompt[: dice.choice([0, len(case.prompt)])][:length]
        prompt = [*same, *(dice.randrange(3, 250) for _ in range(dice.randrange(1, length)))]
        warm = {"temperature": dice.choice([0.0, 1.0]), "seed": dice.randrange(1000)}
        return a_sequence(prompt, max_tokens=dice.randrange(1, 12), **warm)

    def _run(
        self, sequence: Running, others: Sequence[Running], dice: random.Random, how: _How
    ) -> list[int]:
        scheduler, runner = _scheduler(how), self._runner(how.block)
        if how.before is not None:
            self._drive(scheduler, runner, [how.before], dice)
        # It comes first or among the others, and the others come while it runs.
        arrivals = [*others]
        arrivals.insert(dice.randrange(len(arrivals) + 1), sequence)
        self._drive(scheduler, runner, arrivals, dice, preempts=how.preempts)
        self.preemptions += scheduler.num_preemptions
        self.swaps += scheduler.num_swaps
        self.hits += bool(sequence.cached_tokens)
        return sequence.tokens[sequence.num_prompt :]

    def _drive(
        self,
        scheduler: Scheduler,
        runner: Runner,
        arrivals: Sequence[Running],
        dice: random.Random,
        *,
        preempts: bool = False,
    ) -> None:
        coming = list(arrivals)
        for _ in range(STEPS_MAX):
            while coming and (dice.random() < 0.5 or not scheduler.has_work):
                scheduler.add([coming.pop(0)])
            plan = scheduler.schedule()
            if plan is None:
                return
            self.moved_in += len(plan.moves_in)
            for one, _ in scheduler.complete(plan, runner.execute(plan)):
                if one.num_tokens == one.final_tokens:
                    scheduler.finish(one)
            if preempts and scheduler.running and dice.random() < PREEMPTED_SHARE:
                scheduler.preempt(dice.choice(scheduler.running))
        raise AssertionError("a run did not end")

    def _runner(self, block: int) -> Runner:
        if block not in self._runners:
            weights = load_weights(self._directory, torch.float32)
            model = Llama(weights, block_tokens=block, kernels=self._kernels)
            self._runners[block] = self._plant(
                ModelRunner(
                    model,
                    kv_blocks=POSITIONS // block,
                    block_tokens=block,
                    host_blocks=HOST_POSITIONS // block,
                )
            )
        return self._runners[block]


def _scheduler(how: _How) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            kv_blocks=how.positions // how.block,
            host_blocks=how.host_positions // how.block,
            copy_block_ms=ALWAYS_SWAP,
            context_tokens=how.positions,
            block_tokens=how.block,
            max_batched_tokens=how.chunk,
            max_sequences=8,
        )
    )


def margin(logits: torch.Tensor, case: Case, index: int) -> float:
    """How far the draw at `index` is from another token, by the solo run's `logits` (V,).

    Greedy: the gap between the two likeliest. Seeded: how far the draw's number is from the
    edge of its token's share, or the likeliest gap at that edge's order, whichever is less.
    """
    sampling = Sampling(max_tokens=1, **({"seed": 7, "temperature": 0.0} | case.sampling))
    if sampling.temperature == 0:
        likeliest, second = logits.topk(2).values.tolist()
        return likeliest - second
    row = logits[None]
    order = sampling_order(row)
    columns = [torch.tensor([value]) for value in (sampling.temperature, 0, sampling.top_p)]
    shares = filtered_probabilities(row, *columns).gather(1, order)[0]
    edges = shares.cumsum(0)
    words = [torch.tensor([value]) for value in (sampling.seed, 0, index)]
    chance = uniform(*words)[0]
    ordered = logits[order[0]]
    place = int((edges <= chance).sum())
    nearby = ordered[max(0, place - 1) : place + 2].diff().abs()
    return min((edges - chance).abs().min().item(), nearby.min().item())
