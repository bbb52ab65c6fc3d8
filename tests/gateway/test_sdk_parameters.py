"""Every parameter that is served, asked for through the official SDKs, and what comes of it."""

from typing import Any

import anthropic
import openai
import pytest

from tests.support.gateway_world import MODEL, Caller, World
from tests.support.scripted_worker import answers, says

pytestmark = [pytest.mark.anyio, pytest.mark.services]

ASK: Any = [{"role": "developer", "content": "Rules."}, {"role": "user", "content": "Hi"}]
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
THEIRS: Any = {"name": "f", "input_schema": {"type": "object"}}
NOT_SERVED: Any = [
    ("audio", {"voice": "alloy", "format": "wav"}),
    ("modalities", ["text", "audio"]),
    ("prediction", {"type": "content", "content": "x"}),
    ("reasoning_effort", "high"),
    ("store", True),
    ("verbosity", "low"),
    ("web_search_options", {}),
]
NOT_SERVED_THERE: Any = [
    ("container", "c"),
    ("mcp_servers", [{"type": "url", "name": "x", "url": "https://x"}]),
    ("thinking", {"type": "adaptive"}),
    ("output_config", {"effort": "low"}),
    ("speed", "fast"),
]


async def test_the_openai_sdk_s_parameters(world: World, caller: Caller) -> None:
    world.worker.default = answers(3)
    async with openai.AsyncOpenAI(
        api_key=caller.key, base_url=f"{world.url}/v1", max_retries=0
    ) as client:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=ASK,
            n=2,
            seed=-1,
            stop=["END"],
            logprobs=True,
            top_logprobs=2,
            temperature=0.5,
            top_p=0.9,
            frequency_penalty=0.1,
            presence_penalty=0.1,
            logit_bias={"5": -100},
            max_completion_tokens=9,
            metadata={"k": "v"},
            service_tier="flex",
            safety_identifier="s",
            prompt_cache_key="c",
            user="u",
        )
        with_tools = await client.chat.completions.create(
            model=MODEL,
            messages=ASK,
            tools=[TOOL],
            tool_choice="none",
            parallel_tool_calls=False,
            response_format={"type": "text"},
        )
        for name, value in NOT_SERVED:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(
                    model=MODEL, messages=ASK, extra_body={name: value}
                )
            assert refused.value.param == name
            assert refused.value.code == "unsupported_parameter"
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2, 2, 2]
    assert answer.service_tier == "flex"
    assert with_tools.choices[0].finish_reason == "stop"
    sampling = world.worker.requests[0].sampling
    assert (sampling.seed, sampling.stop, sampling.max_tokens) == (2**63 - 1, ("END",), 9)
    assert sampling.logit_bias == ((5, -100.0),)
    rows = await world.settled(caller, 2)
    assert rows[0].service_class == "batch"


async def test_the_anthropic_sdk_s_parameters(world: World, caller: Caller) -> None:
    world.worker.default = says("Well", ".")
    asked: Any = {
        "model": MODEL,
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "Hi"}],
        "system": [{"type": "text", "text": "Rules.", "cache_control": {"type": "ephemeral"}}],
    }
    async with anthropic.AsyncAnthropic(
        api_key=caller.key, base_url=world.url, max_retries=0
    ) as client:
        answer = await client.messages.create(
            **asked,
            stop_sequences=["END"],
            metadata={"user_id": "u"},
            service_tier="standard_only",
            tools=[THEIRS],
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
            thinking={"type": "disabled"},
            extra_body={"temperature": 0.5, "top_k": 3},
        )
        for name, value in NOT_SERVED_THERE:
            with pytest.raises(anthropic.BadRequestError) as refused:
                await client.messages.create(**asked, extra_body={name: value})
            assert name in str(refused.value)
    assert answer.usage.service_tier == "standard"
    assert answer.stop_reason == "end_turn"
    message = world.worker.requests[0]
    assert message.sampling.stop == ("END",)
    assert message.sampling.top_k == 3
    assert message.cache_marks
    assert len(await world.settled(caller, 1)) == 1
