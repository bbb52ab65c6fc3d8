"""Answers that wait for judges, and judges that wait for answers."""

import pytest

from core.safety.policy import Judge
from gateway.conversation import CallDelta, CallStart, ChoiceEnd, Delta, Opened
from gateway.safety.judged import JudgedScreen
from gateway.safety.output import OutputScreen
from tests.support.safety_cases import a_book, terms

pytestmark = pytest.mark.anyio


def a_judged(*, hits_on="bad", choices=1, every_chars=0, action="block", more=()):
    """The screen, what its judges were asked, and what was noted."""
    book = a_book(
        *[Judge(model="m", question="q", every_chars=n) for n in (every_chars, *more)],
        action=action,
    )
    asked, noted = [], []

    async def ask(rule, text):
        asked.append((rule, text))
        return hits_on in text

    inner = OutputScreen(book, choices=choices, is_json=False, tell=lambda *_: None)
    screen = JudgedScreen(
        inner, book, choices=choices, ask=ask, tell=lambda choice, hit: noted.append((choice, hit))
    )
    return screen, asked, noted


def say(text, choice=0):
    return Delta(choice=choice, text=text)


def end(choice=0, finish="stop"):
    return ChoiceEnd(choice=choice, finish=finish)


async def test_nothing_but_the_opening_is_told_before_the_judge_has_spoken():
    screen, asked, noted = a_judged()
    opened = Opened(prompt_tokens=1)
    assert screen.take(opened) == [opened]
    assert screen.take(say("good")) + screen.take(end()) == []
    assert not screen.waits
    assert await screen.settle(final=True) == [say("good"), end()]
    assert asked == [(0, "good")]
    assert (noted, screen.filtered, screen.over) == ([], False, True)


async def test_what_a_judge_ends_is_not_told_and_ends_once():
    screen, _, noted = a_judged()
    screen.take(say("bad"))
    screen.take(end())
    assert await screen.settle(final=True) == [end(finish="filtered")]
    assert (screen.filtered, screen.over) == (True, True)
    assert [(choice, hit.text) for choice, hit in noted] == [(0, "bad")]


async def test_judges_are_asked_for_every_so_many_characters_of_all_there_is_so_far():
    screen, asked, _ = a_judged(every_chars=4, more=(9,))
    screen.take(say("abc"))
    assert not screen.waits
    screen.take(say("d"))
    assert screen.waits
    assert await screen.settle(final=False) == [say("abc"), say("d")]
    assert not screen.waits
    screen.take(say(" bad"))
    assert await screen.settle(final=False) == [end(finish="filtered")]
    assert asked == [(0, "abcd"), (1, "abcd"), (0, "abcd bad")]
    assert await screen.settle(final=True) == []


@pytest.mark.parametrize("action", ["end", "block"])
async def test_a_choice_is_ended_alone_or_with_the_others(action):
    screen, asked, _ = a_judged(choices=3, action=action, more=(0,))
    for number, text in enumerate(("good", "bad", "good")):
        screen.take(say(text, number))
    told = await screen.settle(final=True)
    if action == "end":
        assert told == [say("good"), say("good", 2), end(1, finish="filtered")]
    else:
        assert told == [end(number, finish="filtered") for number in range(3)]
        assert (1, "good") not in asked[2:]


async def test_arguments_are_judged_too():
    screen, asked, _ = a_judged()
    screen.take(CallStart(choice=0, call=0, name="f"))
    screen.take(CallDelta(choice=0, call=0, arguments='"bad"'))
    assert await screen.settle(final=True) == [end(finish="filtered")]
    assert asked == [(0, '"bad"')]


async def test_a_judge_that_logs_holds_nothing_and_is_asked_at_the_end():
    screen, asked, noted = a_judged(action="log", choices=2)
    assert screen.take(say("bad")) == [say("bad")]
    assert await screen.settle(final=False) == []
    assert asked == []
    assert await screen.settle(final=True) == []
    assert asked == [(0, "bad")]
    assert len(noted) == 1
    assert not screen.filtered


async def test_what_the_rules_end_is_filtered_though_no_judge_said_so():
    book = a_book(terms("secret"), Judge(model="m", question="q"), action="end")

    async def ask(rule, text):
        return False

    inner = OutputScreen(book, choices=1, is_json=False, tell=lambda *_: None)
    screen = JudgedScreen(inner, book, choices=1, ask=ask, tell=lambda *_: None)
    screen.take(say("a secret"))
    assert (screen.filtered, screen.over) == (True, True)
    assert await screen.settle(final=True) == [say("a "), end(finish="filtered")]
