"""The long life of a request: top-ups, checkpoints, stale rows, signs of life, deadlines, drain."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.allowance import Allowance
from core.money import EndCause
from store import registry, tenants
from store.dispatch import Dispatch
from store.limits import say
from tests.support.anthropic_grammar import check_anthropic_stream
from tests.support.client import ask
from tests.support.gateway_requests import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    a_body,
    error_of,
    headers_of,
    post,
    text_of,
)
from tests.support.gateway_world import DEPLOYMENT, MODEL, Caller, World, a_world, until
from tests.support.openai_grammar import check_openai_chat_stream
from tests.support.raw_server import read_request
from tests.support.scripted_worker import answers, hangs, whole_text

pytestmark = [pytest.mark.anyio, pytest.mark.services]


async def test_a_long_answer_is_topped_up_within_its_cap(
    postgres_url: str, valkey_url: str, tmp_path: Path
) -> None:
    async with a_world(postgres_url, valkey_url, tmp_path, reserve_output_tokens=40) as world:
        caller = await world.add_caller(hard_cap_micro=100_000)
        world.worker.default = answers(300, gap_s=0.003)
        asking = asyncio.create_task(post(world, caller, max_tokens=300))
        await until(lambda: world.worker.requests)
        prompt = len(world.worker.requests[0].prompt_ids)
        seen: set[int] = set()
        while not asking.done():
            seen.add((await world.balance(caller))[1])
            await asyncio.sleep(0.02)
        assert text_of(CHAT, await asking) == whole_text(300)
        held = [prompt + 4 * tokens for tokens in (40, 80, 160, 300)]
        assert seen - {0} <= set(held)
        assert len(seen & set(held)) >= 3
        (row,) = await world.settled(caller, 1)
        assert row.amount_micro == held[0]
        assert row.reserved_micro == held[3]
        assert row.billed_micro == prompt + 4 * 300
        await world.dispatcher_is_empty()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_ends_by_length_where_its_cap_does(
    postgres_url: str, valkey_url: str, tmp_path: Path, *, stream: bool
) -> None:
    async with a_world(postgres_url, valkey_url, tmp_path, reserve_output_tokens=40) as world:
        caller = await world.add_caller(hard_cap_micro=400)
        world.worker.default = answers(300, gap_s=0.01)
        response = await post(world, caller, max_tokens=300, stream=stream)
        if stream:
            told = check_openai_chat_stream(response.content, include_usage=False)
            assert told.finishes == ["length"]
            text = told.texts[0]
        else:
            assert response.json()["choices"][0]["finish_reason"] == "length"
            text = text_of(CHAT, response)
        (row,) = await world.settled(caller, 1)
        assert row.cause is EndCause.LENGTH
        assert world.worker.aborts == [f"{row.request_id}:1"]
        affordable = (400 - row.prompt_tokens) // 4
        assert affordable * 31 // 32 <= row.accepted_tokens <= row.metered_output_tokens
        assert text == whole_text(row.delivered_tokens)
        assert 0.9 * 400 <= row.billed_micro <= row.reserved_micro <= 400
        assert (await world.balance(caller))[0] <= 400
        refused = await post(world, caller, max_tokens=300)
        assert error_of(refused)["code"] == "insufficient_quota"
        assert "0.000400 USD" in error_of(refused)["message"]
        await world.dispatcher_is_empty()


async def test_long_streams_leave_checkpoints(
    postgres_url: str, valkey_url: str, tmp_path: Path
) -> None:
    async with a_world(postgres_url, valkey_url, tmp_path, checkpoint_ms=200) as world:
        caller = await world.add_caller()
        world.worker.default = answers(200, gap_s=0.01)
        asking = asyncio.create_task(post(world, caller, stream=True, max_tokens=200))
        await until(lambda: world.worker.requests)
        request_id = world.worker.requests[0].request_id

        async def checkpoints() -> list[int]:
            async with world.postgres.connection() as conn:
                rows = await conn.execute(
                    "SELECT output_tokens FROM witnesses"
                    " WHERE request_id = %s AND source = 'checkpoint'",
                    (request_id,),
                )
                return [row[0] for row in await rows.fetchall()]

        seen: list[int] = []
        while not asking.done():
            seen += await checkpoints()
            await asyncio.sleep(0.05)
        assert len(set(seen)) >= 3
        assert sorted(seen) == seen
        (row,) = await world.settled(caller, 1)
        assert row.metered_output_tokens == 200


async def test_a_silent_stream_shows_signs_of_life(
    postgres_url: str, valkey_url: str, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"headers_wait_ms": 200, "ping_ms": 100}
    async with a_world(postgres_url, valkey_url, tmp_path, **changes) as world:
        caller = await world.add_caller()
        world.worker.default = answers(3, delay_s=0.8, gap_s=0.4)
        openai, anthropic = await asyncio.gather(
            post(world, caller, CHAT, stream=True), post(world, caller, MESSAGES, stream=True)
        )
        told = check_openai_chat_stream(openai.content, include_usage=False)
        assert told.texts == [whole_text(3)]
        assert told.comments >= 5
        message = check_anthropic_stream(anthropic.content)
        assert message.text == whole_text(3)
        assert message.comments >= 3
        assert message.pings >= 3
        world.worker.default = hangs()
        headers = {**headers_of(caller), "x-headworks-deadline-ms": "700"}
        async with httpx.AsyncClient(base_url=world.url, timeout=30) as client:
            late = await client.post(CHAT, json=a_body(CHAT, stream=True), headers=headers)
        assert late.status_code == 200  # the headers were out before it failed
        assert check_openai_chat_stream(late.content, include_usage=False).error is not None


async def test_rows_that_went_stale_are_read_again_once(
    postgres_url: str, valkey_url: str, tmp_path: Path
) -> None:
    async with a_world(postgres_url, valkey_url, tmp_path, poll_ms=60_000) as world:
        caller = await world.add_caller()
        assert (await post(world, caller)).status_code == 200
        async with world.postgres.transaction() as conn:
            await say(conn, "tenant", caller.tenant_id, Allowance(requests_per_min=7))
            version = await tenants.touch_tenant(conn, caller.tenant_id)
            route = await registry.put_route(
                conn, model=MODEL, deployment=DEPLOYMENT, max_output_tokens=9
            )
        pusher = Dispatch(world.settings.redis_url, "pusher")
        await pusher.start()
        await pusher.push_versions(tenants={caller.tenant_id: version}, routes={MODEL: route})
        await pusher.close()
        response = await post(world, caller, max_tokens=None)
        assert response.status_code == 200, response.text
        assert response.headers["x-ratelimit-limit-requests"] == "7"
        assert world.worker.requests[-1].sampling.max_tokens == 9
        causes = {row.request_id: row.cause for row in await world.settled(caller, 3)}
        assert list(causes.values()).count(EndCause.NOT_STARTED) == 1
        assert causes[response.headers["x-request-id"]] is EndCause.COMPLETE
        await world.dispatcher_is_empty()


async def test_a_revoked_key_is_refused_at_once_when_told(
    postgres_url: str, valkey_url: str, tmp_path: Path
) -> None:
    async with a_world(postgres_url, valkey_url, tmp_path, poll_ms=60_000) as world:
        caller = await world.add_caller()
        assert (await post(world, caller)).status_code == 200
        async with world.postgres.transaction() as conn:
            revoked = await tenants.revoke_key(conn, caller.key_id)
        assert revoked is not None
        pusher = Dispatch(world.settings.redis_url, "pusher")
        await pusher.start()
        await pusher.push_versions(keys={(caller.tenant_id, caller.key_id): revoked.version})
        await pusher.close()
        assert (await post(world, caller)).status_code == 401
        await world.settled(caller, 2)


async def test_a_deadline_in_mid_stream_is_an_error_event(world: World, caller: Caller) -> None:
    world.worker.default = answers(300, gap_s=0.05)
    async with httpx.AsyncClient(base_url=world.url, timeout=30) as client:
        headers = {**headers_of(caller), "x-headworks-deadline-ms": "500"}
        response = await client.post(
            CHAT, json=a_body(CHAT, stream=True, max_tokens=300), headers=headers
        )
    told = check_openai_chat_stream(response.content, include_usage=False)
    assert told.error is not None
    assert told.error["code"] == "timeout"
    (row,) = await world.settled(caller, 1)
    assert row.cause is EndCause.EXPIRED
    assert row.billed_micro > 0
    await world.dispatcher_is_empty()


async def test_shutdown_lets_answers_end_and_cuts_what_does_not(
    world: World, caller: Caller
) -> None:
    world.worker.script = [answers(30, gap_s=0.01), answers(300, gap_s=0.05)]
    url = world.url
    short = asyncio.create_task(post(world, caller, stream=True))
    await until(lambda: len(world.worker.requests) == 1)
    body = a_body(CHAT, stream=True, max_tokens=300)
    long = asyncio.create_task(ask(url, CHAT, caller.key, body))
    await until(lambda: len(world.worker.requests) == 2)
    await asyncio.sleep(0.1)
    gateway = world.gateway
    await world.stop_gateway()
    told = check_openai_chat_stream((await short).content, include_usage=False)
    assert told.texts == [whole_text(30)]
    cut = await long
    told = check_openai_chat_stream(cut.body, include_usage=False)
    assert told.error is not None
    rows = await world.settled(caller, 2)
    assert [row.cause for row in rows] == [EndCause.COMPLETE, EndCause.FAILED]
    await world.dispatcher_is_empty()
    async with world.postgres.connection() as conn:
        found = await conn.execute("SELECT retired FROM gateways WHERE id = %s", (gateway.id,))
        assert (await found.fetchone()) == (True,)
    await world.start_gateway()
    assert (await post(world, caller)).status_code == 200


async def test_requests_under_way_are_bounded(
    postgres_url: str, valkey_url: str, tmp_path: Path
) -> None:
    async with a_world(postgres_url, valkey_url, tmp_path, exchanges_max=2) as world:
        caller = await world.add_caller()
        world.worker.default = answers(100, gap_s=0.02)
        running = [
            asyncio.create_task(post(world, caller, COMPLETIONS, max_tokens=100)) for _ in range(2)
        ]
        await until(lambda: len(world.worker.requests) == 2)
        for path, status in ((CHAT, 503), (MESSAGES, 529)):
            refused = await post(world, caller, path)
            assert refused.status_code == status
            assert "retry-after" in refused.headers
        for response in await asyncio.gather(*running):
            assert response.status_code == 200
        await world.settled(caller, 2)


async def test_heads_and_bodies_that_do_not_arrive(
    postgres_url: str, valkey_url: str, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {
        "head_timeout_ms": 300,
        "body_timeout_ms": 300,
        "head_bytes_max": 4_000,
    }
    async with a_world(postgres_url, valkey_url, tmp_path, **changes) as world:
        caller = await world.add_caller()
        host, port = world.url.removeprefix("http://").split(":")
        bearer = b"authorization: Bearer " + caller.key.encode() + b"\r\n"
        start = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
        for sent, status in (
            (b"", b"408"),
            (start, b"408"),
            (start + bearer + b"content-length: 10\r\n\r\n{", b"400"),
            (start + b"x-big: " + b"y" * 5_000, b"431"),
            (b"this is not HTTP\r\n\r\n", b"400"),
        ):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            async with asyncio.timeout(5):
                answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 " + status), (sent, answer)
            assert b"application/json" in answer
            writer.close()
        assert world.worker.requests == []


async def test_expect_100_continue_is_refused_before_a_large_body(
    world: World, caller: Caller
) -> None:
    host, port = world.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
        b"authorization: Bearer " + caller.key.encode() + b"\r\ncontent-length: 90000000\r\n\r\n"
    )
    async with asyncio.timeout(5):
        head, _ = await read_request(reader)
    assert head.startswith(b"HTTP/1.1 413 ")
    writer.close()


async def test_long_prompts_are_counted_in_a_thread(world: World, caller: Caller) -> None:
    content = "word " * 700  # over inline_chars
    ask_it = [{"role": "user", "content": content}]
    async with httpx.AsyncClient(base_url=world.url, timeout=30) as client:
        counted = await client.post(
            f"{MESSAGES}/count_tokens",
            json={"model": MODEL, "messages": ask_it},
            headers=headers_of(caller, MESSAGES),
        )
    assert counted.json()["input_tokens"] > 700
    assert world.worker.requests == []
    assert await world.usage(caller) == []
