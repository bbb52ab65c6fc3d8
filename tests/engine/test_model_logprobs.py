"""Logprobs, of answers and of prompts, beside transformers': raw, and within a tolerance.

Tolerance: 1e-4 of a natural logarithm in float32, the difference that another order of summing
makes. Penalised and constrained draws are judged by transformers' own processors.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from core.protocol import Choice, Generate, Prompted, TokenLogprob
from kernels import reference
from tests.support.engine_listener import WAIT_S, Listener
from tests.support.engine_requests import VERSION, a_request
from tests.support.tiny_llama import TinyLlama
from tests.support.transformers_llama import logits_along, transformers_llama
from text.rules import TextRules
from worker.engine import Engine, EngineConfig
from worker.runner import ModelRunner, load_runner
from worker.sampler import Sampler
from worker.weights import load_weights

TINY = TinyLlama(hidden=48, heads=6, kv_heads=2, head_dim=8, vocab=300, context=400, tied=True)

pytestmark = pytest.mark.usefixtures("one_torch_thread")
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def judge(checkpoint: Path) -> LlamaForCausalLM:
    return transformers_llama(load_weights(checkpoint, torch.float32))


def an_engine(checkpoint: Path, runner: ModelRunner | None = None, **changes) -> Engine:
    text = TextRules.load(checkpoint)
    defaults = {"kv_blocks": 200, "context_tokens": 400, "block_tokens": 4}
    defaults |= {"max_batched_tokens": 32, "max_sequences": 8, "waiting_tokens_max": 100_000}
    config = EngineConfig(version=VERSION, boot_id="boot", **(defaults | changes))
    runner = runner or load_runner(
        checkpoint,
        block_tokens=config.block_tokens,
        kv_blocks=config.kv_blocks,
        dtype="float32",
        sampler=Sampler(config.max_sequences, vocab_size=text.vocab_size, eos_ids=text.eos_ids),
    )
    return Engine(runner=runner, text=text, config=config)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    engine = an_engine(checkpoint)
    engine.start()
    yield engine
    engine.stop(WAIT_S)
    assert engine.load().integrity


def answered(engine: Engine, *requests: Generate) -> list[Listener]:
    listeners = [Listener() for _ in requests]
    for request, listener in zip(requests, listeners, strict=True):
        assert engine.submit(request, listener.emit) is None
    for listener in listeners:
        assert listener.end().cause == "complete"
    return listeners


def told_of_prompt(listener: Listener) -> list[TokenLogprob]:
    frames = [event for event in listener.events if isinstance(event, Prompted)]
    told: list[TokenLogprob] = []
    for frame in frames:
        assert frame.start == len(told) + 1
        told += frame.logprobs
    return told


def told_of_answer(listener: Listener) -> list[TokenLogprob]:
    return [one for tokens in listener.tokens() for one in tokens.logprobs]


def assert_told(told: Sequence[TokenLogprob], expected: torch.Tensor, count: int) -> None:
    """`expected` (tokens, V) are the judge's logprobs."""
    assert len(told) == len(expected)
    for one, row in zip(told, expected, strict=True):
        assert one.logprob == pytest.approx(row[one.id].item(), abs=TOLERANCE)
        values = row.topk(count).values.tolist()
        assert [logprob for _, logprob in one.top] == pytest.approx(values, abs=TOLERANCE)
        for id_, logprob in one.top:
            assert logprob == pytest.approx(row[id_].item(), abs=TOLERANCE)


PROMPTS = [[7], [7, 8], list(range(40, 73)), [3, 9] * 80, list(range(3, 300))]


def test_prompts_have_transformers_logprobs_in_chunks_and_side_by_side(
    engine: Engine, judge: LlamaForCausalLM
) -> None:
    requests = [a_request(p, prompt_logprobs=3, logprobs=3, max_tokens=4) for p in PROMPTS]
    for prompt, listener in zip(PROMPTS, answered(engine, *requests), strict=True):
        told = told_of_prompt(listener)
        assert [one.id for one in told] == prompt[1:]
        if told:
            rows = torch.log_softmax(logits_along(judge, prompt[:1], prompt[1:]), dim=-1)
            assert_told(told, rows, 3)
        rows = torch.log_softmax(logits_along(judge, prompt, listener.ids()), dim=-1)
        assert_told(told_of_answer(listener), rows, 3)


# vllm #3251, #8268: prompt logprobs together with the prefix cache crashed, or were too few.
def test_a_prompt_of_33_tokens_twice_with_prompt_logprobs_tells_the_same_twice(
    engine: Engine,
) -> None:
    prompt = list(range(100, 133))
    first, second = (
        answered(engine, a_request(prompt, prompt_logprobs=1, max_tokens=1))[0] for _ in "ab"
    )
    assert [one.id for one in told_of_prompt(second)] == prompt[1:]
    for one, other in zip(told_of_prompt(first), told_of_prompt(second), strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
    assert second.started.cached_tokens == 0
    plain = answered(engine, a_request(prompt, max_tokens=1))[0]
    assert plain.started.cached_tokens == 32
    assert told_of_prompt(plain) == []


def test_choices_share_a_prompt_that_is_told_once(engine: Engine) -> None:
    choices = [Choice(index=index) for index in range(3)]
    request = a_request(range(3, 50), choices=choices, prompt_logprobs=0, max_tokens=3)
    [listener] = answered(engine, request)
    assert len(told_of_prompt(listener)) == 46


def test_a_resumed_answer_does_not_repeat_its_prompts_logprobs(engine: Engine) -> None:
    resumed = [Choice(index=0, output_ids=(5,))]
    request = a_request(range(3, 50), choices=resumed, prompt_logprobs=0, max_tokens=3)
    [listener] = answered(engine, request)
    assert told_of_prompt(listener) == []


def greedy_by(
    judge: LlamaForCausalLM, prompt: Sequence[int], count: int, processors: LogitsProcessorList
) -> list[int]:
    output: list[int] = []
    for _ in range(count):
        logits = logits_along(judge, [*prompt, *output], [0])
        ids = torch.tensor([[*prompt, *output]])
        output.append(int(processors(ids, logits).argmax()))
    return output


@pytest.mark.parametrize(
    ("asked", "processors"),
    [
        ({"repetition_penalty": 1.3}, [RepetitionPenaltyLogitsProcessor(penalty=1.3)]),
        ({"repetition_penalty": 0.7}, [RepetitionPenaltyLogitsProcessor(penalty=0.7)]),
        (
            {"logit_bias": ((5, 4.0), (9, -100.0))},
            [SequenceBiasLogitsProcessor([[[5], 4.0], [[9], -100.0]])],
        ),
        (
            {"bad_words": (*((i,) for i in range(3, 150)), (200, 200), (210, 220, 230))},
            [
                NoBadWordsLogitsProcessor(
                    [*([i] for i in range(3, 150)), [200, 200], [210, 220, 230]]
                )
            ],
        ),
        (
            {"logit_bias": ((5, 3.0),), "repetition_penalty": 1.5},
            [
                SequenceBiasLogitsProcessor([[[5], 3.0]]),
                RepetitionPenaltyLogitsProcessor(penalty=1.5),
            ],
        ),
    ],
)
def test_penalised_and_constrained_answers_are_those_of_transformers_processors(
    engine: Engine, judge: LlamaForCausalLM, asked: dict[str, object], processors: list[object]
) -> None:
    prompts = [[7], list(range(40, 73)), [3, 9] * 20]
    requests = [a_request(p, max_tokens=20, ignore_eos=True, **asked) for p in prompts]
    for prompt, listener in zip(prompts, answered(engine, *requests), strict=True):
        expected = greedy_by(judge, prompt, 20, LogitsProcessorList(processors))
        assert listener.ids() == expected


@pytest.mark.parametrize(
    ("asked", "warper"),
    [
        ({"min_p": 0.1}, MinPLogitsWarper(0.1)),
        ({"top_k": 7}, TopKLogitsWarper(7)),
        ({"top_p": 0.8}, TopPLogitsWarper(0.8)),
    ],
)
def test_filters_leave_what_transformers_warpers_leave(
    asked: dict[str, float], warper: LogitsProcessor
) -> None:
    torch.manual_seed(2)
    logits = torch.randn(20, 300) * 2
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    columns = {name: torch.tensor([value] * 20) for name, value in (neutral | asked).items()}
    left = reference.filtered_probabilities(logits, **columns)
    assert torch.equal(left > 0, torch.isfinite(warper(torch.empty(0), logits)))
