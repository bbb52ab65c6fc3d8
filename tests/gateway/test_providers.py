"""Tenants' requests at outside providers of both dialects, through a real gateway."""

import asyncio
import base64
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from core.money import EndCause
from core.pricing import ListedPrice
from core.providers import ProviderSettings, ProviderView, key_context
from core.route_table import CAUSES, Fallback, Target
from core.secrets import read_key_ring
from core.tickets import Limits
from store import providers
from store.prices import seed_prices
from tests.gateway.test_route_tables import put
from tests.support.anthropic_grammar import check_anthropic_stream
from tests.support.gateway_requests import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    error_of,
    headers_of,
    post,
    text_of,
)
from tests.support.gateway_world import DEPLOYMENT, PRICE, Caller, World, a_world, until
from tests.support.openai_grammar import check_openai_chat_stream
from tests.support.provider_server import ProviderServer, Said, plain, refusal
from tests.support.provider_world import KEY, recording

pytestmark = [pytest.mark.anyio, pytest.mark.services]

KEYS = "k1:" + base64.b64encode(b"k" * 32).decode()
HOUSE = "house"  # the public name
DIALECTS = ("openai", "anthropic")
SAID = "1. Red: This is the most obvious colour"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.fixture
async def world(postgres_url: str, valkey_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with a_world(postgres_url, valkey_url, tmp_path, provider_keys=KEYS) as made:
        yield made


@pytest.fixture
async def server() -> AsyncIterator[ProviderServer]:
    async with ProviderServer(by_dialect("plain")) as made:
        yield made


def by_dialect(name: str) -> Callable[[dict[str, Any]], Said]:
    """The recording of this name, whole or streamed, in the dialect that was asked in."""

    def answer(body: dict[str, Any]) -> Said:
        dialect = "anthropic" if "max_tokens" in body else "openai"
        how = "stream" if body.get("stream") else "whole"
        return plain(f"{dialect}-{name}-{how}")

    return answer


def always(said: Said) -> Callable[[dict[str, Any]], Said]:
    return lambda body: said


async def lead_to(
    world: World, server: ProviderServer, dialect: str, *, spare: bool = False, **settings: Any
) -> None:
    """`house` is this server, in this dialect, with our own replica as a spare or without."""
    name = f"acme-{dialect}"
    base_url = server.url + ("/v1" if dialect == "openai" else "")
    key = read_key_ring(KEYS).seal(
        KEY, context=key_context(name, dialect, base_url), nonce=b"0" * 12
    )
    async with world.postgres.transaction() as conn:
        version = await providers.begin_change(conn)
        view = ProviderView(
            name=name,
            dialect=dialect,
            base_url=base_url,
            key=key,
            settings=ProviderSettings(**settings),
            version=version,
        )
        if not await providers.create_provider(conn, view):
            await providers.replace_provider(conn, view)
        price = msgspec.structs.replace(PRICE, id="house-1")
        await seed_prices(conn, [ListedPrice(model=HOUSE, effective_ms=0, price=price)])
    target = Target(provider=name, model="smollm2", context_tokens=4096, max_output_tokens=400)
    others = (Fallback(on=CAUSES, target=Target(deployment=DEPLOYMENT)),) if spare else ()
    await put(world, HOUSE, targets=(target,), fallbacks=others)


async def told(world: World, request_id: str) -> str:
    """What the settled row says of who answered and who counted."""
    async with world.postgres.connection() as conn:
        rows = await (
            await conn.execute(
                "SELECT replica_id FROM witnesses WHERE request_id = %s AND source = 'gateway'",
                [request_id],
            )
        ).fetchall()
    ((replica,),) = rows
    return str(replica)


async def test_every_pairing_of_dialects_answers_whole_and_streamed(
    world: World, server: ProviderServer
) -> None:
    caller = await world.add_caller(limits=Limits(concurrency=1), hard_cap_micro=100_000)
    for dialect in DIALECTS:
        await lead_to(world, server, dialect)
        for path in (CHAT, MESSAGES):
            whole = await post(world, caller, path, model=HOUSE)
            assert whole.status_code == 200, whole.text
            assert text_of(path, whole).startswith(SAID)
            streamed = await post(world, caller, path, model=HOUSE, stream=True)
            assert SAID.rsplit(maxsplit=1)[-1] in streamed.text
            if path == CHAT:
                check_openai_chat_stream(streamed.content, include_usage=False)
            else:
                check_anthropic_stream(streamed.content, estimated=dialect == "openai")
    assert all(KEY.encode() in head for head in server.heads)
    assert not any(caller.key.encode() in head for head in server.heads)
    rows = await world.settled(caller, 8)
    for row in rows:
        assert (row.metered_prompt_tokens, row.metered_output_tokens) == (34, 40)
        assert row.billed_micro == 34 + 4 * 40
        assert (row.cause, row.model) == (EndCause.LENGTH, HOUSE)
        assert row.delivered_tokens <= row.metered_output_tokens
        assert row.prompt_tokens > 0  # an estimate, of another prompt than was recorded
        assert await told(world, row.request_id) == f"provider:{row.version.split('/')[0]}:told"
    assert await world.balance(caller) == (8 * (34 + 160), 0)
    await world.dispatcher_is_empty()


async def test_the_usage_that_a_client_did_not_ask_for_is_asked_and_not_told(
    world: World, caller: Caller, server: ProviderServer
) -> None:
    await lead_to(world, server, "openai")
    silent = await post(world, caller, model=HOUSE, stream=True)
    assert b"usage" not in silent.content
    assert server.bodies[-1]["stream_options"] == {"include_usage": True}
    asked = await post(
        world, caller, model=HOUSE, stream=True, stream_options={"include_usage": True}
    )
    assert b'"prompt_tokens":34,"completion_tokens":40' in asked.content


async def test_calls_of_tools_come_through_in_either_dialect(
    world: World, caller: Caller, server: ProviderServer
) -> None:
    server.answer = lambda body: plain("openai-required-stream")
    await lead_to(world, server, "openai")
    tool = {"name": "get_weather", "input_schema": WEATHER}
    answer = await post(
        world, caller, MESSAGES, model=HOUSE, tools=[tool], tool_choice={"type": "any"}, stream=True
    )
    check_anthropic_stream(answer.content, estimated=True)
    assert b'"stop_reason":"tool_use"' in answer.content
    assert server.bodies[-1]["tool_choice"]["function"]["name"] == "get_weather"
    assert "response_format" not in server.bodies[-1]
    whole = await post(world, caller, MESSAGES, model=HOUSE, tools=[tool])
    (block,) = whole.json()["content"]
    assert block["input"] == {"INVALID_JSON": '"Paris"'}  # as recorded: no object
    function = {"name": "get_weather", "parameters": WEATHER}
    answer = await post(
        world,
        caller,
        model=HOUSE,
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
    )
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("get_weather", '"Paris"')


async def test_what_a_provider_cannot_be_asked_is_refused_before_it_costs_anything(
    world: World, caller: Caller, server: ProviderServer
) -> None:
    await lead_to(world, server, "anthropic")
    for more, param in (
        ({"n": 2}, "n"),
        ({"seed": 1}, "seed"),
        ({"temperature": 0.0}, "temperature"),
    ):
        refused = await post(world, caller, model=HOUSE, **more)
        assert refused.status_code == 400, refused.text
        assert (error_of(refused)["param"], error_of(refused)["code"]) == (
            param,
            "unsupported_parameter",
        )
    legacy = await post(world, caller, COMPLETIONS, model=HOUSE)
    assert legacy.status_code == 400
    assert not server.bodies
    assert await world.usage(caller) == []
    await world.dispatcher_is_empty()


async def test_faults_of_a_provider_are_told_as_ours_and_cost_nothing(
    world: World, caller: Caller, server: ProviderServer
) -> None:
    for said, status, code in (
        (refusal(429, message="slow down"), 503, "server_is_overloaded"),
        (refusal(401, message=f"bad key {KEY}"), 503, "service_unavailable"),
        (refusal(500, message="oops"), 503, "service_unavailable"),
        (plain("openai-too-long"), 400, "context_length_exceeded"),
        (plain("openai-bad-value"), 400, "bad_request"),
    ):
        await lead_to(world, server, "openai")  # a change: what was seen before is forgotten
        server.answer = always(said)
        refused = await post(world, caller, model=HOUSE)
        assert (refused.status_code, error_of(refused)["code"]) == (status, code)
        assert KEY not in refused.text
        assert code != "server_is_overloaded" or refused.headers["retry-after"]
    await world.settled(caller, 5)
    assert await world.balance(caller) == (0, 0)
    await world.dispatcher_is_empty()


async def test_a_provider_cut_in_the_middle_is_an_error_in_the_stream_and_in_the_row(
    world: World, caller: Caller, server: ProviderServer
) -> None:
    # Portkey-AI/gateway#1797: the stream ended cleanly, status 200, no error.
    for dialect in DIALECTS:
        await lead_to(world, server, dialect)
        server.answer = always(plain(f"{dialect}-cut"))
        answer = await post(world, caller, model=HOUSE, stream=True)
        assert answer.status_code == 200
        assert b'"error":' in answer.content
        assert b"[DONE]" not in answer.content
        assert (await post(world, caller, model=HOUSE)).status_code == 500
    rows = await world.settled(caller, 4)
    assert {row.cause for row in rows} == {EndCause.FAILED}
    assert {row.billed_micro for row in rows} == {0}
    assert (await told(world, rows[0].request_id)).endswith(":estimated")


async def test_another_target_answers_for_a_provider_that_fails_and_never_for_a_part(
    world: World, caller: Caller, server: ProviderServer
) -> None:
    await lead_to(world, server, "openai", spare=True)
    for said in (refusal(429), refusal(500), plain("openai-too-long"), refusal(401)):
        server.answer = always(said)
        answer = await post(world, caller, model=HOUSE, max_tokens=5)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-headworks-fallbacks"] == "1"
        assert "w0.4" in answer.text
        await lead_to(world, server, "openai", spare=True)
    server.answer = lambda body: plain("openai-cut")  # something was said: no other goes on
    answer = await post(world, caller, model=HOUSE, stream=True)
    assert b'"error":' in answer.content
    assert b"w0." not in answer.content
    rows = await world.settled(caller, 9)
    assert sum(row.billed_micro > 0 for row in rows) == 4


@pytest.mark.parametrize("cut_usage", ["estimate", "drain"])
async def test_a_client_that_leaves_is_billed_and_the_row_says_by_whom(
    world: World, caller: Caller, server: ProviderServer, cut_usage: str
) -> None:
    # BerriAI/litellm#14457: disconnects were not accounted for. sub2api#4408: in full.
    await lead_to(world, server, "openai", cut_usage=cut_usage, drain_ms=3_000)
    body = recording("openai-plain-stream").body.encode()
    half = body[: body.index(b"most") + 200]
    server.answer = lambda asked: (200, "text/event-stream", half, False)
    server.holds = True
    async with httpx.AsyncClient(base_url=world.url, timeout=30) as client:
        request = {"model": HOUSE, "messages": [{"role": "user", "content": "x"}], "stream": True}
        async with client.stream("POST", CHAT, json=request, headers=headers_of(caller)) as answer:
            async for line in answer.aiter_lines():
                if "Red" in line:
                    break
    await until(lambda: server.left == 1)
    (row,) = await world.settled(caller, 1)
    assert row.cause is EndCause.CLIENT_CANCELLED
    assert 1 <= row.metered_output_tokens < 40
    assert row.billed_micro > 0
    assert (await told(world, row.request_id)).endswith(":estimated")
    await world.dispatcher_is_empty()


async def test_clients_that_leave_at_any_moment_leave_nothing_behind(
    world: World, server: ProviderServer
) -> None:
    caller = await world.add_caller(limits=Limits(concurrency=8), hard_cap_micro=1_000_000)
    await lead_to(world, server, "openai", cut_usage="drain", drain_ms=50, concurrency=8)
    dice = random.Random(5)

    async def leave() -> None:
        asking = asyncio.create_task(post(world, caller, model=HOUSE, stream=dice.random() < 0.5))
        await asyncio.sleep(dice.uniform(0, 0.25))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    for _ in range(10):
        await asyncio.gather(*(leave() for _ in range(4)))
    await world.dispatcher_is_empty()
    rows = await world.settled(caller, len(await world.usage(caller)))
    for row in rows:
        assert row.delivered_tokens <= row.metered_output_tokens <= 400
        assert row.billed_micro <= row.reserved_micro
    assert await world.balance(caller) == (sum(row.billed_micro for row in rows), 0)
    assert text_of(CHAT, await post(world, caller, model=HOUSE)).startswith(SAID)
    await until(lambda: not world.gateway._providers._guards["acme-openai"].running)


async def test_who_is_refused_for_limits_or_money_of_its_own_takes_no_place_at_a_provider(
    world: World, caller: Caller, server: ProviderServer
) -> None:
    await lead_to(world, server, "openai", concurrency=1, requests_per_min=1)
    busy = await world.add_caller(limits=Limits(input_tokens_per_min=1, requests_per_min=1))
    poor = await world.add_caller(hard_cap_micro=1)
    assert (await post(world, busy)).status_code == 200  # at a replica of ours: its one a minute
    for refused in (busy, poor):
        assert (await post(world, refused, model=HOUSE)).status_code == 429
    await world.dispatcher_is_empty()
    assert text_of(CHAT, await post(world, caller, model=HOUSE)).startswith(SAID)
    assert (await post(world, caller, model=HOUSE)).status_code == 503
    assert len(server.bodies) == 1


async def test_limits_of_a_provider_send_the_rest_elsewhere(
    world: World, caller: Caller, server: ProviderServer
) -> None:
    await lead_to(world, server, "openai", spare=True, concurrency=1)
    server.holds = True
    body = recording("openai-plain-stream").body.encode()
    server.answer = lambda asked: (200, "text/event-stream", body[:2000], False)
    first = asyncio.create_task(post(world, caller, model=HOUSE, stream=True))
    await until(lambda: len(server.bodies) == 1)
    answer = await post(world, caller, model=HOUSE, max_tokens=5)
    assert "w0.4" in answer.text
    assert len(server.bodies) == 1
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await until(lambda: server.left == 1)
    server.holds, server.answer = False, by_dialect("plain")
    await until(lambda: not world.gateway._providers._guards["acme-openai"].running)
    answer = await post(world, caller, model=HOUSE)
    assert text_of(CHAT, answer).startswith(SAID)


async def test_limits_of_a_provider_are_the_fleet_s_and_asked_before_money_is_held(
    world: World, caller: Caller, server: ProviderServer
) -> None:
    await lead_to(world, server, "openai", concurrency=2)
    await world.start_gateway()
    server.holds = True
    body = recording("openai-plain-stream").body.encode()
    server.answer = lambda asked: (200, "text/event-stream", body[:2000], False)
    asking = [
        asyncio.create_task(post(world, caller, gateway=n % 2, model=HOUSE, stream=True))
        for n in range(6)
    ]
    await until(lambda: sum(task.done() for task in asking) == 4)
    refused = [task.result() for task in asking if task.done()]
    assert {answer.status_code for answer in refused} == {503}
    assert {error_of(answer)["code"] for answer in refused} == {"server_is_overloaded"}
    await until(lambda: len(server.bodies) == 2)
    rows = await world.usage(caller)
    assert len(rows) == 2, "nothing was reserved for who was refused"
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await world.settled(caller, 2)
    await world.dispatcher_is_empty()


async def test_no_more_is_delivered_than_the_provider_counts(
    world: World, caller: Caller, server: ProviderServer
) -> None:
    # Our estimate of this text, told as it is written to the client, is many times its count.
    text = "!?" * 200
    body = f'data: {{"choices":[{{"delta":{{"content":"{text}"}},"finish_reason":"stop"}}],'
    body += '"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\ndata: [DONE]\n\n'
    server.answer = always((200, "text/event-stream", body.encode(), False))
    await lead_to(world, server, "openai")
    answer = await post(world, caller, model=HOUSE, stream=True)
    assert text in answer.text
    (row,) = await world.settled(caller, 1)
    assert row.delivered_tokens == row.metered_output_tokens == 3
    assert row.billed_micro == 7 + 4 * 3


async def test_a_provider_that_cannot_be_reached_is_ours(world: World, caller: Caller) -> None:
    async with ProviderServer(by_dialect("plain")) as gone:
        await lead_to(world, gone, "openai")
    refused = await post(world, caller, model=HOUSE)
    assert (refused.status_code, error_of(refused)["code"]) == (503, "service_unavailable")
