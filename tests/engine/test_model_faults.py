"""One request's bad numbers or contradictions through the whole engine: nobody else notices."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from core.protocol import Failed, Generate
from tests.support.engine_listener import WAIT_S, Listener, wait_until
from tests.support.engine_requests import VERSION, a_request
from tests.support.tiny_llama import TinyLlama
from text.rules import TextRules
from worker.engine import Engine, EngineConfig
from worker.models.llama import Llama
from worker.runner import ModelRunner
from worker.sampler import NO_NUMBERS, NOTHING_LEFT, Sampler
from worker.weights import load_weights

TINY = TinyLlama(hidden=48, heads=6, kv_heads=2, head_dim=8, vocab=300, context=400)

pytestmark = pytest.mark.usefixtures("one_torch_thread")
# Of this token the model knows nothing that is a number.
POISON = 299


@pytest.fixture(params=[float("nan"), float("inf")])
def engine(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    text = TextRules.load(checkpoint)
    weights = load_weights(checkpoint, torch.float32)
    weights.tensors["model.embed_tokens.weight"][POISON] = request.param
    config = EngineConfig(
        version=VERSION,
        boot_id="boot",
        kv_blocks=40,
        context_tokens=400,
        block_tokens=4,
        max_batched_tokens=32,
        max_sequences=8,
        waiting_tokens_max=10_000,
    )
    runner = ModelRunner(
        Llama(weights, block_tokens=4),
        kv_blocks=config.kv_blocks,
        block_tokens=4,
        sampler=Sampler(config.max_sequences, vocab_size=text.vocab_size, eos_ids=text.eos_ids),
    )
    engine = Engine(runner=runner, text=text, config=config)
    engine.start()
    yield engine
    engine.stop(WAIT_S)
    load = engine.load()
    assert (load.integrity, load.kv_blocks_in_use, load.failed_steps) == (True, 0, 0)


def submitted(engine: Engine, request: Generate) -> Listener:
    listener = Listener()
    assert engine.submit(request, listener.emit) is None
    return listener


def assert_failed(listener: Listener, code: str, message: str) -> None:
    last = listener.end()
    assert isinstance(last, Failed)
    assert (last.code, last.retryable) == (code, code == "internal")
    assert message in last.message


SOUND = [
    {"logit_bias": ((POISON, -100.0),)} | asked
    for asked in ({}, {"temperature": 0.9, "top_p": 0.9}, {"frequency_penalty": 1.0})
]


@pytest.mark.parametrize("asked", [{}, {"temperature": 1.0}, {"presence_penalty": 1.0}])
def test_logits_that_are_no_numbers_fail_their_request_and_no_neighbour(
    engine: Engine, asked: dict[str, float]
) -> None:
    wanted = [a_request([5, 6, 7 + at], max_tokens=30, **one) for at, one in enumerate(SOUND)]
    expected = [_ids(submitted(engine, request)) for request in wanted]
    for _ in range(3):
        spoilt = [
            submitted(engine, a_request([8, 9, POISON, 10], max_tokens=30, **asked)),
            submitted(engine, a_request([*range(20, 60), POISON, 10], max_tokens=30, **asked)),
        ]
        again = [
            submitted(engine, a_request(request.prompt_ids, max_tokens=30, **one))
            for request, one in zip(wanted, SOUND, strict=True)
        ]
        for listener in spoilt:
            assert_failed(listener, "internal", NO_NUMBERS)
        # Nor whoever gets their blocks next.
        assert [_ids(listener) for listener in again] == expected


def test_a_model_that_has_no_numbers_for_anyone_is_unhealthy_until_it_has(engine: Engine) -> None:
    for healthy in (True, True, False):
        assert_failed(submitted(engine, a_request([POISON])), "internal", NO_NUMBERS)
        wait_until(lambda expected=healthy: engine.load().healthy is expected)
    # A contradiction is not the model's fault, whatever it costs its request.
    contradiction = a_request([5], allowed_ids=(7,), bad_words=((7,),))
    assert_failed(submitted(engine, contradiction), "bad_request", NOTHING_LEFT)
    wait_until(lambda: engine.load().healthy)


def _ids(listener: Listener) -> list[int]:
    assert listener.end().cause == "complete"
    return listener.ids()


@pytest.mark.parametrize(
    "asked",
    [
        {"allowed_ids": (7,), "bad_words": ((7,),)},
        {"allowed_ids": (2,), "min_tokens": 3},  # 2 is the end
        {"allowed_ids": (7, 8), "bad_words": ((7,), (8,)), "temperature": 1.0},
        {"allowed_ids": (7,), "stop_ids": (7,), "min_tokens": 2, "ignore_eos": True},
    ],
)
def test_constraints_that_leave_nothing_fail_their_request_and_no_neighbour(
    engine: Engine, asked: dict[str, object]
) -> None:
    expected = _ids(submitted(engine, a_request([5, 6], max_tokens=20)))
    neighbour = submitted(engine, a_request([5, 6], max_tokens=20))
    assert_failed(submitted(engine, a_request([5, 6], **asked)), "bad_request", NOTHING_LEFT)
    assert _ids(neighbour) == expected


def test_constraints_that_leave_nothing_later_keep_what_was_said(engine: Engine) -> None:
    asked = {"allowed_ids": (7, 8), "bad_words": ((7, 7), (7, 8), (8, 7), (8, 8))}
    listener = submitted(engine, a_request([5, 6], max_tokens=20, **asked))
    assert_failed(listener, "bad_request", NOTHING_LEFT)
    assert len(listener.ids()) == 1
    assert listener.events[-1].usage.output_tokens == 1


# vllm #21987, PR 5849, PR 46243, #15967: ignored, or off by one.
def test_four_tokens_at_least_and_an_end_that_is_wanted_give_exactly_five(engine: Engine) -> None:
    for asked in ({}, {"temperature": 1.0}, {"stop_ids": (9,), "logit_bias": ((9, 100.0),)}):
        request = a_request(
            [5, 6], **({"min_tokens": 4, "max_tokens": 20, "logit_bias": ((2, 100.0),)} | asked)
        )
        listener = submitted(engine, request)
        assert listener.end().cause == "complete"
        assert len(listener.ids()) == 5
        assert listener.ids()[-1] in (2, 9)
        assert listener.tokens()[-1].finish == "stop"


# vllm #52693: a turn of no tokens killed the engine.
def test_an_end_as_the_first_token_is_an_answer(engine: Engine) -> None:
    listener = submitted(engine, a_request([5, 6], max_tokens=5, logit_bias=((2, 100.0),)))
    assert listener.end().cause == "complete"
    assert (listener.ids(), listener.text()) == ([2], "")


# TGI router/src/lib.rs:960: presence_penalty was added to 2.0 and used as a repetition penalty.
def test_presence_is_not_repetition(engine: Engine) -> None:
    plain, presence, repetition = (
        _ids(submitted(engine, a_request([5, 6, 7], max_tokens=40, ignore_eos=True, **asked)))
        for asked in ({}, {"presence_penalty": 1e-4}, {"repetition_penalty": 2.0})
    )
    assert presence == plain
    assert repetition != plain


# transformers PR 45943: a second batch on one manager lost its results, counted as the first's.
def test_a_second_batch_is_answered_as_the_first(engine: Engine) -> None:
    requests = [
        a_request([5, 6 + at], max_tokens=6, request_id=f"req_{at}", **SOUND[0]) for at in range(4)
    ]
    first, second = (
        [_ids(listener) for listener in [submitted(engine, request) for request in requests]]
        for _ in range(2)
    )
    assert second == first
