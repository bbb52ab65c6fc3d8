"""Answers that are forced to call a tool: what the grammar takes is what the parser reads."""

import json
from typing import Any

import pytest

from gateway.toolbox import Tool, Toolbox
from gateway.tools.cursor import Argued, Called
from gateway.tools.forced import FORCED_CALLS_MAX, forced_form, forced_grammar
from gateway.tools.ids import call_id
from gateway.tools.parser import CallParser
from gateway.tools.plan import plan

REFERRING = {
    "type": "object",
    "properties": {
        "x": {"$ref": "#/$defs/T"},
        "self": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        "$ref": {"type": "string"},
        "enum": {"$ref": "#/$defs/T"},
    },
    "$defs": {"T": {"enum": [{"$ref": "#/kept"}]}},
}
F = Tool(name="f", parameters=REFERRING)
G = Tool(name="g")


def a_toolbox(**changes: object) -> Toolbox:
    fields: dict[str, object] = {"tools": (F, G), "callable": (F, G), "mode": "required"}
    return Toolbox(**(fields | changes))


def schema_of(toolbox: Toolbox) -> dict[str, Any]:
    grammar = forced_grammar(toolbox)
    assert grammar is not None
    assert grammar.kind == "json_schema"
    return dict(json.loads(grammar.text))


@pytest.mark.parametrize("toolbox", [None, a_toolbox(mode="auto"), a_toolbox(mode="none")])
def test_nothing_is_forced_that_was_not_asked_for(toolbox: Toolbox | None) -> None:
    assert forced_grammar(toolbox) is None


def test_one_tool_is_forced_by_its_arguments_alone() -> None:
    toolbox = a_toolbox(callable=(F,), parallel=False)
    assert forced_form(toolbox) == "bare"
    assert schema_of(toolbox) == {**REFERRING, "additionalProperties": False}


def test_a_schema_that_is_open_by_its_own_words_stays_so() -> None:
    words: list[dict[str, Any]] = [
        {"additionalProperties": True},
        {"anyOf": [{}]},
        {"patternProperties": {}},
    ]
    for word in words:
        tool = Tool(name="f", parameters=word)
        toolbox = a_toolbox(tools=(tool,), callable=(tool,), parallel=False)
        assert schema_of(toolbox) == {"type": "object", **word}


def test_one_of_several_tools_is_an_object() -> None:
    schema = schema_of(a_toolbox(parallel=False))
    names = [option["properties"]["name"] for option in schema["anyOf"]]
    assert names == [{"const": "f"}, {"const": "g"}]
    assert schema["$defs"]["1"] == {"type": "object", "additionalProperties": False}


def test_several_calls_are_a_list_and_no_more_than_a_few() -> None:
    schema = schema_of(a_toolbox())
    assert (schema["minItems"], schema["maxItems"]) == (1, FORCED_CALLS_MAX)
    assert len(schema["items"]["anyOf"]) == 2


def test_references_move_with_the_schema_and_data_stays() -> None:
    moved = schema_of(a_toolbox())["$defs"]["0"]
    assert moved["properties"]["x"] == {"$ref": "#/$defs/0/$defs/T"}
    assert moved["properties"]["self"]["anyOf"][0] == {"$ref": "#/$defs/0"}
    assert moved["properties"]["$ref"] == {"type": "string"}
    assert moved["properties"]["enum"] == {"$ref": "#/$defs/0/$defs/T"}
    assert moved["$defs"]["T"] == {"enum": [{"$ref": "#/kept"}]}


def test_a_plan_reads_what_is_forced_or_else_the_models_own_form() -> None:
    assert plan(None, "hermes") is None
    assert plan(a_toolbox(mode="none"), "hermes") is None
    auto = plan(a_toolbox(mode="auto", callable=(G,)), "mistral")
    assert auto is not None
    assert (auto.form, auto.names, auto.parallel) == ("mistral", ("g",), True)
    forced = plan(a_toolbox(callable=(G,), parallel=False), "mistral")
    assert forced is not None
    assert forced.form == "bare"
    parser = forced.parser()
    assert isinstance(parser, CallParser)
    assert parser.feed("{}", final=True) == [Called(0, "g"), Argued(0, "{}")]


def test_a_call_is_named_after_its_request() -> None:
    assert call_id("call_", "req_eu_12", choice=3, call=1) == "call_eu_12_3_1"
