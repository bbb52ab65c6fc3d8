"""Grammars, compiled for a vocabulary of bytes and for the small real model's."""

import json
import random

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.protocol import Grammar
from tests.support.engine_requests import EOS, FakeText
from tests.support.grammar_walks import allowed
from tests.support.schemas import a_schema
from tests.support.wild_schemas import a_wild_schema
from text.grammar import Compiled, GrammarError, Grammars, writable

TEXT = FakeText()
GRAMMARS = Grammars(TEXT)
STEPS_MAX = 1_000
# What brings an answer to its end, the best first; then whatever is allowed.
CLOSING = b'"}],:Z1234567890eT.-'


def a_grammar(kind, text=""):
    return Grammar(kind=kind, text=text if isinstance(text, str) else json.dumps(text))


def takes(compiled: Compiled, text: str | bytes) -> bool:
    """Whether the whole text is one that the grammar allows, byte by byte."""
    matcher = compiled.matcher()
    data = text.encode() if isinstance(text, str) else text
    return matcher.consume_tokens([1 + byte for byte in data]) and matcher.is_accepting()


def written(matcher, dice, wandering) -> bytes | None:
    """An answer: so many tokens at random, then what ends it soonest. None: it found no end."""
    ids: list[int] = []
    for step in range(STEPS_MAX):
        if matcher.is_stopped():
            return b"".join(map(TEXT.token_bytes, ids))
        choices = allowed(matcher, TEXT.vocab_size)
        assert choices, "something can always follow until the end"
        if step < wandering:
            token = dice.choice(choices)
        elif EOS in choices:
            token = EOS
        else:
            closing = [1 + byte for byte in CLOSING if 1 + byte in choices]
            token = closing[0] if closing else dice.choice(choices)
        assert matcher.consume_token(token)
        ids.append(token)
    return None


@given(st.integers(0, 2**32), st.integers(0, 60))
def test_any_text_that_the_masks_allow_begins_a_valid_document(seed, wandering):
    dice = random.Random(seed)
    schema = a_schema(dice)
    compiled = GRAMMARS.compile(a_grammar("json_schema", schema))
    text = written(compiled.matcher(), dice, wandering)
    assert text is not None, "the answer ends"
    jsonschema.validate(json.loads(text), schema)


@given(st.integers(0, 2**32), st.integers(0, 25))
def test_whatever_schema_compiles_is_held_to(seed, wandering):
    dice = random.Random(seed)
    schema = a_wild_schema(dice)
    try:
        compiled = GRAMMARS.compile(a_grammar("json_schema", schema))
    except GrammarError:
        return
    text = written(compiled.matcher(), dice, wandering)
    if text is not None:  # what can only go deeper has no end
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@given(st.integers(0, 2**32), st.integers(0, 60))
def test_a_replay_of_the_ids_is_where_the_answer_was(seed, wandering):
    dice = random.Random(seed)
    compiled = GRAMMARS.compile(a_grammar("json_schema", a_schema(dice)))
    ids: list[int] = []
    first = compiled.matcher()
    for _ in range(wandering):
        if first.is_stopped():
            break
        ids.append(dice.choice(allowed(first, TEXT.vocab_size)))
        assert first.consume_token(ids[-1])
    second = compiled.matcher()
    assert second.consume_tokens(ids)
    assert allowed(second, TEXT.vocab_size) == allowed(first, TEXT.vocab_size)
    assert second.is_stopped() == first.is_stopped() == compiled.follows(ids)


def test_what_breaks_the_grammar_follows_nothing():
    compiled = GRAMMARS.compile(a_grammar("regex", "ab"))
    assert compiled.follows([1 + ord("a")]) is False
    assert compiled.follows([1 + ord("a"), 1 + ord("b")]) is True
    assert compiled.follows([1 + ord("b")]) is None


def test_a_fresh_matcher_is_like_the_others():
    compiled = GRAMMARS.compile(a_grammar("choice", ["yes", "no"]))
    assert allowed(compiled.fresh(), TEXT.vocab_size) == allowed(
        compiled.matcher(), TEXT.vocab_size
    )


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_object", "", ['{"a": [1, {}]}', "{}"], ["[]", "1", ""]),
        ("json_schema", {"const": "é"}, ['"é"'], ['"e"', "é"]),
        ("regex", "a+|b{2}", ["a", "aaa", "bb"], ["", "b", "ab"]),
        ("regex", "[/]\\d", ["/7"], ["7", "\\/7"]),
        ("regex", "[^/]", ["한"], ["/"]),
        (
            "choice",
            ["no", 'a "b"\n', "\x7f🤦", "//"],
            ["no", 'a "b"\n', "\x7f🤦", "//"],
            ["n", "/"],
        ),
        (
            "lark",
            'start: "a" b\nb: /[0-9]/ | "<tool>" // a comment with < and "',
            ["a1", "a<tool>"],
            ["a"],
        ),
        (
            "lark",
            'start: "f" %json {"type": "integer", "minimum": 3, "maximum": 4}',
            ["f3"],
            ["f5"],
        ),
    ],
)
def test_each_kind_takes_its_texts_and_no_others(kind, text, good, bad):
    compiled = GRAMMARS.compile(a_grammar(kind, text))
    assert [each for each in good if not takes(compiled, each)] == []
    assert [each for each in bad if takes(compiled, each)] == []


def test_white_space_between_tokens_of_json_is_bounded():
    # vllm #9297 and others: an answer that is line breaks to its last token.
    compiled = GRAMMARS.compile(
        a_grammar("json_schema", {"type": "array", "items": {"type": "null"}})
    )
    assert takes(compiled, "[\n  null,\n\tnull ]")
    assert not takes(compiled, "[\n\nnull]")
    assert not takes(compiled, "[  null]")
    assert not takes(compiled, "[\n" + " " * 25 + "null]")
    lark = GRAMMARS.compile(a_grammar("lark", 'start: %json {"type": "array"}'))
    assert not takes(lark, "[\n\n]")


def test_no_grammar_allows_half_a_character():
    compiled = GRAMMARS.compile(a_grammar("json_schema", {"type": "string", "maxLength": 3}))
    assert takes(compiled, '"한"')
    assert not takes(compiled, b'"\xed\x95"')
    assert not takes(compiled, b'"\xff"')


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json_schema", "{", "is not valid JSON"),
        ("json_schema", "[]", "must be a JSON object"),
        ("json_schema", '{"maximum": NaN}', "is not valid JSON"),
        ("json_schema", {"$ref": "#/$defs/none"}, "does not exist"),
        ("json_schema", {"not": {}}, 'these keywords are not supported: "not"'),
        (
            "json_schema",
            {"oneOf": [{"type": "string"}, {"minLength": 2}]},
            "'oneOf' is supported only",
        ),
        ("json_schema", {"$ref": "#"}, "no text can satisfy it"),
        ("json_schema", {"type": "integer", "minimum": 5, "maximum": 1}, "Unsatisfiable"),
        ("json_schema", {"anyOf": [{"type": "string", "pattern": "("}]}, "unclosed group"),
        ("regex", "", "is empty"),
        ("regex", "[", "unclosed character class"),
        ("regex", "(?=a)b", "look-ahead"),
        ("choice", "[]", "at least one string"),
        ("choice", '["a", ""]', "none that is empty"),
        ("choice", '["a", 1]', "is not a list of strings"),
        ("choice", [f"{i}" for i in range(5001)], "has over 5000 strings"),
        ("choice", "a" * 200_000, "is over 131072 bytes"),
        ("lark", " \n", "is empty"),
        ("lark", "start: nope", 'unknown name: "nope"'),
        ("lark", "start: <[0-16]>", "'<' names a token"),
        ("lark", "start: <|im_end|>", "'<' names a token"),
        ("lark", 'start: %llguidance {"no_forcing": false}', "'%llguidance' is not supported"),
        ("lark", "start: %json [1", "'%json' must be followed by a JSON schema"),
        ("lark", "start: %json 5", "must be a JSON object"),
        ("lark", "start: @other", "unknown grammar"),
        ("lark", 'start: ("a"?)~1..10 ' + " ".join("( a" for _ in range(600)), "nested"),
    ],
)
def test_a_grammar_that_cannot_compile_says_why(kind, text, message):
    with pytest.raises(GrammarError) as raised:
        GRAMMARS.compile(a_grammar(kind, text))
    assert message in str(raised.value)
    assert len(str(raised.value)) <= 300
    assert "llguidance" not in str(raised.value).removeprefix("'%llguidance'")


def test_only_text_and_the_ends_are_writable():
    mask = np.unpackbits(writable(TEXT).view(np.uint8), bitorder="little")
    assert len(mask) == 320
    text = [i for i in range(TEXT.vocab_size) if TEXT.token_bytes(i)]
    assert np.flatnonzero(mask).tolist() == [EOS, *text]


@pytest.mark.model
def test_control_tokens_of_a_real_vocabulary_are_never_allowed(small_rules):
    silent = [i for i in range(small_rules.vocab_size) if not small_rules.token_bytes(i)]
    compiled = Grammars(small_rules).compile(a_grammar("regex", "(.|\n)*"))
    ids = allowed(compiled.matcher(), small_rules.vocab_size)
    assert set(silent) & set(ids) == small_rules.eos_ids
    assert len(ids) > small_rules.vocab_size // 2


@pytest.mark.model
def test_a_text_of_a_real_vocabulary_is_taken_however_it_is_cut(small_rules):
    schema = {"type": "object", "properties": {"이름": {"type": "string"}}, "required": ["이름"]}
    compiled = Grammars(small_rules).compile(a_grammar("json_schema", schema))
    text = '{"이름": "한국어 🤦🏽‍♂️ José"}'
    assert compiled.follows(small_rules.plain_ids(text)) is True
    one_by_one = {small_rules.token_bytes(i): i for i in range(small_rules.vocab_size)}
    assert compiled.follows([one_by_one[bytes([byte])] for byte in text.encode()]) is True
