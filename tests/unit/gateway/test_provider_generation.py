"""A generation at a provider that misbehaves, is left, costs too much, or is too late."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from core.errors import Code
from core.money import EndCause
from core.protocol import Usage
from core.providers import key_context
from gateway.conversation import ChoiceEnd, Delta, Opened
from gateway.relay.provider_generation import ProviderGeneration
from tests.support.provider_world import (
    KEY,
    RING,
    FakeHold,
    ProviderWorld,
    a_provider,
    asked,
    run,
    says,
)

pytestmark = pytest.mark.anyio

SAY = {"messages": [{"role": "user", "content": "Hi"}]}
USAGE = '"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}'


def chunk(text: str = "", finish: str | None = None) -> str:
    end = "null" if finish is None else f'"{finish}"'
    choice = f'{{"index":0,"delta":{{"content":"{text}"}},"finish_reason":{end}}}'
    return f'data: {{"choices":[{choice}]}}\n\n'


WHOLE = chunk("One ") + chunk("two") + chunk(finish="stop")
TAIL = f'data: {{"choices":[],{USAGE}}}\n\ndata: [DONE]\n\n'


def slowly(*pieces: str, hang: bool = True):
    """Pieces, and then nothing more for ever."""
    gone = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        try:
            for piece in pieces:
                yield piece.encode()
            if hang:
                await asyncio.Event().wait()
        finally:
            gone.set()

    answer = lambda request: httpx.Response(  # noqa: E731 - one answer, said in place
        200, headers={"content-type": "text/event-stream"}, content=body()
    )
    return answer, gone


async def until_text(generation) -> None:
    async with asyncio.timeout(5):
        while not generation.begun:  # noqa: ASYNC110 - it is looked at, as a router does
            await asyncio.sleep(0)


async def test_a_request_is_sent_with_our_key_and_only_ours() -> None:
    world = ProviderWorld(says(WHOLE + TAIL))
    got = await run(world.generation(asked(SAY), a_provider()))
    (request,) = world.requests
    assert str(request.url) == "https://api.acme.test/v1/chat/completions"
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert got.outcome.cause is EndCause.COMPLETE
    assert got.text == "One two"
    assert got.generation.usage == Usage(prompt_tokens=7, output_tokens=3)
    assert world.ticket.tokens > 0
    timings = got.generation.timings(0.0, 5.0)
    assert timings.queue_ms is not None
    assert timings.first_token_ms is not None


async def test_an_error_event_in_the_middle_ends_the_answer_with_an_error() -> None:
    # Portkey-AI/gateway#1797: errors within a stream were dropped, and it ended as if whole.
    error = 'data: {"error":{"message":"overloaded","type":"server_error","code":"503"}}\n\n'
    for body in (WHOLE[: len(chunk("One "))] + error, chunk("One ") + error + "data: [DONE]\n\n"):
        got = await run(ProviderWorld(says(body)).generation(asked(SAY), a_provider()))
        assert got.text == "One "
        assert got.outcome.cause is EndCause.FAILED
        assert got.refusal.code is Code.OVERLOADED
        assert not any(isinstance(event, ChoiceEnd) for event in got.events)


@pytest.mark.parametrize(
    "body",
    [
        chunk("One ") + "data: [DONE]\n\n",
        chunk("One "),
        chunk("One ") + "data: {not json}\n\n",
        chunk("One ") + chunk(finish="because"),
        chunk("One ") + chunk(finish="stop") + chunk("more"),
        chunk("One ") + "data: \xff\n\n",
        chunk("One ") + 'data: {"choices":[{"index":7,"delta":{"content":"x"}}]}\n\n',
    ],
)
async def test_an_answer_that_is_none_is_an_error_after_what_came(body: str) -> None:
    world = ProviderWorld(says(body.encode("latin-1")))
    got = await run(world.generation(asked(SAY), a_provider()))
    assert got.text == "One "
    assert got.outcome.cause is EndCause.FAILED
    assert got.refusal.code is Code.INTERNAL
    assert got.replica == "provider:acme:estimated"


async def test_a_stream_without_its_terminator_but_with_every_end_is_whole() -> None:
    got = await run(ProviderWorld(says(WHOLE)).generation(asked(SAY), a_provider()))
    assert got.outcome.cause is EndCause.COMPLETE


async def test_a_connection_left_open_after_the_last_word_delays_nobody_for_long() -> None:
    answer, gone = slowly(WHOLE + TAIL)
    async with asyncio.timeout(5):
        got = await run(ProviderWorld(answer).generation(asked(SAY), a_provider()))
    assert got.outcome.cause is EndCause.COMPLETE
    assert gone.is_set()


async def test_a_whole_answer_to_a_request_for_a_stream_is_an_answer() -> None:
    body = '{"choices":[{"message":{"content":"Hi"},"finish_reason":"length"}],' + USAGE + "}"
    got = await run(
        ProviderWorld(says(body, content_type="application/json")).generation(
            asked(SAY), a_provider()
        )
    )
    assert got.outcome.cause is EndCause.LENGTH
    assert got.events[0] == Opened(prompt_tokens=7)
    assert got.events[1] == Delta(choice=0, text="Hi")


async def test_what_the_provider_filtered_is_told_as_filtered() -> None:
    got = await run(
        ProviderWorld(says(chunk(finish="content_filter"))).generation(asked(SAY), a_provider())
    )
    assert got.outcome.cause is EndCause.FILTERED
    assert got.events[-1] == ChoiceEnd(choice=0, finish="filtered")


# The client leaves.


async def cancelled(world: ProviderWorld, provider) -> ProviderGeneration:
    generation = world.generation(asked(SAY), provider)
    running = asyncio.create_task(generation.run())
    await until_text(generation)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    async with asyncio.timeout(5):
        await generation.stop()
    return generation


async def test_a_client_that_leaves_ends_the_providers_work_and_is_billed_what_came() -> None:
    # BerriAI/litellm#14457, #33736: nothing was counted when the client left.
    answer, gone = slowly(chunk("One two three four five six"))
    generation = await cancelled(ProviderWorld(answer), a_provider())
    assert gone.is_set()
    (total,) = generation.totals
    assert total.replica_id == "provider:acme:estimated"
    assert 4 <= total.usage.output_tokens <= 12
    assert total.usage.prompt_tokens > 0


async def test_a_drained_stream_is_billed_as_the_provider_does() -> None:
    # BerriAI/litellm#36008: the upstream has to be read on for its usage.
    answer, _ = slowly(chunk("One "), "", chunk("two"), chunk(finish="stop") + TAIL, hang=False)
    generation = await cancelled(ProviderWorld(answer), a_provider(cut_usage="drain"))
    (total,) = generation.totals
    assert total.replica_id == "provider:acme:drained"
    assert total.usage == Usage(prompt_tokens=7, output_tokens=3)


async def test_a_drain_is_bounded_and_then_estimated() -> None:
    answer, gone = slowly(chunk("One "))
    generation = await cancelled(ProviderWorld(answer), a_provider(cut_usage="drain", drain_ms=50))
    assert gone.is_set()
    (total,) = generation.totals
    assert total.replica_id == "provider:acme:estimated"


async def test_one_that_leaves_before_any_answer_has_cost_nothing_and_lets_the_guard_go() -> None:
    never = asyncio.Event()

    async def wait(request: httpx.Request) -> httpx.Response:
        await never.wait()
        raise AssertionError

    world = ProviderWorld(wait)
    generation = world.generation(asked(SAY), a_provider(concurrency=1))
    running = asyncio.create_task(generation.run())
    while not world.requests:  # noqa: ASYNC110 - httpx calls the test's transport without a word
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await generation.stop()
    await generation.stop()  # again is harmless
    assert generation.totals == []
    assert generation.witnesses(1) == ()
    assert world.providers.guard(a_provider(concurrency=1)).running == 0


# Money and time.


async def test_an_answer_that_cannot_be_paid_any_further_ends_with_length() -> None:
    answer, gone = slowly(chunk("One two three four five six"))
    world = ProviderWorld(answer)
    got = await run(world.generation(asked(SAY), a_provider(), hold=FakeHold(tokens=2)))
    assert got.outcome == msgspec.structs.replace(got.outcome, cause=EndCause.LENGTH)
    assert got.events[-1] == ChoiceEnd(choice=0, finish="length")
    assert gone.is_set()


async def test_a_deadline_ends_it_and_does_not_drain() -> None:
    answer, gone = slowly(chunk("One "))
    world = ProviderWorld(answer)
    provider = a_provider(cut_usage="drain", drain_ms=60_000)
    async with asyncio.timeout(5):
        got = await run(world.generation(asked(SAY), provider, deadline_ms=50))
    assert got.outcome.cause is EndCause.EXPIRED
    assert got.refusal.code is Code.TIMEOUT
    assert gone.is_set()


async def test_a_checkpoint_says_too_little_rather_than_too_much() -> None:
    answer, _ = slowly(chunk("One two three four five six"))
    world = ProviderWorld(answer)
    generation = world.generation(asked(SAY), a_provider())
    running = asyncio.create_task(generation.run())
    await until_text(generation)
    (witness,) = generation.witnesses(5)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await generation.stop()
    (total,) = generation.totals
    assert 0 < witness.usage.output_tokens < total.usage.output_tokens
    assert 0 < witness.usage.prompt_tokens < total.usage.prompt_tokens


# Refusals and failures.


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (429, Code.OVERLOADED, "capacity"),
        (529, Code.OVERLOADED, "capacity"),
        (503, Code.OVERLOADED, "capacity"),
        (500, Code.UNAVAILABLE, "error"),
        (504, Code.TIMEOUT, "timeout"),
        (401, Code.UNAVAILABLE, "error"),
        (302, Code.UNAVAILABLE, "error"),
    ],
)
async def test_a_refusal_is_ours_to_tell_and_the_routers_to_act_on(status, code, kind) -> None:
    world = ProviderWorld(says("{}", status, retry_after="7", location="https://evil.test"))
    got = await run(world.generation(asked(SAY), a_provider()))
    assert got.outcome.cause is EndCause.NOT_STARTED
    assert got.outcome.fallback == kind
    assert got.refusal.code is code
    assert got.refusal.retry_after_ms == (7_000 if kind == "capacity" else None)
    assert len(world.requests) == 1  # redirects are not followed
    told = f'provider_faults_total{{kind="{kind}",provider="acme"}} 1.0'
    assert told in world.metrics.text().decode()


async def test_a_key_that_is_not_taken_is_not_sent_again_until_something_changes() -> None:
    world = ProviderWorld(says('{"error":{"message":"bad key"}}', 401))
    provider = a_provider()
    for _ in range(3):
        got = await run(world.generation(asked(SAY), provider))
        assert got.refusal.code is Code.UNAVAILABLE
        assert "key" not in got.refusal.message
    assert len(world.requests) == 1
    assert world.providers.dead_keys == ("acme",)
    world.answer = says(WHOLE + TAIL)
    changed = msgspec.structs.replace(provider, version=2)
    assert (await run(world.generation(asked(SAY), changed))).outcome.whole
    assert not world.providers.dead_keys


async def test_a_key_sealed_for_another_address_is_never_sent() -> None:
    world = ProviderWorld(says(WHOLE))
    moved = msgspec.structs.replace(a_provider(), base_url="https://evil.test/v1")
    got = await run(world.generation(asked(SAY), moved))
    assert got.refusal.code is Code.UNAVAILABLE
    assert not world.requests
    assert got.generation.fault is not None
    assert got.generation.fault.ours


async def test_a_job_of_before_a_change_keeps_its_address_and_its_key() -> None:
    world = ProviderWorld(says(WHOLE))
    old = a_provider()
    url = "https://elsewhere.test/v1"
    other = RING.seal("sk-other", context=key_context("acme", "openai", url), nonce=b"1" * 12)
    new = msgspec.structs.replace(old, base_url=url, key=other, version=2)
    for provider in (old, new, old):
        await run(world.generation(asked(SAY), provider))
    assert [request.headers["authorization"] for request in world.requests] == [
        f"Bearer {KEY}", "Bearer sk-other", f"Bearer {KEY}",
    ]  # fmt: skip
    assert [request.url.host for request in world.requests] == [
        "api.acme.test", "elsewhere.test", "api.acme.test",
    ]  # fmt: skip


async def test_a_provider_without_a_key_is_sent_none() -> None:
    world = ProviderWorld(says(WHOLE))
    await run(world.generation(asked(SAY), msgspec.structs.replace(a_provider(), key=None)))
    assert "authorization" not in world.requests[0].headers


async def test_failures_in_a_row_open_the_breaker_and_callers_faults_do_not() -> None:
    world = ProviderWorld(
        says('{"error":{"message":"no","type":"invalid_request_error","param":"x"}}', 400)
    )
    provider = a_provider(failures=2, cooldown_ms=60_000)
    for _ in range(4):
        got = await run(world.generation(asked(SAY), provider))
        assert (got.refusal.code, got.refusal.param) == (Code.BAD_REQUEST, "x")
        assert got.outcome.fallback is None
    world.answer = says("oops", 500)
    for _ in range(4):
        got = await run(world.generation(asked(SAY), provider))
        assert got.outcome.fallback == "error"
    assert len(world.requests) == 6
    assert got.refusal.retry_after_ms is not None


async def test_more_at_once_than_the_provider_may_have_are_told_to_go_elsewhere() -> None:
    answer, _ = slowly(chunk("One "))
    world = ProviderWorld(answer)
    provider = a_provider(concurrency=1)
    first = world.generation(asked(SAY), provider)
    running = asyncio.create_task(first.run())
    await until_text(first)
    got = await run(world.generation(asked(SAY), provider, request_id="req_local_2"))
    assert (got.outcome.fallback, len(world.requests)) == ("capacity", 1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await first.stop()
    assert await world.parts.endings.drain(5) == 0
    world.answer = says(WHOLE)
    assert (await run(world.generation(asked(SAY), provider))).outcome.whole


async def test_a_minute_has_so_many_requests_and_one_never_sent_is_none_of_them() -> None:
    world = ProviderWorld(says(WHOLE))
    provider = a_provider(requests_per_min=2)
    unsent = world.parts.place(provider, "req_local_unsent")
    assert await unsent.enter() is None
    assert await unsent.enter() is None, "it is inside"
    unsent.leave("unknown")
    assert await world.parts.endings.drain(5) == 0
    for n in range(2):
        assert (await run(world.generation(asked(SAY), provider, request_id=f"r{n}"))).outcome.whole
    assert await world.parts.endings.drain(5) == 0
    got = await run(world.generation(asked(SAY), provider, request_id="r2"))
    assert (got.outcome.fallback, got.refusal.retry_after_ms) == ("capacity", 30_000)
    assert world.providers.guard(provider).running == 0
    world.now_ms += 30_000
    assert (await run(world.generation(asked(SAY), provider, request_id="r3"))).outcome.whole
    assert len(world.requests) == 3


async def test_a_probe_that_the_limits_refuse_leaves_the_next_one_free() -> None:
    world = ProviderWorld(says("oops", 500))
    provider = a_provider(requests_per_min=1, failures=1, cooldown_ms=1)
    await run(world.generation(asked(SAY), provider))
    await asyncio.sleep(0.002)  # past the cooldown
    got = await run(world.generation(asked(SAY), provider, request_id="r1"))
    assert got.outcome.fallback == "capacity"
    world.now_ms += 60_000
    world.answer = says(WHOLE)
    assert (await run(world.generation(asked(SAY), provider, request_id="r2"))).outcome.whole


@pytest.mark.parametrize(
    ("error", "code", "sent"),
    [
        (httpx.ConnectError("refused"), Code.UNAVAILABLE, 1),
        (httpx.ConnectTimeout("late"), Code.UNAVAILABLE, 1),
        (httpx.ReadTimeout("late"), Code.TIMEOUT, 1),
        (httpx.PoolTimeout("full"), Code.OVERLOADED, 1),
        (httpx.RemoteProtocolError("closed"), Code.UNAVAILABLE, 2),
        (httpx.ProxyError("none"), Code.UNAVAILABLE, 1),
    ],
)
async def test_a_connection_that_fails_is_never_the_callers(error, code, sent) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise error

    world = ProviderWorld(fail)
    got = await run(world.generation(asked(SAY), a_provider()))
    assert got.refusal.code is code
    assert got.outcome.cause is EndCause.NOT_STARTED
    assert len(world.requests) == sent


async def test_an_old_connection_that_was_closed_is_tried_once_more() -> None:
    def fail_once(request: httpx.Request) -> httpx.Response:
        if len(world.requests) == 1:
            raise httpx.ReadError("closed")
        return says(WHOLE)(request)

    world = ProviderWorld(fail_once)
    assert (await run(world.generation(asked(SAY), a_provider()))).outcome.whole


async def test_a_timeout_within_the_answer_and_a_fault_of_ours_end_it() -> None:
    for error, code in ((httpx.ReadTimeout("x"), Code.TIMEOUT), (KeyError("x"), Code.INTERNAL)):

        async def body(error: Exception = error) -> AsyncIterator[bytes]:
            yield chunk("One ").encode()
            raise error

        def answer(request: httpx.Request, body=body) -> httpx.Response:
            return httpx.Response(
                200, headers={"content-type": "text/event-stream"}, content=body()
            )

        got = await run(ProviderWorld(answer).generation(asked(SAY), a_provider()))
        assert got.text == "One "
        assert got.refusal.code is code
        assert got.outcome.cause is EndCause.FAILED


async def test_a_refusal_without_end_and_an_answer_without_end_are_not_held() -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65536

    for status in (500, 200):

        def answer(request: httpx.Request, status=status) -> httpx.Response:
            return httpx.Response(
                status, headers={"content-type": "application/json"}, content=endless()
            )

        async with asyncio.timeout(20):
            got = await run(ProviderWorld(answer).generation(asked(SAY), a_provider()))
        assert not got.outcome.whole


async def test_what_has_left_the_view_is_forgotten_when_it_is_idle() -> None:
    world = ProviderWorld(says(WHOLE))
    provider = a_provider()
    await run(world.generation(asked(SAY), provider))
    guard = world.providers.guard(provider)
    world.providers.forget(["acme"])
    assert world.providers.guard(provider) is guard
    world.providers.forget([])
    assert world.providers.guard(provider) is not guard
    await world.providers.close()
    assert RING.sealing_id == "k1"
