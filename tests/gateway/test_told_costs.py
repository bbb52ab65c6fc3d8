"""What an answer's client is told of its cost and its tier, in every dialect and both ways."""

import json
from typing import Any

import pytest

from core.money import EndCause
from tests.support.anthropic_grammar import check_anthropic_stream
from tests.support.gateway_requests import CHAT, COMPLETIONS, MESSAGES, post
from tests.support.gateway_world import PRICE, Caller, World
from tests.support.openai_grammar import check_openai_chat_stream, check_openai_completion_stream
from tests.support.responses_grammar import check_responses_stream
from tests.support.scripted_worker import answers

pytestmark = [pytest.mark.anyio, pytest.mark.services]

RESPONSES = "/v1/responses"
OF_RESPONSES: Any = {"input": "Hi", "max_tokens": None, "messages": None}
USAGE: Any = {"stream_options": {"include_usage": True}}


async def test_a_whole_answer_s_headers_are_what_the_ledger_bills(
    world: World, caller: Caller
) -> None:
    world.worker.default = answers(7, cached=3)
    sent = [
        await post(world, caller, CHAT, n=2),
        await post(world, caller, COMPLETIONS),
        await post(world, caller, MESSAGES),
        await post(world, caller, RESPONSES, **OF_RESPONSES),
    ]
    rows = await world.settled(caller, len(sent))
    for answer, row in zip(sent, rows, strict=True):
        told = {
            name.removeprefix("x-headworks-"): value
            for name, value in answer.headers.items()
            if name.startswith("x-headworks-")
        }
        assert row.billed_micro > 0
        assert told["cost-micro"] == str(row.billed_micro)
        assert told["currency"] == PRICE.currency
        assert told["output-tokens"] == str(row.metered_output_tokens)
        assert told["cached-tokens"] == "3"
        assert answer.json()["usage"]["headworks"]["cost_micro"] == row.billed_micro


async def test_a_stream_s_last_usage_is_what_the_ledger_bills(world: World, caller: Caller) -> None:
    world.worker.default = answers(7, cached=3)
    chat = await post(world, caller, CHAT, stream=True, **USAGE)
    text = await post(world, caller, COMPLETIONS, stream=True, **USAGE)
    message = await post(world, caller, MESSAGES, stream=True)
    response = await post(world, caller, RESPONSES, stream=True, **OF_RESPONSES)
    told: list[Any] = [
        check_openai_chat_stream(chat.content, include_usage=True).usage,
        check_openai_completion_stream(text.content, include_usage=True).usage,
        check_anthropic_stream(message.content).usage,
        check_responses_stream(response.content).response["usage"],
    ]
    rows = await world.settled(caller, len(told))
    assert [usage["headworks"]["cost_micro"] for usage in told] == [r.billed_micro for r in rows]


async def test_an_answer_cut_short_costs_what_it_says(world: World, caller: Caller) -> None:
    answer = await post(world, caller, CHAT, max_tokens=3)
    (row,) = await world.settled(caller, 1)
    assert row.cause is EndCause.LENGTH
    assert answer.headers["x-headworks-cost-micro"] == str(row.billed_micro)


async def test_who_names_a_tier_is_told_the_one_that_served(world: World, caller: Caller) -> None:
    for asked, told in (("auto", "default"), ("flex", "flex"), ("fast", "priority")):
        whole = await post(world, caller, CHAT, service_tier=asked)
        assert whole.json()["service_tier"] == told
        streamed = await post(world, caller, CHAT, service_tier=asked, stream=True)
        check_openai_chat_stream(streamed.content, include_usage=False)
        first = json.loads(streamed.text.splitlines()[0].removeprefix("data: "))
        assert first["service_tier"] == told
        response = await post(world, caller, RESPONSES, service_tier=asked, **OF_RESPONSES)
        assert response.json()["service_tier"] == told
    assert "service_tier" not in (await post(world, caller, CHAT)).json()
    message = await post(world, caller, MESSAGES, service_tier="standard_only")
    assert message.json()["usage"]["service_tier"] == "standard"
    classes = {row.service_class for row in await world.usage(caller)}
    assert classes == {"standard", "batch", "interactive"}
