"""Answers as events: choices and calls are texts of their own, and each ends once."""

import pytest

from core.protocol import Usage
from core.safety.policy import Policy
from core.safety.rulebook import Rulebook
from gateway.conversation import (
    CallDelta,
    CallStart,
    ChoiceEnd,
    Delta,
    Done,
    Opened,
    ThoughtDelta,
)
from gateway.safety.output import OutputScreen
from tests.support.safety_cases import a_book, a_rule, terms


def a_screen(book, *, choices=1, is_json=False):
    hits = []
    screen = OutputScreen(
        book, choices=choices, is_json=is_json, tell=lambda choice, hit: hits.append((choice, hit))
    )
    return screen, hits


def told(screen, *events):
    return [each for event in events for each in screen.take(event)]


def say(text, choice=0):
    return Delta(choice=choice, text=text)


def end(choice=0, finish="stop"):
    return ChoiceEnd(choice=choice, finish=finish)


SECRET = a_book(terms("secret"), replacement="#")


def test_what_is_no_choices_business_passes():
    screen, _ = a_screen(SECRET)
    opened, done = Opened(prompt_tokens=1), Done(usage=Usage())
    assert told(screen, opened, done) == [opened, done]
    assert not screen.waits


@pytest.mark.anyio
async def test_nobody_is_asked():
    screen, _ = a_screen(SECRET)
    assert await screen.settle(final=True) == []


def test_choices_hold_back_each_for_itself():
    screen, hits = a_screen(SECRET, choices=2)
    assert told(screen, say("a sec"), say("ret b", 1)) == [say("a "), say("ret b", 1)]
    assert told(screen, say("ret"), end(), end(1)) == [say("#"), end(), end(1)]
    assert [choice for choice, _ in hits] == [0]
    assert screen.over
    assert not screen.filtered


def test_a_call_ends_what_the_prose_before_it_could_have_become():
    screen, _ = a_screen(SECRET)
    start = CallStart(choice=0, call=0, name="f")
    args = CallDelta(choice=0, call=0, arguments='{"a":"sec')
    rest = CallDelta(choice=0, call=0, arguments='ret"}')
    assert told(screen, say("a sec"), start) == [say("a "), say("sec"), start]
    assert told(screen, args) == [CallDelta(choice=0, call=0, arguments='{"a":"')]
    assert told(screen, rest) == [CallDelta(choice=0, call=0, arguments='#"}')]
    # What prose goes on with then belongs to the match all the same.
    assert told(screen, say("ret c"), end(finish="tool_calls")) == [
        say("# c"), end(finish="tool_calls"),
    ]  # fmt: skip


def test_one_call_after_another_is_a_text_of_its_own():
    screen, _ = a_screen(SECRET)
    first, second = (CallStart(choice=0, call=n, name="f") for n in range(2))
    told(screen, first)
    assert told(screen, CallDelta(choice=0, call=0, arguments='"sec')) == [
        CallDelta(choice=0, call=0, arguments='"')
    ]
    assert told(screen, second) == [CallDelta(choice=0, call=0, arguments="sec"), second]
    assert told(screen, CallDelta(choice=0, call=1, arguments='"ret"')) == [
        CallDelta(choice=0, call=1, arguments='"ret"')
    ]


def test_a_hit_within_arguments_ends_the_choice_and_nothing_of_it_follows():
    book = a_book(terms("secret"), action="end")
    for late in (say("more"), CallStart(choice=0, call=1, name="g"), end()):
        screen, hits = a_screen(book)
        told(screen, CallStart(choice=0, call=0, name="f"))
        assert told(screen, CallDelta(choice=0, call=0, arguments='{"a":"secret"}')) == [
            CallDelta(choice=0, call=0, arguments='{"a":"'), end(finish="filtered"),
        ]  # fmt: skip
        assert told(screen, late) == []
        assert (screen.filtered, screen.over, len(hits)) == (True, True, 1)


def test_a_hit_that_only_the_end_of_a_call_shows_ends_the_choice_before_what_follows():
    book = a_book(terms("secret", whole_word=True), action="end")
    for late in (say("more"), CallStart(choice=0, call=1, name="g"), end()):
        screen, _ = a_screen(book)
        told(screen, CallStart(choice=0, call=0, name="f"))
        told(screen, CallDelta(choice=0, call=0, arguments='{"a":"secret'))
        assert told(screen, late) == [end(finish="filtered")]


def test_a_hit_that_only_the_end_of_the_text_shows_ends_the_choice_once():
    book = a_book(terms("secret", whole_word=True), action="end")
    screen, _ = a_screen(book)
    assert told(screen, say("a secret"), end()) == [say("a "), end(finish="filtered")]
    assert told(screen, end()) == []


def test_ending_is_of_one_choice_and_blocking_of_all():
    for action, left in (("end", [say("b", 1)]), ("block", [])):
        screen, _ = a_screen(a_book(terms("secret"), action=action), choices=2)
        ended = told(screen, say("a secret"))
        expected = [say("a "), end(finish="filtered")]
        if action == "block":
            expected.append(end(1, finish="filtered"))
        assert ended == expected
        assert told(screen, say("b", 1)) == left
        assert screen.over is (action == "block")


def test_an_answer_that_is_json_is_read_as_such():
    screen, _ = a_screen(SECRET, is_json=True)
    assert told(screen, say('{"a":"\\u0073ecret"}'), end()) == [say('{"a":"#"}'), end()]


def test_a_mask_that_reaches_over_structure_leaves_json_whole():
    rules = (a_rule(detector=terms('x","y'), replacement="#"),)
    screen, _ = a_screen(Rulebook(Policy(rules=rules)), is_json=True)
    assert told(screen, say('["ax","yb",1]'), end()) == [say('["a#","#b",1]'), end()]


def test_arguments_that_are_only_logged_pass_at_once():
    screen, hits = a_screen(a_book(terms("secret"), action="log"))
    told(screen, CallStart(choice=0, call=0, name="f"))
    for piece in ('"sec', 'ret"'):
        event = CallDelta(choice=0, call=0, arguments=piece)
        assert told(screen, event) == [event]
    assert told(screen, end()) == [end()]
    assert len(hits) == 1


def think(text="", **more):
    return ThoughtDelta(choice=0, text=text, **more)


def test_a_thought_is_a_text_of_its_own_and_masked_it_loses_its_signature():
    screen, hits = a_screen(SECRET)
    assert told(screen, say("a sec"), think("x sec")) == [say("a "), say("sec"), think("x ")]
    assert told(screen, think("ret y"), think(signature="s")) == [think("# y")]
    # With nothing in between, the next is told as more of it: no signature is of both.
    assert told(screen, think("more"), think(signature="t")) == [think("more")]
    assert told(screen, think("sec"), think(redacted="r")) == [think("sec"), think(redacted="r")]
    # What prose goes on with belongs to its own beginning, and not to what was thought between.
    assert told(screen, think("sec"), say("ret"), end()) == [think("sec"), say("#"), end()]
    assert len(hits) == 2


@pytest.mark.parametrize(
    "between", [[think(redacted="r")], [CallStart(choice=0, call=0, name="f")], [say("x")]]
)
def test_a_thought_after_a_masked_one_keeps_its_signature_when_it_is_told_apart(between):
    screen, _ = a_screen(SECRET)
    signed = think("fine", signature="t")
    assert told(screen, think("secret", signature="s"), *between, signed) == [
        think("#"), *between, signed,
    ]  # fmt: skip


def test_a_thought_masked_at_its_end_spoils_the_next_unless_something_is_told_between():
    screen, _ = a_screen(a_book(terms("secret", whole_word=True), replacement="#"))
    assert told(screen, think("a secret"), say(""), think("b", signature="t")) == [
        think("a "), think("#"), think("b"),
    ]  # fmt: skip


def test_a_sealed_thought_is_told_after_the_prose_before_it():
    screen, _ = a_screen(SECRET)
    assert told(screen, say("a sec"), think(redacted="r"), say("ret"), end()) == [
        say("a "), say("sec"), think(redacted="r"), say("#"), end(),
    ]  # fmt: skip


def test_what_is_thought_before_a_call_is_told_before_it():
    screen, _ = a_screen(SECRET)
    start = CallStart(choice=0, call=0, name="f")
    assert told(screen, think("sec"), start) == [think("sec"), start]
    args = CallDelta(choice=0, call=0, arguments='"sec')
    assert told(screen, args, think("y"), end()) == [
        CallDelta(choice=0, call=0, arguments='"'),
        CallDelta(choice=0, call=0, arguments="sec"),
        think("y"),
        end(),
    ]


@pytest.mark.parametrize("last", [say("x"), think(redacted="r"), think(signature="s"), end()])
def test_a_thought_may_end_an_answer(last):
    block = a_book(terms("secret", whole_word=True), action="block")
    screen, hits = a_screen(block, choices=2)
    ends = [end(finish="filtered"), end(1, "filtered")]
    assert told(screen, think("a secret"), last) == [think("a "), *ends]
    assert len(hits) == 1
    assert screen.over


def test_prose_that_ends_an_answer_as_a_thought_begins_hides_it():
    block = a_book(terms("secret", whole_word=True), action="block")
    for begun in (think("on"), think(redacted="r")):
        screen, _ = a_screen(block)
        assert told(screen, say("secret"), begun) == [end(finish="filtered")]
