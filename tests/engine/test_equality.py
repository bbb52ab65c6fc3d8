"""The whole engine's greedy answers are transformers' own, whatever runs beside them.

Fifty prompts of 1 to 2,000 tokens through a tiny Llama; alone, mixed, chunked, paged in other
sizes, preempted, forked, repeated, and among requests that are aborted. float32 throughout.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from core.protocol import Choice, Failed, Finished, Generate
from tests.support.engine_listener import WAIT_S, Listener
from tests.support.engine_requests import VERSION, a_request
from tests.support.small_model import small_model_directory
from tests.support.tiny_llama import TinyLlama, write_gguf, write_hf
from tests.support.transformers_llama import judge, transformers_llama
from text.rules import TextRules
from worker.engine import Engine, EngineConfig
from worker.runner import load_runner
from worker.weights import load_weights

# Sums of a few thousand float32 products in another order differ by about 1e-5 of a logit.
EPSILON = 1e-3
DIVERGENCES_MAX = 2
MAX_TOKENS = 12
TINY = TinyLlama(layers=3, hidden=96, heads=6, kv_heads=2, vocab=400, context=2048)

pytestmark = pytest.mark.usefixtures("one_torch_thread")

Prompt = tuple[int, ...]


def _prompts(number: int, longest: int, vocab: int) -> list[Prompt]:
    """Lengths from 1 to `longest`, evenly in their logarithm, and around the edges of blocks."""
    dice = random.Random(11)
    edges = [1, 2, 15, 16, 17, 31, 32, 33, 64, longest]
    lengths = edges + [round(longest ** dice.random()) for _ in range(number - len(edges))]
    return [tuple(dice.randrange(3, vocab) for _ in range(length)) for length in lengths]


PROMPTS = _prompts(50, 2000, TINY.vocab)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", TINY).parent


@pytest.fixture(scope="module")
def transformers_tiny(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    """Read by transformers itself, from its own kind of files; the engine reads GGUF."""
    directory = write_hf(tmp_path_factory.mktemp("hf"), TINY)
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@contextmanager
def an_engine(
    directory: Path, *, kv_blocks: int = 2400, block_tokens: int = 16, chunk: int = 512
) -> Iterator[Engine]:
    """A started engine over the real runner; idle at the end it must hold nothing."""
    runner = load_runner(directory, block_tokens=block_tokens, kv_blocks=kv_blocks, dtype="float32")
    config = EngineConfig(
        kv_blocks=kv_blocks,
        context_tokens=runner.config.context_tokens,
        block_tokens=block_tokens,
        max_batched_tokens=chunk,
        max_sequences=16,
        waiting_tokens_max=1_000_000,
        version=VERSION,
        boot_id="boot_1",
    )
    engine = Engine(runner=runner, text=TextRules.load(directory), config=config)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop(WAIT_S)
    load = engine.load()
    assert (load.kv_blocks_in_use, load.failed_steps, load.integrity) == (0, 0, True)


def _greedy(prompt: Prompt, **changes) -> Generate:
    return a_request(prompt, max_tokens=MAX_TOKENS, ignore_eos=True, **changes)


def _submit(engine: Engine, request: Generate) -> Listener:
    listener = Listener()
    assert engine.submit(request, listener.emit) is None
    return listener


def _answer(listener: Listener, choice: int = 0) -> list[int]:
    listener.wait_until(lambda one: one.events and isinstance(one.events[-1], Finished | Failed))
    last = listener.events[-1]
    assert isinstance(last, Finished), last
    assert last.cause == "complete"
    return listener.ids(choice)


def _alone(engine: Engine, prompts: Sequence[Prompt]) -> list[list[int]]:
    return [_answer(_submit(engine, _greedy(prompt))) for prompt in prompts]


def _together(engine: Engine, prompts: Sequence[Prompt]) -> list[list[int]]:
    """All at once; the engine runs sixteen beside each other and takes the next as one ends."""
    listeners = [_submit(engine, _greedy(prompt)) for prompt in prompts]
    return [_answer(listener) for listener in listeners]


def _among_aborted(engine: Engine, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Between them others that are aborted: at once, in their prefill, and mid-stream."""
    dice = random.Random(3)
    kept: list[Listener] = []
    for prompt in prompts:
        doomed = _greedy(tuple(reversed(prompt)) + prompt[:40], temperature=1.0)
        listener = _submit(engine, doomed)
        kept.append(_submit(engine, _greedy(prompt)))
        if (wanted := dice.choice([None, 0, 3])) is not None:
            listener.wait_until(lambda one, n=wanted: one.started and len(one.ids()) >= n)
        engine.abort(doomed.request_id, doomed.attempt)
    return [_answer(listener) for listener in kept]


def _twice(engine: Engine, prompts: Sequence[Prompt]) -> list[list[int]]:
    """The second time from the prefix cache, in part or but for the last token."""
    _together(engine, prompts)
    before = engine.load().computed_tokens
    answers = _together(engine, prompts)
    fed = engine.load().computed_tokens - before
    assert fed < sum(map(len, prompts)) / 2
    return answers


@pytest.mark.parametrize(
    ("run", "sizes"),
    [
        (_alone, {}),
        (_alone, {"chunk": 50, "block_tokens": 4, "kv_blocks": 4 * 2400}),
        (_together, {}),
        (_together, {"chunk": 50}),
        (_together, {"chunk": 2048, "block_tokens": 32, "kv_blocks": 1200}),
        (_together, {"chunk": 100, "block_tokens": 1, "kv_blocks": 16 * 2400}),
        (_among_aborted, {"chunk": 64}),
        (_twice, {}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "-".join(map(str, value.values())),
)
def test_fifty_prompts(
    run: Callable[[Engine, Sequence[Prompt]], list[list[int]]],
    sizes: dict[str, int],
    checkpoint: Path,
    transformers_tiny: LlamaForCausalLM,
) -> None:
    with an_engine(checkpoint, **sizes) as engine:
        answers = run(engine, PROMPTS)
    assert all(len(answer) == MAX_TOKENS for answer in answers)
    verdict = judge(transformers_tiny, zip(PROMPTS, answers, strict=True))
    verdict.assert_right(epsilon=EPSILON, divergences_max=DIVERGENCES_MAX)


def test_after_preemptions(checkpoint: Path, transformers_tiny: LlamaForCausalLM) -> None:
    prompts = [prompt for prompt in PROMPTS if len(prompt) < 40][:16]
    with an_engine(checkpoint, kv_blocks=14, chunk=64) as engine:
        listeners = [
            _submit(engine, a_request(prompt, max_tokens=120, ignore_eos=True))
            for prompt in prompts
        ]
        answers = [_answer(listener) for listener in listeners]
        assert engine.load().preemptions > 0
    verdict = judge(transformers_tiny, zip(prompts, answers, strict=True))
    verdict.assert_right(epsilon=EPSILON, divergences_max=DIVERGENCES_MAX)


def test_choices_of_one_request_that_share_its_prompt(
    checkpoint: Path, transformers_tiny: LlamaForCausalLM
) -> None:
    prompts = [prompt for prompt in PROMPTS if len(prompt) < 100]
    choices = tuple(Choice(index=index) for index in range(3))
    with an_engine(checkpoint) as engine:
        listeners = [_submit(engine, _greedy(prompt, choices=choices)) for prompt in prompts]
        answers = [
            (prompt, _answer(listener, choice.index))
            for prompt, listener in zip(prompts, listeners, strict=True)
            for choice in choices
        ]
    verdict = judge(transformers_tiny, answers)
    verdict.assert_right(epsilon=EPSILON, divergences_max=DIVERGENCES_MAX)


def test_draws_of_a_resumed_answer_go_on_as_they_would_have(checkpoint: Path) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 99}
    for prompt in PROMPTS[3:9]:
        with an_engine(checkpoint) as engine:
            whole = _answer(_submit(engine, _greedy(prompt, **sampling)))
        with an_engine(checkpoint) as engine:
            accepted = (Choice(index=0, output_ids=tuple(whole[:5])),)
            rest = _answer(_submit(engine, _greedy(prompt, choices=accepted, **sampling)))
        assert rest == whole[5:]


@pytest.mark.model
def test_ten_prompts_through_the_small_real_model(tmp_path: Path) -> None:
    directory = small_model_directory(tmp_path)
    prompts = _prompts(10, 500, 49_152)
    with an_engine(directory, kv_blocks=300, chunk=256) as engine:
        alone = _alone(engine, prompts[:5])
        mixed = _together(engine, prompts)
    pairs = zip([*prompts[:5], *prompts], [*alone, *mixed], strict=True)
    # Judging takes longest, and equal answers need it once.
    answers = {(prompt, tuple(answer)) for prompt, answer in pairs}
    model = transformers_llama(load_weights(directory, torch.float32))
    verdict = judge(model, answers)
    verdict.assert_right(epsilon=EPSILON, divergences_max=DIVERGENCES_MAX)
