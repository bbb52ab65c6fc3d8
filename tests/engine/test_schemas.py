"""Generated schemas and prompts on the small real model: what stops is valid, all of it.

`SCHEMAS=200` runs as many as the soak does; how many stop is a property of the test.
"""

import json
import os
import random
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from core.protocol import Failed, Finished, Generate, Grammar
from tests.support.engine_listener import Listener
from tests.support.engine_requests import a_request
from tests.support.hostile_grammars import BOUNDED, REFUSED
from tests.support.model_engine import a_model_engine, answered, finish_of, text_of
from tests.support.schemas import WORDS, Schema, a_schema
from tests.support.small_model import small_model_directory
from text.chat import ChatMessage
from text.grammar import Grammars
from text.rules import TextRules
from worker.engine import Engine

pytestmark = pytest.mark.model
SCHEMAS = int(os.environ.get("SCHEMAS", "40"))
TASKS = ("Describe", "Invent", "Summarise", "Make a record of", "Give an example of")
MAX_TOKENS = 160


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model_directory(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def rules(directory: Path) -> TextRules:
    return TextRules.load(directory)


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Engine]:
    with a_model_engine(
        directory,
        dtype="auto",
        kv_blocks=1_200,
        block_tokens=16,
        max_batched_tokens=512,
        max_sequences=32,
    ) as engine:
        yield engine


def a_prompt(rules: TextRules, dice: random.Random, schema: Schema) -> list[int]:
    said = f"{dice.choice(TASKS)} {dice.choice(WORDS)}."
    if dice.random() < 0.3:
        said += f" Answer in JSON of this schema: {json.dumps(schema, ensure_ascii=False)[:300]}"
    return rules.chat_ids([ChatMessage("user", said)])


def held_to(prompt: list[int], grammar: Grammar, **sampling: Any) -> Generate:
    defaults = {"temperature": 0.8, "max_tokens": MAX_TOKENS}
    return a_request(prompt, grammar=grammar, **(defaults | sampling))


def follows(rules: TextRules, listener: Listener, grammar: Grammar) -> bool:
    ids = [i for tokens in listener.tokens() for i in tokens.ids]
    return Grammars(rules).compile(grammar).follows(ids) is not None


def test_every_answer_to_a_generated_schema_and_prompt_that_stops_is_valid(
    engine, rules, record_property
):
    dice = random.Random(SCHEMAS)
    asked = [a_schema(dice) for _ in range(SCHEMAS)]
    grammars = [Grammar(kind="json_schema", text=json.dumps(schema)) for schema in asked]
    requests = [
        held_to(a_prompt(rules, dice, schema), grammar, seed=at, temperature=dice.choice((0, 0.8)))
        for at, (schema, grammar) in enumerate(zip(asked, grammars, strict=True))
    ]
    stopped = 0
    for schema, grammar, listener in zip(asked, grammars, answered(engine, *requests), strict=True):
        assert isinstance(listener.events[-1], Finished), listener.events[-1]
        text = text_of(listener)
        if finish_of(listener) == "stop":
            # As written: -30.00000000000000000001 is below -30, and no float.
            jsonschema.validate(json.loads(text, parse_float=Decimal), schema)
            stopped += 1
        else:
            assert follows(rules, listener, grammar), "what is cut off began as it should"
        assert all("\ufffd" not in tokens.text for tokens in listener.tokens()[:-1])
    record_property("stopped", stopped)
    assert stopped > SCHEMAS // 2


def test_hostile_grammars_are_refused_or_bounded_and_no_neighbour_notices(engine, rules):
    prompt = rules.chat_ids([ChatMessage("user", "Tell me a story.")])
    free = [a_request(prompt, temperature=0.0, max_tokens=24) for _ in range(2)]
    alone = [text_of(listener) for listener in answered(engine, *free[:1])]
    asked = [*(grammar for grammar, _ in REFUSED.values()), *BOUNDED.values()]
    hostile = [held_to(prompt, grammar, max_tokens=24, seed=at) for at, grammar in enumerate(asked)]
    *heard, beside = answered(engine, *hostile, free[1])
    refused, bounded = heard[: len(REFUSED)], heard[len(REFUSED) :]
    for name, listener in zip(REFUSED, refused, strict=True):
        last = listener.events[-1]
        assert isinstance(last, Failed), name
        assert (last.code, last.retryable) == ("bad_request", False)
    for grammar, listener in zip(BOUNDED.values(), bounded, strict=True):
        assert isinstance(listener.events[-1], Finished), listener.events[-1]
        assert follows(rules, listener, grammar)
    assert text_of(beside)[:20] == alone[0][:20]
    assert engine.load().healthy
