"""Thinking through a real gateway, with the official SDKs: asked for, told, sent back, metered."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from core.safety.policy import Terms
from tests.gateway.test_providers import HOUSE, KEYS, lead_to
from tests.gateway.test_safety import a_caller as a_screened_caller
from tests.gateway.test_safety import a_rule
from tests.support.both_sdks import SDKs
from tests.support.gateway_requests import CHAT, MESSAGES, a_body, headers_of
from tests.support.gateway_world import MODEL, Caller, World, a_world
from tests.support.provider_server import ProviderServer
from tests.support.scripted_worker import says
from tests.support.thinking_answers import (
    OUTPUT_TOKENS,
    REASONING_TOKENS,
    SAID,
    SEALED,
    SIGNATURE,
    THOUGHT,
    thinking,
)

pytestmark = [pytest.mark.anyio, pytest.mark.services]

ASK: Any = [{"role": "user", "content": "What is the capital of France?"}]
ADAPTIVE: Any = {"type": "adaptive"}
TOOL: Any = {"name": "look", "input_schema": {"type": "object"}}
INCLUDE: Any = ["reasoning.encrypted_content"]


@pytest.fixture
async def world(postgres_url: str, valkey_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with a_world(postgres_url, valkey_url, tmp_path, provider_keys=KEYS) as made:
        yield made


@pytest.fixture
async def sdks(world: World, caller: Caller) -> AsyncIterator[SDKs]:
    async with SDKs(world, caller) as made:
        yield made


@pytest.fixture
async def server() -> AsyncIterator[ProviderServer]:
    async with ProviderServer(thinking) as made:
        yield made


async def chat(sdks: SDKs, **more: Any) -> tuple[str, str]:
    answer = await sdks.openai.chat.completions.create(model=HOUSE, messages=ASK, **more)
    message = answer.choices[0].message
    return getattr(message, "reasoning_content", ""), message.content or ""


async def chat_streamed(sdks: SDKs, **more: Any) -> tuple[str, str]:
    thought = said = ""
    async for chunk in await sdks.openai.chat.completions.create(
        model=HOUSE, messages=ASK, stream=True, **more
    ):
        for choice in chunk.choices:
            thought += getattr(choice.delta, "reasoning_content", None) or ""
            said += choice.delta.content or ""
    return thought, said


def of_message(message: Any) -> tuple[str, str]:
    blocks = message.content
    thought = "".join(getattr(block, "thinking", "") for block in blocks)
    return thought, "".join(getattr(block, "text", "") for block in blocks)


async def message(sdks: SDKs, **more: Any) -> Any:
    return await sdks.anthropic.messages.create(
        model=HOUSE, max_tokens=50, messages=more.pop("messages", ASK), **more
    )


async def message_streamed(sdks: SDKs, **more: Any) -> Any:
    async with sdks.anthropic.messages.stream(
        model=HOUSE, max_tokens=50, messages=ASK, **more
    ) as stream:
        return await stream.get_final_message()


async def response(sdks: SDKs, **more: Any) -> Any:
    return await sdks.openai.responses.create(
        model=HOUSE, input=more.pop("input", ASK), reasoning={"summary": "auto"}, **more
    )


async def response_streamed(sdks: SDKs) -> Any:
    async with sdks.openai.responses.stream(
        model=HOUSE, input=ASK, reasoning={"summary": "auto"}
    ) as stream:
        return await stream.get_final_response()


def of_response(told: Any) -> tuple[str, str]:
    parts = [part for item in told.output if item.type == "reasoning" for part in item.summary]
    return "".join(part.text for part in parts), told.output_text


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
async def test_every_interface_hears_what_either_dialect_thinks(
    world: World, caller: Caller, sdks: SDKs, server: ProviderServer, dialect: str
) -> None:
    await lead_to(world, server, dialect)
    both = (THOUGHT, SAID)
    assert await chat(sdks) == both
    assert await chat_streamed(sdks, reasoning_effort="low") == both
    assert of_message(await message(sdks, thinking=ADAPTIVE)) == both
    streamed = await message_streamed(sdks, thinking=ADAPTIVE)
    assert of_message(streamed) == both
    assert of_response(await response(sdks)) == both
    assert of_response(await response_streamed(sdks)) == both
    # Who did not ask, and who asked for none, hears none.
    assert of_message(await message(sdks)) == ("", SAID)
    assert await chat_streamed(sdks, reasoning_effort="none") == ("", SAID)
    if dialect == "anthropic":
        signed, sealed, _ = streamed.content
        assert (signed.signature, sealed.data) == (SIGNATURE, SEALED)
        assert [body.get("thinking") for body in server.bodies] == [
            *(None, ADAPTIVE, ADAPTIVE, ADAPTIVE, None, None, None, {"type": "disabled"})
        ]
    else:
        assert streamed.content[0].signature == ""
        efforts = [body.get("reasoning_effort") for body in server.bodies]
        assert efforts == [None, "low", *[None] * 5, "none"]
    assert streamed.usage.output_tokens_details.thinking_tokens == REASONING_TOKENS
    for row in await world.settled(caller, 8):
        assert row.metered_reasoning_tokens == REASONING_TOKENS
        assert row.metered_output_tokens == OUTPUT_TOKENS
        assert row.delivered_tokens <= OUTPUT_TOKENS
    await world.dispatcher_is_empty()


async def test_a_loop_of_tools_takes_thoughts_back_as_they_were(
    world: World, sdks: SDKs, server: ProviderServer
) -> None:
    await lead_to(world, server, "anthropic")
    server.answer = lambda body: thinking(body, calls=True)
    first = await message(sdks, thinking=ADAPTIVE, tools=[TOOL])
    server.answer = thinking
    (call,) = [block for block in first.content if block.type == "tool_use"]
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "a cat"}
    messages = [
        *ASK,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = await message(sdks, thinking=ADAPTIVE, tools=[TOOL], messages=messages)
    assert of_message(second) == (THOUGHT, SAID)
    assert server.bodies[-1]["messages"][1]["content"][:2] == [
        {"type": "thinking", "thinking": THOUGHT, "signature": SIGNATURE},
        {"type": "redacted_thinking", "data": SEALED},
    ]


async def test_responses_go_on_from_what_was_thought_kept_here_or_by_the_caller(
    world: World, sdks: SDKs, server: ProviderServer
) -> None:
    await lead_to(world, server, "anthropic")
    first = await response(sdks)
    await response(sdks, input="And of Spain?", previous_response_id=first.id)
    kept = server.bodies[-1]["messages"][1]["content"]
    assert [block["type"] for block in kept] == ["thinking", "redacted_thinking", "text"]
    own = await response(sdks, store=False, include=INCLUDE)
    items = [item.to_dict() for item in own.output]
    assert all(item["encrypted_content"] for item in items[:2])
    await response(sdks, input=[*ASK, *items, *ASK], store=False)
    assert server.bodies[-1]["messages"][1]["content"] == kept


async def test_our_own_models_refuse_to_think_by_name_before_anything_is_held(
    world: World, caller: Caller, sdks: SDKs
) -> None:
    world.worker.default = says("Well", ".")
    with pytest.raises(openai.BadRequestError) as refused:
        await sdks.openai.chat.completions.create(model=MODEL, messages=ASK, reasoning_effort="low")
    assert (refused.value.param, refused.value.code) == (
        "reasoning_effort",
        "unsupported_parameter",
    )
    assert f"'{MODEL}' does not reason" in refused.value.message
    with pytest.raises(openai.BadRequestError) as refused:
        await sdks.openai.responses.create(model=MODEL, input="Hi", reasoning={"effort": "low"})
    assert refused.value.param == "reasoning.effort"
    for call in (sdks.anthropic.messages.create, sdks.anthropic.messages.count_tokens):
        more: Any = {} if call == sdks.anthropic.messages.count_tokens else {"max_tokens": 9}
        with pytest.raises(anthropic.BadRequestError, match="thinking: the model"):
            await call(model=MODEL, messages=ASK, thinking=ADAPTIVE, **more)
    assert await world.usage(caller) == []
    assert world.worker.requests == []
    # What means none passes, and what another thought before is left out.
    past: Any = [
        {"type": "thinking", "thinking": THOUGHT, "signature": SIGNATURE},
        {"type": "text", "text": "Paris."},
    ]
    answer = await sdks.anthropic.messages.create(
        model=MODEL,
        max_tokens=9,
        thinking={"type": "disabled"},
        messages=[*ASK, {"role": "assistant", "content": past}, *ASK],
    )
    assert of_message(answer) == ("", "Well.")
    await sdks.openai.chat.completions.create(model=MODEL, messages=ASK, reasoning_effort="none")
    await world.settled(caller, 2)


async def test_a_replayed_answer_thinks_again(
    world: World, caller: Caller, server: ProviderServer
) -> None:
    await lead_to(world, server, "anthropic")
    asked: Any = ((MESSAGES, {"thinking": ADAPTIVE}), (CHAT, {}))
    for number, (path, more) in enumerate(asked, 1):
        headers = headers_of(caller, path) | {"idempotency-key": path}
        body = a_body(path, model=HOUSE, **more)
        async with httpx.AsyncClient(base_url=world.url, timeout=30) as client:
            first = await client.post(path, json=body, headers=headers)
            await world.settled(caller, number)  # with which its answer is kept
            again = await client.post(path, json=body, headers=headers)
        assert THOUGHT in first.text
        assert again.content == first.content
        assert again.headers["x-headworks-replayed"] == "true"
    assert len(server.bodies) == 2


async def test_a_policy_reads_what_is_thought(world: World, server: ProviderServer) -> None:
    await lead_to(world, server, "anthropic")
    screened = await a_screened_caller(world, a_rule(detector=Terms(terms=("think",))))
    async with SDKs(world, screened) as sdks:
        for told in (
            await message(sdks, thinking=ADAPTIVE),
            await message_streamed(sdks, thinking=ADAPTIVE),
        ):
            assert of_message(told) == ("Let me [removed].", SAID)
            assert told.content[0].signature == ""  # it is not what was signed
        assert (await chat(sdks))[0] == "Let me [removed]."
