"""Grammars made to hurt, compiled and followed by dice."""

import random

import pytest

from tests.support.engine_requests import FakeText
from tests.support.grammar_walks import allowed
from tests.support.hostile_grammars import BOUNDED, REFUSED
from text.grammar import GrammarError, Grammars

TEXT = FakeText()
GRAMMARS = Grammars(TEXT)


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_grammar_is_refused_with_its_reason(name):
    grammar, reason = REFUSED[name]
    with pytest.raises(GrammarError) as raised:
        GRAMMARS.compile(grammar)
    assert reason in str(raised.value)
    assert len(str(raised.value)) <= 300


@pytest.mark.parametrize("name", BOUNDED)
def test_a_hostile_grammar_that_compiles_is_followed_or_says_why_not(name):
    compiled = GRAMMARS.compile(BOUNDED[name])
    matcher, dice, ids = compiled.matcher(), random.Random(1), list[int]()
    for _ in range(300):
        if matcher.is_stopped():
            break
        choices = allowed(matcher, TEXT.vocab_size)
        assert choices
        ids.append(dice.choice(choices))
        assert matcher.consume_token(ids[-1]), matcher.get_error()
    assert compiled.follows(ids) == matcher.is_stopped()
