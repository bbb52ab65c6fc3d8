"""Answers held to a grammar, beside others, by a small untrained model that says anything."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from core.protocol import Choice, Failed, Finished, Grammar
from tests.support.engine_requests import a_request
from tests.support.model_engine import a_model_engine, answered, finish_of, submitted, text_of
from tests.support.schemas import a_schema
from tests.support.tiny_llama import TinyLlama
from text.rules import TextRules
from worker.engine import Engine

TINY = TinyLlama(hidden=32, heads=4, kv_heads=2, head_dim=8, vocab=600, context=500)

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module")
def rules(checkpoint: Path) -> TextRules:
    return TextRules.load(checkpoint)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with a_model_engine(checkpoint) as engine:
        yield engine


def a_grammar(kind, text=""):
    return Grammar(kind=kind, text=text if isinstance(text, str) else json.dumps(text))


def held_to(kind, text="", **changes):
    defaults = {"temperature": 1.0, "max_tokens": 120}
    return a_request((5, 6, 7), grammar=a_grammar(kind, text), **(defaults | changes))


def schemas(count, seed=3):
    dice = random.Random(seed)
    return [a_schema(dice) for _ in range(count)]


def ids_of(listener, choice=0):
    return [i for tokens in listener.tokens(choice) for i in tokens.ids]


def test_every_answer_that_stops_is_valid_and_no_neighbour_notices(engine):
    free = [a_request((9, seed), temperature=1.0, seed=seed, max_tokens=40) for seed in range(6)]
    alone = [ids_of(answered(engine, request)[0]) for request in free]
    asked = schemas(30)
    constrained = [held_to("json_schema", schema, seed=at) for at, schema in enumerate(asked)]
    beside = [a_request((9, seed), temperature=1.0, seed=seed, max_tokens=40) for seed in range(6)]
    listeners = answered(engine, *constrained, *beside)
    assert [ids_of(listener) for listener in listeners[30:]] == alone
    stopped = 0
    for schema, listener in zip(asked, listeners, strict=False):
        assert isinstance(listener.events[-1], Finished)
        if finish_of(listener) == "stop":
            jsonschema.validate(json.loads(text_of(listener)), schema)
            stopped += 1
    assert stopped >= 5


def test_an_answer_resumed_at_any_token_goes_on_as_it_would_have(engine):
    schema = {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 2, "maxItems": 3}
    whole = answered(engine, held_to("json_schema", schema))[0]
    ids = ids_of(whole)
    assert finish_of(whole) == "stop"
    for cut in range(1, len(ids)):
        choices = (Choice(index=0, output_ids=tuple(ids[:cut])),)
        rest = answered(engine, held_to("json_schema", schema, choices=choices))[0]
        assert ids[:cut] + ids_of(rest) == ids
        assert text_of(rest) == text_of(whole)


def test_an_answer_resumed_at_the_end_of_its_grammar_is_at_its_end(engine):
    whole = answered(engine, held_to("json_schema", {"const": [1]}))[0]
    choices = (Choice(index=0, output_ids=tuple(ids_of(whole))),)
    steps = engine.load().steps
    rest = answered(engine, held_to("json_schema", {"const": [1]}, choices=choices))[0]
    assert (finish_of(rest), ids_of(rest), engine.load().steps) == ("stop", [], steps)
    assert text_of(rest) == text_of(whole)


def test_output_that_breaks_the_grammar_is_a_bad_request(engine, rules):
    choices = (Choice(index=0, output_ids=tuple(rules.plain_ids("no"))),)
    last = answered(engine, held_to("regex", "yes", choices=choices))[0].events[-1]
    assert isinstance(last, Failed)
    assert (last.code, last.retryable) == ("bad_request", False)
    assert last.message == "output_ids break the grammar"


def test_preempted_answers_go_on_as_they_would_have(checkpoint, engine):
    requests = [
        held_to("json_schema", {"type": "array", "minItems": 30}, seed=at, max_tokens=60)
        for at in range(4)
    ]
    expected = [ids_of(listener) for listener in answered(engine, *requests)]
    with a_model_engine(checkpoint, kv_blocks=24, max_batched_tokens=16) as small:
        found = answered(small, *requests)
        assert small.load().preemptions
    assert [ids_of(listener) for listener in found] == expected


def test_a_grammar_that_ends_before_min_tokens_fails_its_request_with_the_reason(engine):
    # vllm PR 47489: json_schema const + min_tokens 50 masked every token.
    bad, good = answered(
        engine,
        held_to("json_schema", {"const": "hi"}, min_tokens=50),
        held_to("json_schema", {"const": "hi"}, min_tokens=3),
    )
    assert isinstance(bad.events[-1], Failed)
    assert (bad.events[-1].code, bad.events[-1].retryable) == ("bad_request", False)
    assert "min_tokens" in bad.events[-1].message
    assert (text_of(good), finish_of(good)) == ('"hi"', "stop")


def test_a_grammar_that_may_go_on_does_so_for_min_tokens(engine):
    request = held_to("regex", "a[a-z]*", min_tokens=20, max_tokens=30)
    listener = answered(engine, request)[0]
    assert len(ids_of(listener)) >= 20
    assert re.fullmatch("a[a-z]*", text_of(listener))


def test_a_grammar_ends_an_answer_that_ignores_ends(engine):
    for regex in ("[a-c]{3}", "[a-c]{1,4}"):
        listener = answered(engine, held_to("regex", regex, ignore_eos=True))[0]
        assert finish_of(listener) == "stop"
        assert re.fullmatch(regex, text_of(listener))


def test_a_grammar_that_does_not_compile_fails_its_request_alone(engine):
    # tabbyAPI PR 481: an uncompilable schema was passed over with 200.
    bad, good = answered(engine, held_to("regex", "("), held_to("choice", ["yes"]))
    assert isinstance(bad.events[-1], Failed)
    assert (bad.events[-1].code, bad.events[-1].retryable) == ("bad_request", False)
    assert "unclosed group" in bad.events[-1].message
    assert text_of(good) == "yes"


def test_constraints_that_leave_nothing_fail_their_request_alone(engine, rules):
    allowed = tuple(rules.plain_ids("n"))
    bad, good = answered(
        engine, held_to("choice", ["yes"], allowed_ids=allowed), held_to("choice", ["yes"])
    )
    assert isinstance(bad.events[-1], Failed)
    assert bad.events[-1].code == "bad_request"
    assert text_of(good) == "yes"


def test_a_banned_token_leaves_other_ways_to_spell_a_grammars_text(engine, rules):
    text = "headworks waterway"
    whole = answered(engine, held_to("choice", [text]))[0]
    longest = max(ids_of(whole), key=lambda i: len(rules.token_bytes(i)))
    assert len(rules.token_bytes(longest)) > 1
    banned = answered(engine, held_to("choice", [text], bad_words=((longest,),)))[0]
    assert text_of(banned) == text
    assert longest not in ids_of(banned)
    biased = answered(engine, held_to("choice", [text], logit_bias=((longest, -100.0),)))[0]
    assert text_of(biased) == text


def test_a_stop_string_ends_an_answer_within_its_grammar(engine):
    listener = answered(engine, held_to("choice", ["one, two"], stop=(", ",)))[0]
    assert (text_of(listener), finish_of(listener)) == ("one", "stop")


def test_each_choice_has_its_own_place_in_the_grammar(engine):
    choices = tuple(Choice(index=at) for at in range(5))
    (listener,) = answered(engine, held_to("regex", "[ab]{4}|c{6}", choices=choices))
    texts = [text_of(listener, at) for at in range(5)]
    assert all(re.fullmatch("[ab]{4}|c{6}", text) for text in texts)
    assert len(set(texts)) > 1


def test_strings_of_many_bytes_come_out_whole(engine):
    listener = answered(engine, held_to("regex", "[가-힣🤦🏽]{5}"))[0]
    assert re.fullmatch("[가-힣🤦🏽]{5}", text_of(listener))
    assert all("\ufffd" not in tokens.text for tokens in listener.tokens())


def test_an_aborted_answer_gives_its_slot_to_another_grammar(engine):
    endless = [held_to("regex", "a*", max_tokens=400, ignore_eos=True) for _ in range(16)]
    listeners = submitted(engine, *endless)
    waiting = submitted(engine, *(held_to("choice", ["yes", "no"]) for _ in range(8)))
    for request in endless:
        engine.abort(request.request_id, request.attempt)
    for listener in listeners:
        listener.end()
    for listener in waiting:
        listener.end()
        assert text_of(listener) in ("yes", "no")
