"""Tools, calls, results and cache marks in a message request."""

import json

import pytest

from core.errors import Code, RefusedError
from gateway.anthropic import parse_count_tokens, parse_messages
from gateway.conversation import CacheBreak, Conversation, Turn
from gateway.toolbox import TOOLS_MAX, Tool, Toolbox, ToolCall

USER = {"role": "user", "content": "Weather?"}
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}
ONE = Tool(name="weather", description="Tells it.", parameters=SCHEMA)
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"at": "Bern"}}
CALL = ToolCall(id="toolu_1", name="weather", arguments={"at": "Bern"})
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}
MARK = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


def text(said: str, **more: object) -> dict[str, object]:
    return {"type": "text", "text": said, **more}


def user(*blocks: object) -> dict[str, object]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: object) -> dict[str, object]:
    return {"role": "assistant", "content": list(blocks)}


def parse(**changes: object) -> Conversation:
    body: dict[str, object] = {"model": "m", "max_tokens": 5, "messages": [USER]} | changes
    return parse_messages(json.dumps(body).encode())


def toolbox(**changes: object) -> Toolbox:
    found = parse(**({"tools": [WEATHER]} | changes)).toolbox
    assert found is not None
    return found


def test_a_tool_is_read_as_its_caller_wrote_it() -> None:
    for more in ({}, {"type": "custom", "eager_input_streaming": True, "strict": False}):
        assert toolbox(tools=[WEATHER | more]) == Toolbox(tools=(ONE,), callable=(ONE,))
    assert toolbox(tools=[WEATHER | {"strict": True}]).tools[0].strict


@pytest.mark.parametrize(
    ("choice", "mode", "parallel"),
    [
        (None, "auto", True),
        ({"type": "auto"}, "auto", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any"}, "required", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "weather"}, "required", False),
        ({"type": "none"}, "none", False),
    ],
)
def test_a_choice_says_whether_tools_are_called(
    choice: object, mode: str, *, parallel: bool
) -> None:
    conversation = parse(tools=[WEATHER], tool_choice=choice)
    assert conversation.toolbox is not None
    assert (conversation.toolbox.mode, conversation.toolbox.parallel) == (mode, parallel)
    assert (conversation.grammar is not None) == (mode == "required")


def test_a_named_tool_alone_may_be_called() -> None:
    other = {"name": "other", "input_schema": {"type": "object"}}
    found = toolbox(tools=[WEATHER, other], tool_choice={"type": "tool", "name": "other"})
    assert [tool.name for tool in found.callable] == ["other"]
    assert len(found.tools) == 2


def test_calls_and_results_are_turns() -> None:
    use = USE | {"id": "toolu_2"}
    failed = {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True}
    turns = parse(
        messages=[
            USER,
            assistant(text("Hm."), USE, use, text("So.")),
            user(RESULT | {"content": [text("rain"), text("sun")]}, failed, text("Well?")),
            user(text("Now.")),
        ]
    ).turns
    assert turns[1] == Turn(
        role="assistant",
        content="Hm.\nSo.",
        calls=(CALL, ToolCall(id="toolu_2", name="weather", arguments={"at": "Bern"})),
    )
    assert turns[2:] == (
        Turn(role="tool", content="rain\nsun", call_id="toolu_1", tool="weather"),
        Turn(role="tool", content="Error", call_id="toolu_2", tool="weather"),
        Turn(role="user", content="Well?\nNow."),
    )


def test_a_result_may_be_empty_or_an_error_and_end_the_request() -> None:
    empty: list[object] = [None, "", []]
    for content in empty:
        last = parse(messages=[USER, assistant(USE), user(RESULT | {"content": content})]).turns[-1]
        assert last.content == ""
    failed = RESULT | {"is_error": True}
    assert parse(messages=[USER, assistant(USE), user(failed)]).turns[-1].content == "Error: rain"
    bare = RESULT | {"content": [text("")]}
    assert parse(messages=[USER, assistant(USE), user(bare)]).turns[-1].content == ""


def test_a_call_that_was_told_may_be_sent_back_as_it_came() -> None:
    sent = USE | {"caller": {"type": "direct"}, "cache_control": None}
    assert parse(messages=[USER, assistant(sent), user(RESULT)]).turns[1].calls == (CALL,)


def test_counting_reads_tools_as_well() -> None:
    body = {"model": "m", "messages": [USER], "tools": [WEATHER], "tool_choice": {"type": "any"}}
    counted = parse_count_tokens(json.dumps(body).encode())
    assert counted.toolbox is not None
    assert counted.toolbox.tools == (ONE,)


# Cache marks.


def breaks(**changes: object) -> tuple[CacheBreak, ...]:
    return parse(**changes).cache_breaks


def test_marks_are_places_in_the_prompt() -> None:
    other = {"name": "other", "input_schema": {"type": "object"}, "cache_control": HOUR}
    found = breaks(
        tools=[WEATHER, other],
        system=[text("Be"), text("brief.", cache_control=HOUR)],
        messages=[
            user(text("Weather?", cache_control=MARK), text("Now!")),
            assistant(text("Hm."), USE | {"cache_control": {"type": "ephemeral", "ttl": "5m"}}),
            user(RESULT),
        ],
    )
    assert found == (
        CacheBreak(ttl="1h", tools=2),
        CacheBreak(ttl="1h", turns=1, chars=9),
        CacheBreak(ttl="5m", turns=2, chars=8),
        CacheBreak(ttl="5m", turns=3, chars=3, calls=1),
    )


def test_a_mark_on_a_result_is_after_it() -> None:
    found = breaks(messages=[USER, assistant(USE), user(RESULT | {"cache_control": MARK})])
    assert found == (CacheBreak(ttl="5m", turns=3, chars=4),)


def test_a_mark_on_the_request_is_at_its_end() -> None:
    assert breaks(cache_control=HOUR) == (CacheBreak(ttl="1h", turns=1, chars=8),)


def use(**changes: object) -> list[object]:
    return [USER, assistant(USE | changes), user(RESULT)]


def control(control: object) -> dict[str, object]:
    return {"messages": [user(text("x", cache_control=control))]}


FOUR = [text(str(i), cache_control=MARK) for i in range(4)]

BAD = [
    ({"tools": [WEATHER] * 2}, "tools"),
    ({"tools": [WEATHER | {"name": f"f{i}"} for i in range(TOOLS_MAX + 1)]}, "tools"),
    ({"tools": [{"input_schema": SCHEMA}]}, "tools.0.name"),
    ({"tools": [WEATHER | {"name": "a b"}]}, "tools.0.name"),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
    ({"tools": [WEATHER | {"input_schema": []}]}, "tools.0.input_schema"),
    ({"tools": [WEATHER | {"input_schema": {}}]}, "tools.0.input_schema.type"),
    ({"tools": [WEATHER | {"strict": 1}]}, "tools.0.strict"),
    ({"tools": [WEATHER | {"mood": 1}]}, "tools.0.mood"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {}}, "tool_choice.type"),
    ({"tools": [WEATHER], "tool_choice": {"type": "required"}}, "tool_choice.type"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "auto", "name": "x"}}, "tool_choice.name"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "none", "disable_parallel_tool_use": True}},
        "tool_choice.disable_parallel_tool_use",
    ),
    ({"messages": [user(RESULT)]}, "messages.0.content.0.tool_use_id"),
    ({"messages": [USER, assistant(USE), USER]}, "messages.2.content"),
    ({"messages": [USER, assistant(USE), assistant(USE)]}, "messages.2.role"),
    ({"messages": [USER, assistant(USE, USE)]}, "messages.1.content.1.id"),
    (
        {"messages": [USER, assistant(USE), user(text("x"), RESULT)]},
        "messages.2.content.0.text",
    ),
    (
        {"messages": [USER, assistant(USE), user(RESULT, RESULT)]},
        "messages.2.content.1.tool_use_id",
    ),
    (
        {"messages": [USER, assistant(USE, USE | {"id": "toolu_2"}), user(RESULT)]},
        "messages",
    ),
    ({"messages": use(id=None)}, "messages.1.content.0.id"),
    ({"messages": use(id="a b")}, "messages.1.content.0.id"),
    ({"messages": use(name="a b")}, "messages.1.content.0.name"),
    ({"messages": use(input=None)}, "messages.1.content.0.input"),
    ({"messages": use(input="{}")}, "messages.1.content.0.input"),
    ({"messages": use(mood=1)}, "messages.1.content.0.mood"),
    (
        {"messages": [USER, assistant(USE), user(RESULT | {"is_error": "yes"})]},
        "messages.2.content.0.is_error",
    ),
    (
        {"messages": [USER, assistant(USE), user(RESULT | {"content": [text("x", mood=1)]})]},
        "messages.2.content.0.content.0.mood",
    ),
    (control({}), "messages.0.content.0.cache_control.type"),
    (control({"type": "persistent"}), "messages.0.content.0.cache_control.type"),
    (control(MARK | {"ttl": "2h"}), "messages.0.content.0.cache_control.ttl"),
    (control(MARK | {"mood": 1}), "messages.0.content.0.cache_control.mood"),
    ({"messages": [user(*FOUR, FOUR[0])]}, "messages.0.content.4.cache_control"),
    ({"messages": [user(*FOUR)], "cache_control": MARK}, "cache_control"),
    (
        {"messages": [user(FOUR[0], text("x", cache_control=HOUR))]},
        "messages.0.content.1.cache_control",
    ),
    (
        {"tools": [WEATHER | {"cache_control": MARK}], "system": [text("x", cache_control=HOUR)]},
        "system.0.cache_control",
    ),
]

UNSUPPORTED = [
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
    ({"tools": [WEATHER | {"input_examples": [{}]}]}, "tools.0.input_examples"),
    ({"messages": [user(USE)]}, "messages.0.content.0.type"),
    ({"messages": [USER, assistant(RESULT)]}, "messages.1.content.0.type"),
    ({"system": [RESULT]}, "system.0.type"),
    (
        {"messages": [USER, assistant(USE), user(RESULT | {"content": [{"type": "document"}]})]},
        "messages.2.content.0.content.0.type",
    ),
    (
        {
            "messages": [
                USER,
                assistant(USE),
                user(RESULT | {"content": [text("x", cache_control=MARK)]}),
            ]
        },
        "messages.2.content.0.content.0.cache_control",
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
    assert refusal.message.startswith(f"{param}: ")
