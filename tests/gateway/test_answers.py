"""Whole and streamed answers of every endpoint, told right, metered and settled."""

import asyncio
from typing import Any

import anthropic
import httpx
import openai
import pytest

from core.money import EndCause
from tests.support.anthropic_grammar import check_anthropic_stream
from tests.support.gateway_requests import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    PATHS,
    a_body,
    headers_of,
    post,
    text_of,
)
from tests.support.gateway_world import MODEL, Caller, World
from tests.support.openai_grammar import check_openai_chat_stream, check_openai_completion_stream
from tests.support.scripted_worker import answers, whole_text

pytestmark = [pytest.mark.anyio, pytest.mark.services]


async def test_whole_answers_are_told_and_settled(world: World) -> None:
    for path in PATHS:
        await whole_answer(world, await world.add_caller(), path)
    await world.dispatcher_is_empty()


async def whole_answer(world: World, caller: Caller, path: str) -> None:
    response = await post(world, caller, path)
    assert response.status_code == 200, response.text
    assert text_of(path, response) == whole_text(5)
    assert response.headers["x-request-id"] == response.headers["request-id"]
    (row,) = await world.settled(caller, 1)
    assert row.request_id == response.headers["x-request-id"]
    assert row.cause is EndCause.COMPLETE
    assert row.metered_output_tokens == row.delivered_tokens == 5
    assert row.metered_prompt_tokens == row.prompt_tokens > 0
    assert row.billed_micro == row.prompt_tokens + 4 * 5
    assert row.queue_ms is not None
    assert row.first_token_ms is not None
    assert row.inter_token_ms is not None
    assert row.prefill_ms == 2.0
    assert await world.balance(caller) == (row.billed_micro, 0)


async def test_streams_keep_their_grammar_and_are_settled(world: World) -> None:
    world.worker.default = answers(20, gap_s=0.002)
    for path in PATHS:
        await streamed_answer(world, await world.add_caller(), path)
    await world.dispatcher_is_empty()


async def streamed_answer(world: World, caller: Caller, path: str) -> None:
    extra: Any = {} if path == MESSAGES else {"stream_options": {"include_usage": True}}
    response = await post(world, caller, path, stream=True, **extra)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    if path == MESSAGES:
        told = check_anthropic_stream(response.content)
        assert (told.text, told.stop_reason) == (whole_text(20), "end_turn")
        assert told.usage["output_tokens"] == 20
    else:
        check = check_openai_chat_stream if path == CHAT else check_openai_completion_stream
        summary = check(response.content, include_usage=True)
        assert (summary.texts, summary.finishes) == ([whole_text(20)], ["stop"])
        assert summary.usage is not None
        assert summary.usage["completion_tokens"] == 20
    (row,) = await world.settled(caller, 1)
    assert row.cause is EndCause.COMPLETE
    assert row.metered_output_tokens == row.delivered_tokens == 20
    assert row.stream


async def test_an_answer_cut_at_max_tokens_ends_by_length(world: World, caller: Caller) -> None:
    world.worker.default = answers(100)
    response = await post(world, caller, max_tokens=7)
    assert response.json()["choices"][0]["finish_reason"] == "length"
    assert response.json()["usage"]["completion_tokens"] == 7
    (row,) = await world.settled(caller, 1)
    assert (row.cause, row.max_tokens) == (EndCause.LENGTH, 7)


async def test_several_choices_with_logprobs(world: World, caller: Caller) -> None:
    for stream in (False, True):
        response = await post(world, caller, n=3, logprobs=True, top_logprobs=2, stream=stream)
        assert response.status_code == 200, response.text
        if stream:
            told = check_openai_chat_stream(response.content, include_usage=False, n=3)
            assert told.texts == [whole_text(5, choice) for choice in range(3)]
            assert [len(logprobs) for logprobs in told.logprobs] == [5, 5, 5]
        else:
            choices = response.json()["choices"]
            assert [c["message"]["content"] for c in choices] == [
                whole_text(5, choice) for choice in range(3)
            ]
            assert all(len(c["logprobs"]["content"]) == 5 for c in choices)
    rows = await world.settled(caller, 2)
    assert [row.metered_output_tokens for row in rows] == [15, 15]


async def test_what_the_worker_is_asked(world: World, caller: Caller) -> None:
    await post(
        world,
        caller,
        temperature=0.25,
        top_p=0.5,
        seed=42,
        stop=["END"],
        max_tokens=9,
    )
    await post(world, caller, max_tokens=None)
    asked, unasked = world.worker.requests
    assert asked.sampling.temperature == 0.25
    assert asked.sampling.top_p == 0.5
    assert asked.sampling.seed == 42
    assert asked.sampling.stop == ("END",)
    assert asked.sampling.max_tokens == 9
    assert asked.version == world.manifest.version
    assert asked.prompt_ids[0] == 1  # <|im_start|>: rendered by the model's own template
    assert asked.attempt == 1
    assert len(asked.tenant_salt) == 16
    assert asked.deadline_ms > 0
    assert unasked.sampling.seed != 42
    assert unasked.sampling.max_tokens == 512 - len(unasked.prompt_ids)


async def test_cached_tokens_are_told_and_billed_less(world: World, caller: Caller) -> None:
    world.worker.default = answers(5, cached=4)
    response = await post(world, caller)
    usage = response.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4
    response = await post(world, caller, MESSAGES)
    assert response.json()["usage"]["cache_read_input_tokens"] == 4
    rows = await world.settled(caller, 2)
    assert [row.metered_cached_tokens for row in rows] == [4, 4]
    assert rows[0].billed_micro == rows[0].prompt_tokens - 2 + 4 * 5


async def test_openai_sdk(world: World, caller: Caller) -> None:
    world.worker.default = answers(12)
    async with openai.AsyncOpenAI(
        base_url=f"{world.url}/v1", api_key=caller.key, max_retries=0
    ) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).owned_by == "headworks"
        ask: Any = [{"role": "user", "content": "Hello"}]
        whole: Any = await client.chat.completions.create(model=MODEL, messages=ask)
        assert whole.choices[0].message.content == whole_text(12)
        async with client.chat.completions.stream(model=MODEL, messages=ask) as stream:
            final: Any = await stream.get_final_completion()
        assert final.choices[0].message.content == whole_text(12)
        text = await client.completions.create(model=MODEL, prompt="Once", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in text]) == whole_text(12)
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="nothing", messages=ask)
        assert caught.value.code == "model_not_found"
        assert str(caught.value.request_id).startswith("req_local_")


async def test_anthropic_sdk(world: World, caller: Caller) -> None:
    world.worker.default = answers(12)
    async with anthropic.AsyncAnthropic(
        base_url=world.url, api_key=caller.key, max_retries=0
    ) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).display_name == MODEL
        ask: Any = [{"role": "user", "content": "Hello"}]
        counted = await client.messages.count_tokens(model=MODEL, messages=ask)
        whole: Any = await client.messages.create(model=MODEL, messages=ask, max_tokens=50)
        assert whole.content[0].text == whole_text(12)
        assert whole.usage.input_tokens == counted.input_tokens
        async with client.messages.stream(model=MODEL, messages=ask, max_tokens=50) as stream:
            final: Any = await stream.get_final_message()
        assert final.content[0].text == whole_text(12)
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="sk-no").messages.create(
                model=MODEL,
                messages=ask,
                max_tokens=50,
            )


async def test_many_at_once_are_each_their_own(world: World, caller: Caller) -> None:
    world.worker.default = answers(30, gap_s=0.005)
    url, headers = world.url, headers_of(caller)
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        responses = await asyncio.gather(
            *(
                client.post(CHAT, json=a_body(CHAT, stream=i % 2 == 0), headers=headers)
                for i in range(40)
            )
        )
    for i, response in enumerate(responses):
        if i % 2 == 0:
            told = check_openai_chat_stream(response.content, include_usage=False)
            assert told.texts == [whole_text(30)]
        else:
            assert text_of(CHAT, response) == whole_text(30)
    rows = await world.settled(caller, 40)
    assert {row.metered_output_tokens for row in rows} == {30}
    assert len({row.request_id for row in rows}) == 40
    await world.dispatcher_is_empty()


async def test_two_gateways_serve_side_by_side(world: World, caller: Caller) -> None:
    await world.start_gateway()
    for gateway in (0, 1, 0, 1):
        response = await post(world, caller, COMPLETIONS, gateway=gateway)
        assert text_of(COMPLETIONS, response) == whole_text(5)
    rows = await world.settled(caller, 4)
    assert len({row.gateway_id for row in rows}) == 2
    await world.dispatcher_is_empty()


async def test_what_one_tenant_sent_is_remembered_for_no_other(world: World) -> None:
    callers = [await world.add_caller() for _ in range(2)]
    for caller in callers:
        assert (await post(world, caller)).status_code == 200
    known = world.gateway.prompts._memories
    memories = {tenant: memory for (tenant, _), memory in known.items()}
    first, second = (memories[caller.tenant_id] for caller in callers)
    assert first is not second
    assert first.bytes == second.bytes > 0, "the same text is encoded for each"
