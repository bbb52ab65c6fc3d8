"""Tools through the gateway: both SDKs, each family's form, forced calls, resumed answers."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import openai
import pytest

from artifacts.manifest import Manifest
from artifacts.pull import pull
from core.money import EndCause
from core.pricing import ListedPrice
from store import registry
from store.prices import seed_prices
from tests.support.anthropic_grammar import check_anthropic_stream
from tests.support.gateway_requests import CHAT, MESSAGES, error_of, post
from tests.support.gateway_world import CONTEXT, MODEL, PRICE, Caller, World, tiny_store, until
from tests.support.openai_grammar import check_openai_chat_stream
from tests.support.scripted_worker import Behaviour, Run, says
from tests.support.tiny_llama import TinyLlama, write_hf
from tests.support.tool_templates import FAMILIES
from text.rules import TextRules
from text.tool_format import DEEPSEEK_CALL, DEEPSEEK_CALL_END, DEEPSEEK_CALLS, DEEPSEEK_SEP

pytestmark = [pytest.mark.anyio, pytest.mark.services]

SCHEMA: Any = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
THEIR_TOOL: Any = {"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}
OTHER_TOOL: Any = {"type": "function", "function": {"name": "other"}}
ASK: Any = [{"role": "user", "content": "Weather?"}]
SAID = (
    *("Well", ".\n<tool", '_call>\n{"name": "weath', 'er", "arguments": {"at": '),
    *('"Bern"}}\n</', "tool_call>"),
)


def openai_client(world: World, caller: Caller) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key=caller.key, base_url=f"{world.url}/v1", max_retries=0)


def anthropic_client(world: World, caller: Caller) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(api_key=caller.key, base_url=world.url, max_retries=0)


def prompt_of(world: World, worker: int = 0) -> str:
    """What the last request asked, control tokens left out."""
    store, manifest = tiny_store()
    rules = TextRules.load(store.directory(manifest.version))
    return rules.decode(world.workers[worker].requests[-1].prompt_ids)


async def test_the_openai_sdk_gets_calls_whole_and_streamed(world: World, caller: Caller) -> None:
    world.worker.default = says(*SAID)
    async with openai_client(world, caller) as client:
        whole: Any = await client.chat.completions.create(model=MODEL, messages=ASK, tools=[TOOL])
        async with client.chat.completions.stream(
            model=MODEL, messages=ASK, tools=[TOOL]
        ) as stream:
            streamed: Any = await stream.get_final_completion()
    for answer in (whole, streamed):
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Well."
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", '{"at": "Bern"}')
        assert call.id.startswith("call_local_")
        assert answer.id.removeprefix("chatcmpl-") in call.id
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(SAID)
    assert '"name": "weather"' in prompt_of(world)
    rows = await world.settled(caller, 2)
    assert [row.cause for row in rows] == [EndCause.COMPLETE] * 2
    assert [row.delivered_tokens for row in rows] == [len(SAID)] * 2


async def test_the_anthropic_sdk_gets_calls_whole_and_streamed(
    world: World, caller: Caller
) -> None:
    world.worker.default = says(*SAID)
    asked: Any = {"model": MODEL, "max_tokens": 50, "messages": ASK, "tools": [THEIR_TOOL]}
    async with anthropic_client(world, caller) as client:
        whole: Any = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
    for answer in (whole, streamed):
        assert answer.stop_reason == "tool_use"
        text, call = answer.content
        assert text.text == "Well."
        assert (call.name, call.input) == ("weather", {"at": "Bern"})
        assert call.id.startswith("toolu_local_")


async def test_a_conversation_about_calls_goes_on(world: World, caller: Caller) -> None:
    """What one answer said is sent back with its result, as both SDKs' users do."""
    model = await serve(world, "hermes")
    world.worker.script = [says(*SAID), says("Rain."), says(*SAID), says("Rain.")]
    async with openai_client(world, caller) as client:
        first: Any = await client.chat.completions.create(model=model, messages=ASK, tools=[TOOL])
        said = first.choices[0].message
        result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "rain"}
        more: Any = [*ASK, said.to_dict(), result]
        second = await client.chat.completions.create(model=model, messages=more, tools=[TOOL])
        assert second.choices[0].message.content == "Rain."
    ours = prompt_of(world)
    assert '<tool_call>\n{"name": "weather", "arguments": {"at": "Bern"}}' in ours
    assert "<tool_response>\nrain\n</tool_response>" in ours
    async with anthropic_client(world, caller) as client:
        asked: Any = {"model": model, "max_tokens": 50, "tools": [THEIR_TOOL]}
        answer: Any = await client.messages.create(messages=ASK, **asked)
        used = {"type": "tool_result", "tool_use_id": answer.content[1].id, "content": "rain"}
        turns: Any = [*ASK, {"role": "assistant", "content": answer.content}]
        turns.append({"role": "user", "content": [used]})
        await client.messages.create(messages=turns, **asked)
    assert prompt_of(world).split("Weather?")[1] == ours.split("Weather?")[1]


async def test_n_choices_each_have_their_own_calls(world: World, caller: Caller) -> None:
    world.worker.default = says(*SAID)
    async with openai_client(world, caller) as client:
        answer: Any = await client.chat.completions.create(
            model=MODEL, messages=ASK, tools=[TOOL], n=2, logprobs=True
        )
    ids = [choice.message.tool_calls[0].id for choice in answer.choices]
    assert len(set(ids)) == 2
    for choice in answer.choices:
        assert choice.message.tool_calls[0].function.arguments == '{"at": "Bern"}'
        assert len(choice.logprobs.content) == len(SAID)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tools": None}, "".join(SAID)),
        ({"tool_choice": "none"}, "".join(SAID)),
        ({"tools": [OTHER_TOOL]}, "".join(SAID)),
    ],
)
async def test_what_calls_no_tool_of_the_request_is_text(
    world: World, caller: Caller, changes: dict[str, Any], text: str
) -> None:
    world.worker.default = says(*SAID)
    answer = await post(world, caller, CHAT, **({"tools": [TOOL]} | changes))
    (choice,) = answer.json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in choice["message"]


async def test_a_call_cut_off_by_length_is_told_as_far_as_it_went(
    world: World, caller: Caller
) -> None:
    world.worker.default = says(*SAID[:4], finish="length")
    answer = await post(world, caller, CHAT, tools=[TOOL])
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"at": '
    theirs = (await post(world, caller, MESSAGES, tools=[THEIR_TOOL])).json()
    assert theirs["stop_reason"] == "max_tokens"
    assert theirs["content"][1]["input"] == {"INVALID_JSON": '{"at": '}


@pytest.mark.parametrize("after", range(1, len(SAID)))
async def test_a_call_goes_on_where_its_replica_died(
    world: World, caller: Caller, after: int
) -> None:
    await world.add_worker()
    await until(lambda: len(world.gateway.routes.replicas("tiny-a@local")) == 2)
    for path, tool in ((CHAT, TOOL), (MESSAGES, THEIR_TOOL)):
        once = dies_once(after)
        for worker in world.workers:
            worker.default = once
        answer = await post(world, caller, path, tools=[tool], stream=True)
        if path == CHAT:
            chat = check_openai_chat_stream(answer.content, include_usage=False)
            assert chat.texts == ["Well."]
            assert [call["arguments"] for call in chat.calls[0]] == ['{"at": "Bern"}']
            assert chat.finishes == ["tool_calls"]
        else:
            message = check_anthropic_stream(answer.content)
            assert [call["input"] for call in message.calls] == ['{"at": "Bern"}']
            assert message.stop_reason == "tool_use"
    assert sum(len(worker.requests) for worker in world.workers) == 4


def dies_once(after: int) -> Behaviour:
    """The first to be asked dies; whoever is asked next goes on."""
    deaths = iter([after])

    async def behaviour(run: Run) -> None:
        said = says(*SAID, dies_after=next(deaths, None))
        assert not isinstance(said, int)
        await said(run)

    return behaviour


# Forced.


@pytest.mark.parametrize(
    ("choice", "answer", "calls"),
    [
        (
            {"type": "function", "function": {"name": "weather"}},
            '{"at": "Bern"}',
            [("weather", '{"at": "Bern"}')],
        ),
        (
            "required",
            '[{"name": "weather", "arguments": {"at": "x"}}, {"name": "other", "arguments": {}}]',
            [("weather", '{"at": "x"}'), ("other", "{}")],
        ),
    ],
)
async def test_a_forced_call_asks_the_worker_for_a_grammar(
    world: World, caller: Caller, choice: Any, answer: str, calls: list[tuple[str, str]]
) -> None:
    model = await serve(world, "hermes")
    world.worker.default = says(*answer)
    tools = [TOOL, OTHER_TOOL]
    found = (await post(world, caller, CHAT, model=model, tools=tools, tool_choice=choice)).json()[
        "choices"
    ][0]
    told = [
        (c["function"]["name"], c["function"]["arguments"]) for c in found["message"]["tool_calls"]
    ]
    assert told == calls
    assert (found["message"]["content"], found["finish_reason"]) == (None, "tool_calls")
    grammar = world.worker.requests[-1].sampling.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"


async def test_a_schema_that_cannot_be_forced_names_the_tools(world: World, caller: Caller) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"a": False}, "required": ["a"]},
        },
    }
    answer = await post(world, caller, CHAT, tools=[tool], tool_choice="required")
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "tools"
    assert world.worker.requests == []


async def test_a_strict_tool_is_held_to_its_schema_when_the_model_decides(
    world: World, caller: Caller
) -> None:
    model = await serve(world, "mistral")
    strict: Any = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    world.worker.default = says("[TOOL_CALLS] [", '{"name": "weather", "arguments": {"at": ""}}]')
    async with (
        openai_client(world, caller) as client,
        client.chat.completions.stream(model=model, messages=ASK, tools=[strict]) as stream,
    ):
        answer: Any = await stream.get_final_completion()
    assert answer.choices[0].message.tool_calls[0].function.parsed_arguments == {"at": ""}
    grammar = world.worker.requests[-1].sampling.grammar
    assert grammar is not None
    assert grammar.kind == "lark"


async def test_a_strict_tool_that_cannot_be_held_to_is_refused(
    world: World, caller: Caller
) -> None:
    model = await serve(world, "deepseek")
    strict: Any = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    answer = await post(world, caller, CHAT, model=model, tools=[strict])
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "tools"
    forced = await post(
        world, caller, CHAT, model=model, tools=[strict], tool_choice="required", max_tokens=5
    )
    assert forced.status_code == 200


# Cache marks and counts.


async def test_cache_marks_reach_the_worker_as_tokens(world: World, caller: Caller) -> None:
    hour = {"type": "ephemeral", "ttl": "1h"}
    body: dict[str, Any] = {
        "tools": [THEIR_TOOL | {"cache_control": hour}],
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "cache_control": {"type": "ephemeral"},
    }
    assert (await post(world, caller, MESSAGES, **body)).status_code == 200
    asked = world.worker.requests[-1]
    first, *rest = asked.cache_marks
    assert first.ttl == "1h"
    assert 0 < first.tokens < len(asked.prompt_ids)
    assert rest[-1].tokens == len(asked.prompt_ids)
    assert (await post(world, caller, MESSAGES)).status_code == 200
    assert world.worker.requests[-1].cache_marks == ()


async def test_counting_counts_tools_as_the_request_does(world: World, caller: Caller) -> None:
    async with anthropic_client(world, caller) as client:
        counted = await client.messages.count_tokens(model=MODEL, messages=ASK, tools=[THEIR_TOOL])
        plain = await client.messages.count_tokens(model=MODEL, messages=ASK)
        answer = await client.messages.create(
            model=MODEL, max_tokens=5, messages=ASK, tools=[THEIR_TOOL]
        )
    assert counted.input_tokens == answer.usage.input_tokens > plain.input_tokens + 20


# Families.

FORMS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"at": "Bern"}}\n</tool_call>',
    "llama": '{"name": "weather", "parameters": {"at": "Bern"}}',
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"at": "Bern"}}]',
    "deepseek": (
        f'{DEEPSEEK_CALLS}{DEEPSEEK_CALL}weather{DEEPSEEK_SEP}{{"at": "Bern"}}{DEEPSEEK_CALL_END}'
    ),
}


@functools.cache
def family_model(family: str) -> Manifest:
    """A tiny model with the family's template, in the store of the world's."""
    store, _ = tiny_store()
    source = Path(tempfile.mkdtemp(prefix="headworks-family-"))
    write_hf(source, TinyLlama(context=CONTEXT), template=FAMILIES[family])
    return pull(str(source), store, name=f"tiny-{family}")


async def serve(world: World, family: str) -> str:
    manifest, name = family_model(family), f"tiny-{family}"
    price = msgspec.structs.replace(PRICE, id=f"{name}-1")
    async with world.postgres.transaction() as conn:
        await registry.register_version(
            conn,
            version=manifest.version,
            model=name,
            family=manifest.family,
            context_tokens=manifest.context_tokens,
            state=registry.VersionState.READY,
            manifest={"name": name},
        )
        await seed_prices(conn, [ListedPrice(model=name, effective_ms=0, price=price)])
        await registry.create_deployment(
            conn, name=f"{name}-a", version=manifest.version, region="local"
        )
        await registry.put_route(conn, model=name, deployment=f"{name}-a", max_output_tokens=0)
    await world.register(world.worker, deployment=f"{name}-a", version=manifest.version)
    await until(lambda: name in world.names)
    await until(lambda: world.gateway.routes.replicas(f"{name}-a@local"))
    return name


@pytest.mark.parametrize("family", FORMS)
async def test_every_family_s_calls_are_read(world: World, caller: Caller, family: str) -> None:
    model = await serve(world, family)
    world.worker.default = says(*FORMS[family])
    answer = await post(world, caller, CHAT, model=model, tools=[TOOL], stream=True)
    chat = check_openai_chat_stream(answer.content, include_usage=False)
    assert chat.texts == [""]
    assert [(c["name"], json.loads(c["arguments"])) for c in chat.calls[0]] == [
        ("weather", {"at": "Bern"})
    ]
    assert chat.finishes == ["tool_calls"]
