"""Thinking: asked for in every dialect, told to either, and what was thought, there and back."""

import json
from typing import Any

import pytest

from core.errors import Code, RefusedError
from core.protocol import Usage
from gateway.anthropic import parse_count_tokens, parse_messages
from gateway.conversation import (
    Conversation,
    Delta,
    ThoughtDelta,
    told_event,
)
from gateway.responses import (
    continued,
    parse_input_tokens,
    parse_response,
)
from gateway.thinking import Thinking, refuse_thinking
from tests.support.provider_world import a_provider, asked
from tests.unit.gateway.test_provider_requests import SCHEMA, assert_unasked, body_of

ASK: Any = [{"role": "user", "content": "Hi"}]
USAGE = Usage(prompt_tokens=9, output_tokens=8, reasoning_tokens=5)


def chat(**more: Any) -> Conversation:
    return asked({"messages": ASK, **more})


def message(**more: Any) -> Conversation:
    return asked({"max_tokens": 9_000, "messages": ASK, **more}, "anthropic")


def response(**more: Any) -> Conversation:
    body = {"model": "house", "input": "Hi", **more}
    return continued(parse_response(json.dumps(body).encode()), ())


# What is asked.


@pytest.mark.parametrize(
    ("conversation", "thinking"),
    [
        (chat(), None),
        (chat(reasoning_effort=None), None),
        (chat(reasoning_effort="none"), Thinking(mode="off")),
        (
            chat(reasoning_effort="high"),
            Thinking(mode="adaptive", effort="high", asked=("reasoning_effort",)),
        ),
        (response(), None),
        (response(reasoning={}), None),
        (response(reasoning={"effort": "none", "summary": "auto"}).thinking, "off"),
        (
            response(reasoning={"effort": "low", "mode": "standard", "context": "auto"}),
            Thinking(mode="adaptive", effort="low", asked=("reasoning.effort",)),
        ),
        (
            response(reasoning={"summary": "auto"}),
            Thinking(display="summarized", asked=("reasoning.summary",)),
        ),
        (
            response(reasoning={"generate_summary": "detailed"}),
            Thinking(display="summarized", asked=("reasoning.generate_summary",)),
        ),
        (message(), None),
        (message(thinking={"type": "disabled"}), Thinking(mode="off")),
        (
            message(output_config={"effort": "max"}),
            Thinking(effort="max", asked=("output_config.effort",)),
        ),
        (
            message(thinking={"type": "adaptive", "display": "omitted"}),
            Thinking(mode="adaptive", display="omitted", asked=("thinking",)),
        ),
        (
            message(
                thinking={"type": "enabled", "budget_tokens": 1024, "display": "summarized"},
                output_config={"effort": "low"},
            ),
            Thinking(
                mode="budget",
                effort="low",
                budget_tokens=1024,
                display="summarized",
                asked=("thinking", "output_config.effort"),
            ),
        ),
        (
            message(thinking={"type": "between_tools"}),
            Thinking(mode="between_tools", asked=("thinking",)),
        ),
    ],
)
def test_every_dialect_says_what_it_wants(conversation: Any, thinking: Any) -> None:
    if thinking == "off":
        assert (conversation.mode, conversation.asked) == ("off", ())
    else:
        assert conversation.thinking == thinking


@pytest.mark.parametrize(
    ("thinking", "param"),
    [
        ({}, "thinking.type"),
        ({"type": "often"}, "thinking.type"),
        ({"type": "disabled", "display": "omitted"}, "thinking.display"),
        ({"type": "enabled"}, "thinking.budget_tokens"),
        ({"type": "enabled", "budget_tokens": 1023}, "thinking.budget_tokens"),
        ({"type": "enabled", "budget_tokens": 9_000}, "thinking.budget_tokens"),
        ({"type": "adaptive", "display": "all"}, "thinking.display"),
        ({"type": "adaptive", "more": 1}, "thinking.more"),
    ],
)
def test_a_bad_wish_is_refused_by_its_field(thinking: Any, param: str) -> None:
    with pytest.raises(RefusedError) as caught:
        message(thinking=thinking)
    assert (caught.value.refusal.param, caught.value.refusal.status) == (param, 400)


def test_a_count_knows_what_is_asked() -> None:
    body = {"model": "m", "messages": ASK, "thinking": {"type": "adaptive"}}
    counted = parse_count_tokens(json.dumps(body).encode())
    assert counted.thinking == Thinking(mode="adaptive", asked=("thinking",))
    body = {"model": "m", "input": "Hi", "reasoning": {"effort": "low"}}
    assert parse_input_tokens(json.dumps(body).encode()).thinking is not None


def test_a_model_that_does_not_reason_is_asked_for_nothing() -> None:
    for conversation in (chat(), chat(reasoning_effort="none"), message()):
        refuse_thinking(conversation.thinking, "tiny")
    for conversation, param in (
        (chat(reasoning_effort="low"), "reasoning_effort"),
        (message(thinking={"type": "adaptive"}), "thinking"),
        (
            message(thinking={"type": "disabled"}, output_config={"effort": "low"}),
            "output_config.effort",
        ),
        (response(reasoning={"summary": "auto"}), "reasoning.summary"),
    ):
        with pytest.raises(RefusedError) as caught:
            refuse_thinking(conversation.thinking, "tiny")
        refusal = caught.value.refusal
        assert (refusal.code, refusal.param) == (Code.UNSUPPORTED, param)
        assert f"{param}: the model 'tiny'" in refusal.message


ADAPTIVE = {"type": "adaptive"}


@pytest.mark.parametrize(
    ("effort", "thinking", "config"),
    [
        (None, None, None),
        ("none", {"type": "disabled"}, None),
        ("minimal", ADAPTIVE, {"effort": "low"}),
        ("low", ADAPTIVE, {"effort": "low"}),
        ("xhigh", ADAPTIVE, {"effort": "xhigh"}),
        ("max", ADAPTIVE, {"effort": "max"}),
    ],
)
def test_an_effort_is_told_to_either(effort: Any, thinking: Any, config: Any) -> None:
    conversation = chat(reasoning_effort=effort, max_tokens=9)
    assert body_of(conversation, a_provider()).get("reasoning_effort") == effort
    body = body_of(conversation, a_provider("anthropic"))
    assert (body.get("thinking"), body.get("output_config")) == (thinking, config)
    again = parse_messages(json.dumps(body | {"model": "m"}).encode())
    told = body_of(again, a_provider()).get("reasoning_effort")
    assert told == ("low" if effort == "minimal" else effort)


@pytest.mark.parametrize(
    ("thinking", "config", "effort"),
    [
        ({"type": "disabled"}, None, "none"),
        (ADAPTIVE, None, None),
        (ADAPTIVE | {"display": "summarized"}, {"effort": "high"}, "high"),
        (None, {"effort": "medium"}, "medium"),
        ({"type": "enabled", "budget_tokens": 1024}, None, "low"),
        ({"type": "enabled", "budget_tokens": 4095}, None, "low"),
        ({"type": "enabled", "budget_tokens": 4096}, None, "medium"),
        ({"type": "enabled", "budget_tokens": 8000}, {"effort": "max"}, "max"),
    ],
)
def test_a_wish_of_anthropic_s_is_told_to_either(thinking: Any, config: Any, effort: Any) -> None:
    more = {"thinking": thinking, "output_config": config}
    conversation = message(**more)
    assert body_of(conversation, a_provider()).get("reasoning_effort") == effort
    body = body_of(conversation, a_provider("anthropic"), max_tokens=9_000)
    assert (body.get("thinking"), body.get("output_config")) == (thinking, config)


def test_a_large_budget_is_a_high_effort_and_must_fit_the_answer() -> None:
    wish = {"type": "enabled", "budget_tokens": 16_384}
    conversation = asked({"max_tokens": 20_000, "messages": ASK, "thinking": wish}, "anthropic")
    assert body_of(conversation, a_provider())["reasoning_effort"] == "high"
    with pytest.raises(RefusedError) as caught:
        body_of(conversation, a_provider("anthropic"), max_tokens=16_384)
    assert caught.value.refusal.param == "thinking.budget_tokens"
    assert "16384" in caught.value.refusal.message


def test_a_format_and_an_effort_are_one_field() -> None:
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    conversation = chat(response_format=named, reasoning_effort="low")
    config = body_of(conversation, a_provider("anthropic"))["output_config"]
    assert config["effort"] == "low"
    assert config["format"]["schema"] == SCHEMA


def test_what_has_no_translation_is_refused() -> None:
    wish = {"max_tokens": 9, "messages": ASK, "thinking": {"type": "between_tools"}}
    assert_unasked(wish, a_provider(), "thinking", dialect="anthropic")
    body = body_of(asked(wish, "anthropic"), a_provider("anthropic"))
    assert body["thinking"] == {"type": "between_tools"}
    summarized = response(reasoning={"summary": "concise", "effort": "low"})
    body = body_of(summarized, a_provider("anthropic"))
    assert body["thinking"] == ADAPTIVE | {"display": "summarized"}
    off = response(reasoning={"summary": "concise", "effort": "none"})
    assert body_of(off, a_provider("anthropic"))["thinking"] == {"type": "disabled"}


# Who is told.


TEXT = ThoughtDelta(choice=0, text="hm")
SIGNED = ThoughtDelta(choice=0, text="hm", signature="s")


@pytest.mark.parametrize(
    ("conversation", "text", "signed"),
    [
        (chat(), TEXT, SIGNED),
        (chat(reasoning_effort="low"), TEXT, SIGNED),
        (chat(reasoning_effort="none"), None, None),
        (message(), None, None),
        (message(output_config={"effort": "low"}), None, None),
        (message(thinking=ADAPTIVE), TEXT, SIGNED),
        (
            message(thinking=ADAPTIVE | {"display": "omitted"}),
            None,
            ThoughtDelta(choice=0, signature="s"),
        ),
    ],
)
def test_thinking_is_told_to_who_is_to_hear_it(
    conversation: Conversation, text: Any, signed: Any
) -> None:
    assert told_event(TEXT, conversation) == text
    assert told_event(SIGNED, conversation) == signed
    other = Delta(choice=0, text="a")
    assert told_event(other, conversation) is other
