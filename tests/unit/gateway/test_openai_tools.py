"""Tools, calls and results in a chat request."""

import json

import pytest

from core.errors import Code, RefusedError
from gateway.conversation import Conversation, Turn
from gateway.openai import parse_chat
from gateway.toolbox import CALLS_MAX, TOOLS_MAX, Tool, Toolbox, ToolCall

USER = {"role": "user", "content": "Weather?"}
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}
ONE = Tool(name="weather", description="Tells it.", parameters=SCHEMA)
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"at": "Bern"}'},
}
ASKED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}


def tool(**changes: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": "f"} | changes}


def named(name: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: object, *names: str) -> dict[str, object]:
    tools = [named(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def parse(**changes: object) -> Conversation:
    body: dict[str, object] = {"model": "m", "messages": [USER]} | changes
    return parse_chat(json.dumps(body).encode())


def toolbox(**changes: object) -> Toolbox:
    found = parse(**changes).toolbox
    assert found is not None
    return found


def test_a_tool_is_read_as_its_caller_wrote_it() -> None:
    found = toolbox(tools=[{"type": "function", "function": WEATHER | {"strict": False}}])
    assert found == Toolbox(tools=(ONE,), callable=(ONE,))


def test_a_tool_needs_no_more_than_a_name() -> None:
    assert toolbox(tools=[tool()]).tools == (Tool(name="f"),)
    assert toolbox(tools=[tool(parameters=None, description=None)]).tools == (Tool(name="f"),)


def test_a_strict_tool_is_noted() -> None:
    found = toolbox(tools=[tool(strict=True), tool(name="g")])
    assert [each.strict for each in found.tools] == [True, False]


@pytest.mark.parametrize("choice", [None, "auto"])
def test_calls_are_the_models_choice_unless_said_otherwise(choice: object) -> None:
    conversation = parse(tools=[tool()], tool_choice=choice)
    assert conversation.toolbox is not None
    assert (conversation.toolbox.mode, conversation.toolbox.parallel) == ("auto", True)
    assert conversation.grammar is None


def test_calls_may_be_forbidden_or_required() -> None:
    assert toolbox(tools=[tool()], tool_choice="none").mode == "none"
    required = parse(tools=[tool()], tool_choice="required")
    assert required.toolbox is not None
    assert required.toolbox.mode == "required"
    assert required.grammar is not None
    assert '"minItems":1' in required.grammar.text


def test_a_named_tool_is_called_once() -> None:
    conversation = parse(tools=[tool(), tool(name="g")], tool_choice=named("g"))
    assert conversation.toolbox is not None
    assert conversation.toolbox.callable == (Tool(name="g"),)
    assert (conversation.toolbox.mode, conversation.toolbox.parallel) == ("required", False)
    assert conversation.grammar is not None
    assert conversation.grammar.text == '{"type":"object","additionalProperties":false}'


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_a_part_of_those_told(mode: str) -> None:
    tools = [tool(), tool(name="g"), tool(name="h")]
    found = toolbox(tools=tools, tool_choice=allowed(mode, "h", "f"))
    assert [each.name for each in found.tools] == ["f", "g", "h"]
    assert [each.name for each in found.callable] == ["f", "h"]
    assert found.mode == mode


def test_one_call_at_a_time_may_be_asked_for() -> None:
    assert not toolbox(tools=[tool()], parallel_tool_calls=False).parallel


@pytest.mark.parametrize("choice", [None, "none", "auto"])
@pytest.mark.parametrize("tools", [None, []])
def test_no_tools_are_no_toolbox(choice: object, tools: object) -> None:
    assert parse(tools=tools, tool_choice=choice, parallel_tool_calls=True) == parse()


def test_calls_and_results_are_turns() -> None:
    more = {"role": "user", "content": "So?"}
    part = {"type": "text", "text": "rain"}
    arguments = {"at": "Bern"}
    call = ToolCall(id="call_1", name="weather", arguments=arguments)
    result = Turn(role="tool", content="rain", call_id="call_1", tool="weather")
    empty: list[object] = [None, "", []]
    for content in empty:
        asked = ASKED | {"content": content}
        turns = parse(messages=[USER, asked, RESULT, more]).turns
        assert turns[1] == Turn(role="assistant", content="", calls=(call,))
        assert turns[2] == result
    said = parse(
        messages=[USER, ASKED | {"content": "Hm."}, RESULT | {"content": [part], "name": "x"}]
    )
    assert said.turns[1].content == "Hm."
    assert said.turns[2] == result


def test_an_empty_result_and_empty_arguments_are_taken() -> None:
    call = {**CALL, "index": 0, "function": {"name": "weather", "arguments": ""}}
    turns = parse(messages=[USER, ASKED | {"tool_calls": [call]}, RESULT | {"content": ""}]).turns
    assert turns[1].calls[0].arguments == {}
    assert turns[2].content == ""


def call(**changes: object) -> list[object]:
    return [USER, ASKED | {"tool_calls": [CALL | changes]}, RESULT]


def function(**changes: object) -> list[object]:
    return call(function={"name": "weather", "arguments": "{}"} | changes)


BAD = [
    ({"tools": "x"}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [tool(name=f"f{i}") for i in range(TOOLS_MAX + 1)]}, "tools"),
    ({"tools": [{}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [tool(name=None)]}, "tools[0].function.name"),
    ({"tools": [tool(name="a b")]}, "tools[0].function.name"),
    ({"tools": [tool(description=5)]}, "tools[0].function.description"),
    ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters.type"),
    ({"tools": [tool(strict=1)]}, "tools[0].function.strict"),
    ({"tools": [tool(mood=1)]}, "tools[0].function.mood"),
    ({"tools": [tool() | {"mood": 1}]}, "tools[0].mood"),
    ({"tools": [tool(), tool()]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": named("f")}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": 5}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": {}}, "tool_choice.type"),
    ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": [tool()], "tool_choice": named("g")}, "tool_choice.function.name"),
    ({"tools": [tool()], "tool_choice": named("f") | {"mood": 1}}, "tool_choice.mood"),
    ({"tools": [tool()], "tool_choice": allowed(None, "f")}, "tool_choice.allowed_tools.mode"),
    ({"tools": [tool()], "tool_choice": allowed("none", "f")}, "tool_choice.allowed_tools.mode"),
    ({"tools": [tool()], "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
    ({"tools": [tool()], "tool_choice": allowed("auto", "g")}, "tool_choice.allowed_tools.tools"),
    ({"messages": [USER, RESULT]}, "messages[1].tool_call_id"),
    ({"messages": [USER, ASKED]}, "messages"),
    ({"messages": [USER, ASKED, USER]}, "messages[2].role"),
    ({"messages": [USER, ASKED, ASKED]}, "messages[2].role"),
    ({"messages": [USER, ASKED, RESULT, RESULT]}, "messages[3].tool_call_id"),
    (
        {"messages": [USER, ASKED, {"role": "tool", "content": "x"}]},
        "messages[2].tool_call_id",
    ),
    ({"messages": [USER, ASKED, RESULT | {"content": None}]}, "messages[2].content"),
    ({"messages": [USER, ASKED, RESULT | {"mood": 1}]}, "messages[2].mood"),
    ({"messages": [USER, ASKED | {"tool_calls": [CALL, CALL]}]}, "messages[1].tool_calls"),
    ({"messages": [ASKED | {"tool_calls": [CALL] * (CALLS_MAX + 1)}]}, "messages[0].tool_calls"),
    ({"messages": call(id=None)}, "messages[1].tool_calls[0].id"),
    ({"messages": call(id="a b")}, "messages[1].tool_calls[0].id"),
    ({"messages": call(type=None)}, "messages[1].tool_calls[0].type"),
    ({"messages": call(mood=1)}, "messages[1].tool_calls[0].mood"),
    ({"messages": function(name="é")}, "messages[1].tool_calls[0].function.name"),
    ({"messages": function(mood=1)}, "messages[1].tool_calls[0].function.mood"),
    ({"messages": function(arguments=None)}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": function(arguments="{")}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": function(arguments="[]")}, "messages[1].tool_calls[0].function.arguments"),
    (
        {"messages": function(arguments='{"a":' + "[" * 99 + "]" * 99 + "}")},
        "messages[1].tool_calls[0].function.arguments",
    ),
    ({"messages": [USER | {"tool_calls": [CALL]}]}, "messages[0].tool_calls"),
]

UNSUPPORTED = [
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [tool()], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"messages": call(type="custom")}, "messages[1].tool_calls[0].type"),
    (
        {"tools": [tool()], "tool_choice": allowed("auto", "f") | {"type": "function"}},
        "tool_choice.type",
    ),
]


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [(c, Code.UNSUPPORTED, p) for c, p in UNSUPPORTED] + [(c, Code.BAD_REQUEST, p) for c, p in BAD],
)
def test_a_bad_value_is_refused_by_name(changes: dict[str, object], code: Code, param: str) -> None:
    with pytest.raises(RefusedError) as caught:
        parse(**changes)
    refusal = caught.value.refusal
    assert (refusal.code, refusal.status, refusal.param) == (code, 400, param)
    assert param in refusal.message
