"""An answer resumed anywhere, whatever shapes it, is the one that was never interrupted.

Everything that decides the next token follows from prompt ids + output ids: penalties, the
place in a grammar, what a stop string holds back, which bad word has begun, logprobs.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.protocol import Choice, Generate, Grammar
from tests.support.engine_listener import Listener
from tests.support.engine_requests import a_request
from tests.support.model_engine import a_model_engine, answered
from tests.support.tiny_llama import TinyLlama
from worker.engine import Engine

TINY = TinyLlama(hidden=32, heads=4, kv_heads=2, head_dim=8, vocab=600, context=500)
PROMPT = (5, 6, 7, 8)
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
LENGTH = 24

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SHAPES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.8,
        "presence_penalty": 0.5,
    },
    "bans": {"bad_words": ((17, 18), *((i,) for i in range(3, 90))), "min_tokens": 12},
    "bias": {"logit_bias": ((9, 3.0), (12, -100.0)), "temperature": 1.0, "top_p": 0.9},
    "stop": {"stop": ("zz", "ab"), "temperature": 1.0},
    "schema": {"grammar": Grammar(kind="json_schema", text=SCHEMA), "temperature": 1.0},
    "regex": {"grammar": Grammar(kind="regex", text="([a-z]{3}-){4,9}end"), "temperature": 1.0},
}


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with a_model_engine(checkpoint) as engine:
        yield engine


def asked(shape: str, choices: tuple[Choice, ...], attempt: int = 1) -> Generate:
    return a_request(
        PROMPT,
        choices=choices,
        attempt=attempt,
        **({"max_tokens": LENGTH, "logprobs": 2} | SHAPES[shape]),
    )


def after(listener: Listener, choice: int, cut: int) -> Choice | None:
    """The choice as a gateway had it after so many of its frames; None once it had ended."""
    frames = listener.tokens(choice)[:cut]
    if any(frame.finish for frame in frames):
        return None
    return Choice(
        index=choice,
        output_ids=tuple(i for frame in frames for i in frame.ids),
        released_chars=sum(len(frame.text) for frame in frames),
    )


def chances(listener: Listener, choice: int) -> list[tuple[int, float]]:
    told = [one for frame in listener.tokens(choice) for one in frame.logprobs or ()]
    return [(one.id, one.logprob) for one in told]


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=6)
@given(cuts=st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)))
def test_resumed_at_any_two_places_both_choices_go_on_as_they_would_have(engine, shape, cuts):
    whole = answered(engine, asked(shape, (Choice(index=0), Choice(index=1))))[0]
    left = [choice for at, cut in enumerate(cuts) if (choice := after(whole, at, cut))]
    if not left:
        return
    resumed = answered(engine, asked(shape, tuple(left), attempt=2))[0]
    for choice in left:
        before = whole.tokens(choice.index)[: cuts[choice.index]]
        assert (*choice.output_ids, *resumed.ids(choice.index)) == tuple(whole.ids(choice.index))
        text = "".join(frame.text for frame in before) + resumed.text(choice.index)
        assert text == whole.text(choice.index)
        ends = [one.tokens(choice.index)[-1] for one in (whole, resumed)]
        assert ends[0].finish == ends[1].finish
        assert ends[0].stop == ends[1].stop
        expected = chances(whole, choice.index)[len(choice.output_ids) :]
        for (id_, logprob), (other, wanted) in zip(
            chances(resumed, choice.index), expected, strict=True
        ):
            assert id_ == other
            assert math.isclose(logprob, wanted, abs_tol=1e-4)
