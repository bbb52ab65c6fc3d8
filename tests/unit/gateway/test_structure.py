"""Structured output as both dialects ask for it: what is understood, what is refused, and where."""

import json

import pytest

from core.errors import RefusedError
from core.protocol import Grammar
from gateway.anthropic import parse_count_tokens, parse_messages
from gateway.anthropic.structure import read_output
from gateway.fields import Fields
from gateway.openai import parse_chat, parse_completion
from gateway.openai.structure import read_structure as read_openai
from gateway.structure import JSON_OBJECT, Structure
from gateway.toolbox import Tool, Toolbox
from gateway.tools.structured import structure_of

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
TEXT = '{"type":"object","properties":{"b":{},"a":{}}}'
ASKED = Structure(JSON_OBJECT, "response_format.type")
READERS = {"openai": read_openai, "anthropic": lambda fields: read_output(fields)[0]}


def read(dialect, body):
    # A copy: what is taken is removed.
    return READERS[dialect](Fields(json.loads(json.dumps(body)), "", index="[{}]"))


def refusal(dialect, body):
    with pytest.raises(RefusedError) as raised:
        read(dialect, body)
    return raised.value.refusal


def a_format(**json_schema):
    return {"response_format": {"type": "json_schema", "json_schema": json_schema}}


@pytest.mark.parametrize(
    ("body", "kind", "text", "param"),
    [
        (
            a_format(name="n", schema=SCHEMA),
            "json_schema",
            TEXT,
            "response_format.json_schema.schema",
        ),
        (
            a_format(name="n", schema=SCHEMA, strict=False, description="d"),
            "json_schema",
            TEXT,
            "response_format.json_schema.schema",
        ),
        (a_format(name="n"), "json_object", "", "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format.type"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", TEXT, "structured_outputs.json"),
        ({"structured_outputs": {"json": TEXT}}, "json_schema", TEXT, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", '["a"]', "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "s"}}, "lark", "s", "structured_outputs.grammar"),
        (
            {"structured_outputs": {"json_object": True, "disable_fallback": False, "regex": None}},
            "json_object",
            "",
            "structured_outputs.json_object",
        ),
        ({"guided_json": SCHEMA}, "json_schema", TEXT, "guided_json"),
        ({"guided_json": TEXT}, "json_schema", TEXT, "guided_json"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"guided_choice": ["é"]}, "choice", '["é"]', "guided_choice"),
        ({"guided_grammar": "s"}, "lark", "s", "guided_grammar"),
    ],
)
def test_openai_and_vllm_ask_in_many_ways(body, kind, text, param):
    assert read("openai", body) == Structure(Grammar(kind=kind, text=text), param)


@pytest.mark.parametrize(
    "body", [{}, {"response_format": None}, {"response_format": {"type": "text"}}]
)
def test_free_text_is_the_default(body):
    assert read("openai", body) is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (a_format(schema=SCHEMA), "response_format.json_schema.name"),
        (a_format(name="a b", schema=SCHEMA), "response_format.json_schema.name"),
        (a_format(name="n", schema=True), "response_format.json_schema.schema"),
        (a_format(name="n", schema=TEXT), "response_format.json_schema.schema"),
        (a_format(name="n", strict="yes"), "response_format.json_schema.strict"),
        (a_format(name="n", other=1), "response_format.json_schema.other"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"json": 1}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": " " * 131_073}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json"),
    ],
)
def test_what_openai_and_vllm_do_not_mean_is_refused_by_name(body, param):
    assert refusal("openai", body).param == param
    assert refusal("openai", body).status == 400


def test_a_schema_as_deep_as_the_stack_is_refused():
    deep: dict = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(RefusedError):
        read_openai(Fields({"guided_json": deep}, "", index="[{}]"))


FORMAT = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"output_config": {"format": FORMAT}}, "output_config.format.schema"),
        ({"output_format": FORMAT}, "output_format.schema"),
        ({"output_format": FORMAT, "output_config": {}}, "output_format.schema"),
    ],
)
def test_anthropic_asks_with_a_schema(body, param):
    assert read("anthropic", body) == Structure(Grammar(kind="json_schema", text=TEXT), param)


@pytest.mark.parametrize("body", [{}, {"output_config": {}}, {"output_config": None}])
def test_anthropic_asks_for_nothing(body):
    assert read("anthropic", body) is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"output_format": {}}, "output_format.type"),
        ({"output_format": {"type": "json_object"}}, "output_format.type"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"output_format": FORMAT | {"name": "n"}}, "output_format.name"),
        ({"output_config": {"effort": "minimal"}}, "output_config.effort"),
        ({"output_config": {"more": 1}}, "output_config.more"),
        ({"output_config": {"format": FORMAT}, "output_format": FORMAT}, "output_format.schema"),
    ],
)
def test_what_anthropic_does_not_mean_is_refused_by_name(body, param):
    assert refusal("anthropic", body).param == param


def a_toolbox(mode):
    tools = (Tool(name="t"),)
    return Toolbox(tools=tools, callable=tools, mode=mode)


def test_a_forced_call_is_a_structure():
    structure = structure_of(None, a_toolbox("required"))
    assert structure is not None
    assert (structure.grammar.kind, structure.param) == ("json_schema", "tools")
    assert structure_of(None, a_toolbox("auto")) is None
    assert structure_of(None, None) is None


def test_a_format_stands_alone_or_beside_tools_that_are_not_called():
    assert structure_of(ASKED, None) == ASKED
    assert structure_of(ASKED, a_toolbox("none")) == ASKED
    for mode in ("required", "auto"):
        with pytest.raises(RefusedError) as raised:
            structure_of(ASKED, a_toolbox(mode))
        assert raised.value.refusal.param == ASKED.param


CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {}}}


def conversation(parser, **body):
    return parser(json.dumps(body).encode())


def test_a_structure_reaches_the_conversation_of_each_endpoint():
    grammar = Grammar(kind="json_schema", text=TEXT)
    chat = conversation(parse_chat, **CHAT, **a_format(name="n", schema=SCHEMA))
    assert (chat.grammar, chat.grammar_param) == (grammar, "response_format.json_schema.schema")
    text = conversation(parse_completion, model="m", prompt="p", guided_json=SCHEMA)
    assert (text.grammar, text.grammar_param) == (grammar, "guided_json")
    asked = CHAT | {"max_tokens": 5, "output_config": {"format": FORMAT}}
    message = conversation(parse_messages, **asked)
    assert (message.grammar, message.grammar_param) == (grammar, "output_config.format.schema")
    del asked["max_tokens"]
    assert conversation(parse_count_tokens, **asked).grammar is None


def test_a_forced_call_names_the_tools():
    chat = conversation(parse_chat, **CHAT, tools=[FUNCTION], tool_choice="required")
    assert chat.grammar is not None
    assert chat.grammar_param == "tools"


def test_free_text_has_no_grammar():
    for free in (
        conversation(parse_chat, **CHAT),
        conversation(parse_completion, model="m", prompt="p"),
        conversation(parse_messages, **CHAT, max_tokens=5),
    ):
        assert (free.grammar, free.grammar_param) == (None, "")
