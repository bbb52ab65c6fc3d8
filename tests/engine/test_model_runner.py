"""The runner by itself, on plans made by hand: rows, chunks, copies, draws, and bad plans."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from core.protocol import Sampling
from kernels.cpu_linear import has_bfloat16
from tests.support.tiny_llama import TinyLlama, write_gguf
from tests.support.transformers_llama import logits_along, transformers_llama
from worker.runner import SLOTS, ModelRunner, compute_dtype, kv_blocks_for_memory, load_runner
from worker.step import Draw, Opening, Row, Sampled, StepPlan
from worker.weights import load_weights

TINY = TinyLlama(hidden=48, heads=6, kv_heads=2, head_dim=8, vocab=300, context=400, tied=True)

pytestmark = pytest.mark.usefixtures("one_torch_thread")
BLOCK = 4
GREEDY = Sampling(seed=1, max_tokens=100, temperature=0.0)


@pytest.fixture
def runner(checkpoint: Path) -> ModelRunner:
    return load_runner(checkpoint, block_tokens=BLOCK, kv_blocks=300, dtype="float32")


_slots = itertools.count()


def a_draw(slot: int, index: int, sampling: Sampling | None) -> Draw:
    opening = None
    if sampling is not None:
        opening = Opening(choice=0, sampling=sampling, prompt_ids=(), output_ids=())
    return Draw(slot=slot, index=index, opening=opening)


class Hand:
    """A sequence driven by hand over blocks of its own."""

    def __init__(
        self, prompt: Sequence[int], blocks: Iterator[int], sampling: Sampling = GREEDY
    ) -> None:
        self.tokens = list(prompt)
        self.output: list[Sampled] = []
        self._prompt_length = len(prompt)
        self._computed = 0
        self._blocks = blocks
        self._own: list[int] = []
        self._sampling = sampling
        self._slot = next(_slots) % SLOTS

    def row(self, most: int = 1000) -> Row:
        end = min(len(self.tokens), self._computed + most)
        while len(self._own) * BLOCK < end:
            self._own.append(next(self._blocks))
        row = Row(
            sequence=id(self),
            token_ids=tuple(self.tokens[self._computed : end]),
            start=self._computed,
            blocks=tuple(self._own),
            draw=self._draw() if end == len(self.tokens) else None,
        )
        self._computed = end
        return row

    def _draw(self) -> Draw:
        index = len(self.tokens) - self._prompt_length
        return a_draw(self._slot, index, self._sampling if index == 0 else None)

    def take(self, sampled: Sampled) -> None:
        self.output.append(sampled)
        self.tokens.append(sampled.token_id)

    @property
    def ids(self) -> list[int]:
        return [sampled.token_id for sampled in self.output]


def step(runner: ModelRunner, hands: Sequence[Hand], most: int = 1000) -> None:
    rows = [hand.row(most) for hand in hands]
    answers = iter(runner.execute(StepPlan(rows=tuple(rows))).sampled)
    for hand, row in zip(hands, rows, strict=True):
        if row.draw:
            hand.take(next(answers))
    assert next(answers, None) is None


def alone(
    runner: ModelRunner, prompt: Sequence[int], number: int, sampling: Sampling = GREEDY
) -> Hand:
    hand = Hand(prompt, iter(range(300)), sampling)
    while len(hand.output) < number:
        step(runner, [hand])
    return hand


PROMPTS = [[5], [7, 8, 9], list(range(3, 19)), list(range(40, 110)), [200] * 150]


def test_rows_of_every_kind_in_one_step_answer_in_the_plans_order(runner: ModelRunner) -> None:
    expected = [alone(runner, prompt, 8).ids for prompt in PROMPTS]
    blocks = iter(range(299, -1, -1))
    hands = [Hand(prompt, blocks) for prompt in PROMPTS]
    step(runner, hands[2:4])
    step(runner, [hands[4], hands[3], hands[0], hands[2], hands[1]])
    while any(len(hand.output) < 8 for hand in hands):
        step(runner, hands)
    assert [hand.ids[:8] for hand in hands] == expected


@pytest.mark.parametrize("most", [1, 3, 4, 33])
def test_a_chunked_prefill_is_the_same_and_draws_nothing_until_its_end(
    runner: ModelRunner, most: int
) -> None:
    expected = alone(runner, PROMPTS[3], 3).ids
    hand = Hand(PROMPTS[3], iter(range(100, 200)))
    for _ in range(-(-len(PROMPTS[3]) // most) - 1):
        step(runner, [hand], most)
    assert hand.ids == []
    while len(hand.output) < 3:
        step(runner, [hand], most)
    assert hand.ids == expected


def test_logprobs_and_likeliest_are_those_of_transformers(
    runner: ModelRunner, checkpoint: Path
) -> None:
    judge = transformers_llama(load_weights(checkpoint, torch.float32))
    wanting = msgspec.structs.replace(GREEDY, logprobs=3)
    for prompt in PROMPTS[1:]:
        hand = alone(runner, prompt, 4, wanting)
        expected = torch.log_softmax(logits_along(judge, prompt, hand.ids), dim=-1)
        for at, sampled in enumerate(hand.output):
            told = sampled.logprob
            assert told is not None
            assert told.logprob == pytest.approx(expected[at, told.id].item(), abs=1e-4)
            values, ids = expected[at].topk(3)
            assert [id_ for id_, _ in told.top] == ids.tolist()
            assert [one for _, one in told.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_draws_do_not_depend_on_neighbours_or_chunks(runner: ModelRunner) -> None:
    draws = [
        msgspec.structs.replace(GREEDY, seed=seed, temperature=0.8, top_p=0.95)
        for seed in range(len(PROMPTS))
    ]
    cases = list(zip(PROMPTS, draws, strict=True))
    expected = [alone(runner, prompt, 6, draw).ids for prompt, draw in cases]
    blocks = iter(range(300))
    hands = [Hand(prompt, blocks, draw) for prompt, draw in cases]
    while any(len(hand.output) < 6 for hand in hands):
        step(runner, hands, most=29)
    assert [hand.ids[:6] for hand in hands] == expected


def test_copies_read_all_sources_first_and_carry_every_layer(runner: ModelRunner) -> None:
    prompt = list(range(50, 57))
    expected = alone(runner, prompt, 3).ids
    first, second = Hand(prompt[:-1], iter([10, 11])), Hand(PROMPTS[2][:6], iter([20, 21]))
    step(runner, [first, second])
    # Block 20 is overwritten by a copy in the same step in which it is copied away.
    moved = Row(
        sequence=9, token_ids=(prompt[-1],), start=6, blocks=(20, 30), draw=a_draw(0, 0, GREEDY)
    )
    copies = ((10, 20), (11, 30), (20, 31))
    [sampled] = runner.execute(StepPlan(rows=(moved,), copies=copies)).sampled
    assert sampled.token_id == expected[0]
    kept = runner._cache[:, 31]
    hand = Hand(PROMPTS[2][:6], iter([40, 41]))
    step(runner, [hand])
    torch.testing.assert_close(kept, runner._cache[:, 40])


def test_a_plan_that_fails_leaves_the_runner_usable(runner: ModelRunner) -> None:
    expected = alone(runner, PROMPTS[2], 4).ids
    hand = Hand(PROMPTS[2], iter(range(50, 60)))
    step(runner, [hand])
    bad = Row(
        sequence=8, token_ids=(TINY.vocab,), start=0, blocks=(100,), draw=a_draw(0, 0, GREEDY)
    )
    with pytest.raises(IndexError):
        runner.execute(StepPlan(rows=(bad,)))
    for _ in range(3):
        step(runner, [hand])
    assert hand.ids == expected


def test_warming_up_stays_within_a_small_pool_and_context(checkpoint: Path) -> None:
    load_runner(checkpoint, block_tokens=1, kv_blocks=1, dtype="float32").warm_up(tokens=512)
    runner = load_runner(checkpoint, block_tokens=BLOCK, kv_blocks=5, dtype="float32")
    runner.warm_up(tokens=512)
    assert alone(runner, [5], 3).ids == alone(runner, [5], 3).ids


def test_both_formats_and_both_kinds_of_path_give_one_model(
    runner: ModelRunner, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", TINY)
    for path in (file, tmp_path):
        other = load_runner(path, block_tokens=BLOCK, kv_blocks=60, dtype="float32")
        assert alone(other, PROMPTS[3], 5).ids == alone(runner, PROMPTS[3], 5).ids


def test_bfloat16_stays_close_to_float32(checkpoint: Path, runner: ModelRunner) -> None:
    narrow = load_runner(checkpoint, block_tokens=BLOCK, kv_blocks=100, dtype="bfloat16")
    wanting = msgspec.structs.replace(GREEDY, logprobs=0)
    for prompt in PROMPTS:
        [wide], [low] = (alone(r, prompt, 1, wanting).output for r in (runner, narrow))
        assert wide.logprob is not None
        assert low.logprob is not None
        assert low.logprob.logprob == pytest.approx(wide.logprob.logprob, abs=0.15)


def test_blocks_for_memory_are_those_the_pool_takes(checkpoint: Path) -> None:
    by_memory = load_runner(
        checkpoint, block_tokens=BLOCK, kv_memory_bytes=1 << 20, dtype="bfloat16"
    )
    used = by_memory._cache.nbytes
    assert used <= 1 << 20 < used + used // by_memory.kv_blocks
    sizes = itertools.product(("float32", "bfloat16"), (1, 16))
    config = by_memory.config
    found = [
        kv_blocks_for_memory(config, dtype=dtype, block_tokens=block, memory_bytes=2**20)
        for dtype, block in sizes
    ]
    # 2 layers of 2 heads of 8, keys and values: 64 numbers a token.
    assert found == [4096, 256, 8192, 512]


def test_memory_for_less_than_a_block_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="1000 bytes do not hold one block of 4 tokens"):
        load_runner(checkpoint, block_tokens=BLOCK, kv_memory_bytes=1000, dtype="float32")


def test_names_of_types() -> None:
    assert compute_dtype("float32") == torch.float32
    assert compute_dtype("auto") == (torch.bfloat16 if has_bfloat16() else torch.float32)
    with pytest.raises(ValueError, match="'float8' is not one of auto, float32, bfloat16"):
        compute_dtype("float8")
