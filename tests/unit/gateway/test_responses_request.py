"""Responses requests: what is understood, what is put together, and what is refused by name."""

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import Code, Refusal, RefusedError, refuse
from gateway.conversation import Conversation, Turn
from gateway.fields import Fields
from gateway.items import CallItem, Item, MessageItem, ResultItem
from gateway.responses import (
    beginnings,
    begun_at,
    continued,
    is_too_long,
    named,
    parse_input_tokens,
    parse_response,
    room_for,
)
from gateway.responses.items import item_json, read_items, turns_of

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
OTHER = {"type": "function", "name": "g"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a":1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "wet"}


def parse(**changes: Any) -> Conversation:
    body: dict[str, Any] = {"model": "m", "input": "Hi"} | changes
    return parse_response(json.dumps(body).encode())


def turns(*items: Any, **changes: Any) -> tuple[Turn, ...]:
    return continued(parse(input=list(items), **changes), ()).turns


def refused(**changes: Any) -> Refusal:
    with pytest.raises(RefusedError) as error:
        continued(parse(**changes), ())
    return error.value.refusal


def message(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


def test_a_string_is_what_the_user_says() -> None:
    conversation = continued(parse(instructions="Be brief."), ())
    assert conversation.turns == (
        Turn(role="system", content="Be brief."),
        Turn(role="user", content="Hi"),
    )
    assert conversation.ask is not None
    assert conversation.ask.keep


def test_what_came_before_stands_between_the_instructions_and_the_input() -> None:
    before = (MessageItem(role="user", parts=("A",)), MessageItem(role="assistant", parts=("B",)))
    made = continued(parse(instructions="New."), before)
    assert [turn.content for turn in made.turns] == ["New.", "A", "B", "Hi"]


def test_an_answer_s_texts_and_calls_are_one_turn_and_results_follow_it() -> None:
    again = {**CALL, "call_id": "c2", "arguments": ""}
    said = turns(
        message("Weather?"),
        message("Well.", "assistant"),
        CALL,
        again,
        RESULT,
        {**RESULT, "call_id": "c2", "output": [{"type": "input_text", "text": "dry"}]},
        message("So?"),
    )
    assert [turn.role for turn in said] == ["user", "assistant", "tool", "tool", "user"]
    assert said[1].content == "Well."
    assert [call.arguments for call in said[1].calls] == [{"a": 1}, {}]
    assert [turn.content for turn in said[2:4]] == ["wet", "dry"]
    assert said[2].tool == "f"


def test_text_after_a_call_is_of_the_same_answer() -> None:
    (_, answer, _) = turns(message("Q"), CALL, message("Done.", "assistant"), RESULT)
    assert (answer.content, len(answer.calls)) == ("Done.", 1)


def test_developers_speak_as_the_system() -> None:
    assert turns(message("Rule", "developer"), message("Q"))[0].role == "system"


def test_an_answer_of_ours_passes_as_it_came() -> None:
    items: tuple[Item, ...] = (
        MessageItem(id="msg_1", role="assistant", parts=("Well.",), whole=False),
        CallItem(id="fc_1", call_id="c1", name="f", arguments="{}"),
        ResultItem(id="out_1", call_id="c1", output=""),
    )
    told = [item_json(item) for item in items]
    assert read_items(Fields({"input": told}, "", index="[{}]")) == items


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([], "input"),
        ([{"type": "reasoning", "id": "r", "summary": [{"more": 1}]}], "input[0].summary[0].more"),
        ([{"type": "item_reference", "id": "x"}], "input[0].type"),
        ([{"type": "web_search_call", "id": "x"}], "input[0].type"),
        ([{"role": "tool", "content": "x"}], "input[0].role"),
        ([{"content": "x"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": ""}], "input[0].content"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"role": "system", "content": [{"type": "input_image"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": "x", "phase": "later"}], "input[0].phase"),
        ([{"role": "user", "content": "x", "more": 1}], "input[0].more"),
        ([{**CALL, "call_id": "bad id"}], "input[0].call_id"),
        ([{**CALL, "arguments": "{"}], "input[0].arguments"),
        ([{**CALL, "arguments": "[]"}], "input[0].arguments"),
        ([{**CALL, "arguments": None}], "input[0].arguments"),
        ([{**CALL, "async": True}], "input[0].async"),
        ([{**CALL, "id": "bad id"}], "input[0].id"),
        ([{**CALL, "status": "lost"}], "input[0].status"),
        ([{**RESULT, "output": None}, CALL], "input"),
        ([RESULT], "input"),
        ([CALL], "input"),
        ([CALL, message("Never mind")], "input"),
        ([CALL, CALL], "input"),
        ([CALL, {**CALL, "call_id": "c2"}, RESULT, message("x", "assistant")], "input"),
    ],
)
def test_a_bad_item_is_refused_by_name(items: list[Any], param: str) -> None:
    assert refused(input=items).param == param


def test_an_answer_has_a_bound_of_calls() -> None:
    calls = [CallItem(call_id=f"c{i}", name="f", arguments="{}") for i in range(129)]
    with pytest.raises(RefusedError) as error:
        turns_of(None, calls)
    assert "128" in error.value.refusal.message


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": None}, "input"),
        ({"model": None}, "model"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"include": ["message.output_text.logprobs"], "tools": [TOOL]}, "include"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"more": 1}}, "stream_options.more"),
        ({"reasoning": {"effort": "most"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"reasoning": {"more": 1}}, "reasoning.more"),
        ({"truncation": "maybe"}, "truncation"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"metadata": []}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"metadata": {"k": None}}, "metadata.k"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"metadata": {str(i): "v" for i in range(17)}}, "metadata"),
        ({"previous_response_id": "x" * 257}, "previous_response_id"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"timeout": 0}, "timeout"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"more": 1}}, "text.more"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "else"}}}, "text.format.type"),
        ({"text": {"format": {"type": "text", "more": 1}}}, "text.format.more"),
        ({"text": {"format": {"type": "json_schema", "name": "a b"}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "async": True}]}, "tools[0].async"),
        ({"tools": [{**TOOL, "more": 1}]}, "tools[0].more"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": 1}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "h"}}, "tool_choice.name"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f", "more": 1}},
            "tool_choice.more",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [TOOL]}},
            "tool_choice.mode",
        ),
        (
            {
                "tools": [TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "mcp"}],
                },
            },
            "tool_choice.tools[0].type",
        ),
    ],
)
def test_a_bad_value_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    assert refused(**changes).param == param


def test_a_tool_is_chosen_as_in_chat() -> None:
    one = parse(tools=[TOOL, OTHER], tool_choice={"type": "function", "name": "g"}).toolbox
    assert one is not None
    assert (one.mode, [tool.name for tool in one.callable], one.parallel) == (
        "required",
        ["g"],
        False,
    )
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "f"}],
    }
    some = parse(tools=[TOOL, OTHER], tool_choice=allowed).toolbox
    assert some is not None
    assert (some.mode, [tool.name for tool in some.callable]) == ("auto", ["f"])
    none = parse(tools=[TOOL], tool_choice="none").toolbox
    assert none is not None
    assert none.mode == "none"


def test_a_schema_is_told_back_as_it_was_asked_for() -> None:
    asked = {"type": "json_schema", "name": "s", "schema": {"type": "object"}, "strict": True}
    conversation = parse(text={"format": asked, "verbosity": "medium"})
    assert conversation.grammar is not None
    assert conversation.grammar_param == "text.format.schema"
    assert conversation.ask is not None
    assert conversation.ask.shown["text"] == {"format": {**asked, "description": None}}
    plain = parse(text={})
    assert plain.ask is not None
    assert plain.ask.shown["text"] == {"format": {"type": "text"}}
    assert parse(text={"format": {"type": "text"}}).grammar is None
    held = parse(text={"format": {"type": "json_object"}}).grammar
    assert held is not None
    assert held.kind == "json_object"


def test_a_count_reads_what_a_request_reads_of_the_prompt() -> None:
    body = {"model": "m", "input": [message("Q")], "instructions": "I", "tools": [TOOL]}
    counted = continued(parse_input_tokens(json.dumps(body).encode()), ())
    asked = continued(parse(**body), ())
    assert (counted.turns, counted.toolbox) == (asked.turns, asked.toolbox)
    with pytest.raises(RefusedError) as error:
        parse_input_tokens(json.dumps({**body, "temperature": 1}).encode())
    assert error.value.refusal.code is Code.BAD_REQUEST


def test_items_are_named_once() -> None:
    items = (MessageItem(role="user", parts=("A",)), ResultItem(id="mine", call_id="c", output=""))
    once = named(items, "resp_x")
    assert [item.id for item in once] == ["item_x_0", "mine"]
    assert named(once, "resp_y") == once


texts = st.text(min_size=1, max_size=5)
said = st.builds(
    MessageItem, role=st.sampled_from(["user", "assistant", "system"]), parts=st.tuples(texts)
)


@given(before=st.lists(said, max_size=6), after=st.lists(said, min_size=1, max_size=4))
def test_nothing_that_was_said_is_lost_or_moved(
    before: list[MessageItem], after: list[MessageItem]
) -> None:
    items = [*before, *after]
    made = turns_of("I", items)
    assert "\n".join(turn.content for turn in made) == "\n".join(
        ["I", *(str(item.parts[0]) for item in items)]
    )
    pairs = [(a.role, b.role) for a, b in pairwise(made)]
    assert ("assistant", "assistant") not in pairs


@given(
    roles=st.lists(st.sampled_from(["user", "assistant"]), min_size=1, max_size=8),
    system=st.booleans(),
)
def test_whatever_is_left_out_is_the_oldest_and_ends_before_what_a_user_says(
    roles: list[Any], *, system: bool
) -> None:
    said = [MessageItem(role=role, parts=(f"{i}",)) for i, role in enumerate(roles)]
    whole = msgspec.structs.replace(parse(), turns=turns_of("I" if system else None, said))
    places = beginnings(whole)
    assert begun_at(whole, places[0]) == whole
    for place in places[1:]:
        left = begun_at(whole, place).turns
        assert left[system:] == whole.turns[place:]
        assert left[system].role == "user"
        assert (left[0].content == "I") is system


def test_only_the_system_s_words_leave_nothing_to_leave_out() -> None:
    lonely = msgspec.structs.replace(
        parse(), turns=(Turn(role="system", content="A"), Turn(role="system", content="B"))
    )
    assert beginnings(lonely) == (1,)
    assert begun_at(lonely, 1) == lonely


def test_an_answer_s_room_is_kept_free() -> None:
    assert room_for(1000, None) == 750
    assert room_for(1000, 100) == 900
    assert room_for(1000, 5000) == 500
    long, other = refuse(Code.CONTEXT_LENGTH, "x"), refuse(Code.BAD_REQUEST, "x")
    assert is_too_long(long)
    assert not is_too_long(other)
