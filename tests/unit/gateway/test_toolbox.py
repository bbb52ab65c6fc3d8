"""What tools, their names, schemas and calls must look like in either dialect."""

import pytest

from core.errors import RefusedError
from gateway.toolbox import (
    SCHEMA_DEPTH_MAX,
    SCHEMA_VALUES_MAX,
    Tool,
    ToolCall,
    Unanswered,
    checked_id,
    checked_name,
    checked_object,
    checked_schema,
    chosen,
    distinct,
    no_tools,
)

F, G = Tool(name="f"), Tool(name="g")


def nested(depth: int) -> dict[str, object]:
    value: dict[str, object] = {}
    for _ in range(depth - 1):
        value = {"a": value, "b": [1]}
    return value


@pytest.mark.parametrize("name", ["f", "a-b_9", "x" * 128])
def test_a_name_is_letters_digits_underscores_and_dashes(name: str) -> None:
    assert checked_name("p", name) == name


@pytest.mark.parametrize("name", ["", "a b", "é", "x" * 129, "a.b", "f\n", "<|im_end|>"])
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(RefusedError, match="128 letters"):
        checked_name("p", name)


def test_ids_of_others_are_taken() -> None:
    assert checked_id("p", "functions.look:0") == "functions.look:0"
    with pytest.raises(RefusedError, match="256"):
        checked_id("p", "a b")


@pytest.mark.parametrize(
    ("value", "typed", "message"),
    [
        ([], False, "must be an object, got an array"),
        ({"type": "array"}, False, "must be 'object'"),
        ({}, True, "must be 'object'"),
    ],
)
def test_a_schema_is_of_an_object(value: object, *, typed: bool, message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        checked_schema("p", value, typed=typed)


def test_a_schema_may_leave_its_type_out_where_the_dialect_does() -> None:
    assert checked_schema("p", {}, typed=False) == {}
    assert checked_schema("p", {"type": "object"}, typed=True) == {"type": "object"}


def test_depth_is_bounded() -> None:
    assert checked_object("p", nested(SCHEMA_DEPTH_MAX))
    assert checked_object("p", {"a": [[{"b": 1}]]})
    with pytest.raises(RefusedError, match="nested"):
        checked_object("p", nested(SCHEMA_DEPTH_MAX + 1))


def test_size_is_bounded() -> None:
    many = [0] * (SCHEMA_VALUES_MAX - 1)
    assert checked_object("p", {"enum": many})
    with pytest.raises(RefusedError, match="values"):
        checked_object("p", {"enum": [*many, 0]})


def test_names_are_distinct_and_chosen_ones_exist() -> None:
    assert distinct([F, G], "p") == (F, G)
    assert chosen((F, G), ["g"], "p") == (G,)
    with pytest.raises(RefusedError, match="two tools have the name 'f'"):
        distinct([F, G, F], "p")
    with pytest.raises(RefusedError, match="there is no tool 'h'"):
        chosen((F, G), ["g", "h"], "p")
    assert "only allowed when 'tools'" in no_tools("p").refusal.message


def test_every_call_has_one_result_right_after_it() -> None:
    calls = Unanswered()
    calls.settled("p")
    calls.called(ToolCall(id="1", name="f", arguments={}), "p")
    with pytest.raises(RefusedError, match="two tool calls have the id '1'"):
        calls.called(ToolCall(id="1", name="g", arguments={}), "p")
    with pytest.raises(RefusedError, match="no results right after them: '1'"):
        calls.settled("p")
    with pytest.raises(RefusedError, match="'2' is no tool call"):
        calls.answered("2", "p")
    assert calls.answered("1", "p") == "f"
    with pytest.raises(RefusedError, match="'1' is no tool call"):
        calls.answered("1", "p")
    calls.settled("p")
