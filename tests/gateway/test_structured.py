"""Structured output at the gateway: what reaches a worker, and what costs nothing."""

from typing import Any

import httpx
import pytest

from core.protocol import Grammar
from tests.support.gateway_requests import CHAT, COMPLETIONS, MESSAGES, error_of, post
from tests.support.gateway_world import Caller, World
from tests.support.hostile_grammars import REFUSED
from tests.support.scripted_worker import answers

pytestmark = [pytest.mark.anyio, pytest.mark.services]

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "null"}}}
SCHEMA_TEXT = '{"type":"object","properties":{"b":{"type":"string"},"a":{"type":"null"}}}'

NAMED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}


async def nothing_happened(world: World, caller: Caller) -> None:
    assert world.worker.requests == []
    assert await world.usage(caller) == []
    assert await world.balance(caller) == (0, 0)
    await world.dispatcher_is_empty()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"response_format": NAMED}),
        (CHAT, {"structured_outputs": {"json": SCHEMA_TEXT}}),
        (COMPLETIONS, {"guided_json": SCHEMA}),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ],
)
async def test_a_schema_reaches_the_worker_with_its_properties_in_order(
    world: World, caller: Caller, path: str, fields: dict[str, Any]
) -> None:
    world.worker.default = answers(3)
    response = await post(world, caller, path, **fields)
    assert response.status_code == 200, response.text
    (sent,) = world.worker.requests
    assert sent.sampling.grammar == Grammar(kind="json_schema", text=SCHEMA_TEXT)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"guided_regex": "("}, "guided_regex"),
        (CHAT, {"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
        (COMPLETIONS, {"guided_json": {"not": {}}}, "guided_json"),
        (
            CHAT,
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"$ref": "#"}},
                }
            },
            "response_format.json_schema.schema",
        ),
        (
            MESSAGES,
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "word"}}}},
            "output_config.format.schema",
        ),
        (
            CHAT,
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
                ],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
async def test_a_grammar_that_cannot_be_held_to_costs_nothing(
    world: World, caller: Caller, path: str, fields: dict[str, Any], param: str
) -> None:
    # vllm #18783: an invalid regex ended the engine; it must be 400.
    for stream in (False, True):
        response = await post(world, caller, path, stream=stream, **fields)
        assert response.status_code == 400, response.text
        error = error_of(response)
        assert error["message"].startswith(f"{param}: ")
        assert path == MESSAGES or error["param"] == param
    await nothing_happened(world, caller)


async def test_hostile_schemas_are_refused_before_anything_is_held(
    world: World, caller: Caller
) -> None:
    told: dict[str, httpx.Response] = {}
    for name, (grammar, _) in REFUSED.items():
        if grammar.kind == "json_schema":
            told[name] = await post(world, caller, guided_json=grammar.text)
    assert {name: response.status_code for name, response in told.items()} == dict.fromkeys(
        told, 400
    )
    assert all(error_of(response)["param"] == "guided_json" for response in told.values())
    await nothing_happened(world, caller)
