"""Requests that ask for everything at once, beside each other and short of room: as if alone.

What a slot keeps (counts, ends of answers, lists of ids) must survive neighbours, chunks,
preemption, and the slot's next owner.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from core.protocol import Choice, Finished, Generate
from tests.support.engine_listener import WAIT_S, Listener
from tests.support.engine_requests import VERSION, a_request
from tests.support.tiny_llama import TinyLlama
from text.rules import TextRules
from worker.engine import Engine, EngineConfig
from worker.runner import load_runner
from worker.sampler import Sampler

TINY = TinyLlama(hidden=48, heads=6, kv_heads=2, head_dim=8, vocab=300, context=400)

pytestmark = pytest.mark.usefixtures("one_torch_thread")
END = 2


@contextmanager
def an_engine(checkpoint: Path, **changes) -> Iterator[Engine]:
    text = TextRules.load(checkpoint)
    defaults = {"kv_blocks": 400, "context_tokens": 400, "block_tokens": 4}
    defaults |= {"max_batched_tokens": 64, "max_sequences": 12, "waiting_tokens_max": 100_000}
    config = EngineConfig(version=VERSION, boot_id="boot", **(defaults | changes))
    runner = load_runner(
        checkpoint,
        block_tokens=config.block_tokens,
        kv_blocks=config.kv_blocks,
        dtype="float32",
        sampler=Sampler(config.max_sequences, vocab_size=text.vocab_size, eos_ids=text.eos_ids),
    )
    engine = Engine(runner=runner, text=text, config=config)
    engine.start()
    yield engine
    engine.stop(WAIT_S)
    load = engine.load()
    assert (load.integrity, load.kv_blocks_in_use, load.failed_steps) == (True, 0, 0)


def requests(number: int, seed: int) -> list[Generate]:
    dice = random.Random(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(dice.sample(range(3, TINY.vocab), count))

    def maybe(value: object, otherwise: object) -> object:
        return value if dice.random() < 0.5 else otherwise

    made = []
    for at in range(number):
        likely = ids(8)
        made.append(
            a_request(
                [dice.randrange(3, TINY.vocab) for _ in range(dice.randint(1, 60))],
                request_id=f"{seed}.{at}",
                choices=[Choice(index=index) for index in range(dice.choice([1, 1, 2]))],
                max_tokens=30,
                seed=at,
                temperature=maybe(0.0, 1.0),
                top_p=maybe(1.0, 0.9),
                top_k=maybe(0, 20),
                min_p=maybe(0.0, 0.02),
                repetition_penalty=maybe(1.0, 1.4),
                frequency_penalty=maybe(0.0, 0.7),
                presence_penalty=maybe(0.0, -0.5),
                # Few tokens are likely, so that answers meet their own bans and penalties.
                logit_bias=maybe((), tuple((id_, 6.0) for id_ in (*likely, END))),
                bad_words=maybe((), (likely[:1], likely[1:3], likely[2:5], (likely[6],) * 2)),
                allowed_ids=maybe((), (*likely, *ids(40), END)),
                stop_ids=maybe((), ids(3)),
                min_tokens=maybe(0, 12),
                ignore_eos=dice.random() < 0.5,
                logprobs=maybe(None, 2),
                prompt_logprobs=maybe(None, 1),
            )
        )
    return made


def submitted(engine: Engine, request: Generate) -> Listener:
    listener = Listener()
    assert engine.submit(request, listener.emit) is None
    return listener


def answers(listener: Listener, request: Generate) -> list[list[int]]:
    last = listener.end()
    assert isinstance(last, Finished), last
    assert last.cause == "complete"
    return [listener.ids(choice.index) for choice in request.choices]


def assert_kept(request: Generate, ids: list[int]) -> None:
    """What can be seen of the constraints in the answer alone."""
    asked = request.sampling
    assert not asked.allowed_ids or set(ids) <= set(asked.allowed_ids)
    for word in asked.bad_words:
        windows = [tuple(ids[at : at + len(word)]) for at in range(len(ids))]
        assert word not in windows
    ends = {*asked.stop_ids} | (set() if asked.ignore_eos else {END})
    assert not ends & set(ids[: asked.min_tokens])
    assert not ends & set(ids[:-1])
    assert len(ids) == asked.max_tokens or ids[-1] in ends


@pytest.mark.parametrize("seed", [1, 2])
def test_together_short_of_room_and_among_aborted_ones_they_answer_as_alone(
    checkpoint: Path, seed: int
) -> None:
    wanted = requests(20, seed)
    with an_engine(checkpoint) as engine:
        expected = [answers(submitted(engine, request), request) for request in wanted]
    for request, choices in zip(wanted, expected, strict=True):
        for ids in choices:
            assert_kept(request, ids)
    with an_engine(checkpoint, kv_blocks=36, max_batched_tokens=24, expected_share=0.0) as engine:
        listeners = []
        for request, noise in zip(wanted, requests(20, seed + 100), strict=True):
            submitted(engine, noise)
            listeners.append(submitted(engine, request))
            engine.abort(noise.request_id, noise.attempt)
        found = [answers(one, request) for one, request in zip(listeners, wanted, strict=True)]
        assert engine.load().preemptions > 0
    assert found == expected
