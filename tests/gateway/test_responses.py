"""The Responses API through the official SDK: made, streamed, continued, read again, deleted."""

import asyncio
import base64
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from core.money import EndCause
from core.safety.policy import Policy, Rule, Terms
from core.safety.rulebook import Rulebook
from store import safety
from store.responses import delete_expired, put_policy
from tests.support.gateway_requests import error_of
from tests.support.gateway_world import MODEL, Caller, World, a_world, tiny_store, until_answered
from tests.support.responses_grammar import check_responses_stream
from tests.support.scripted_worker import answers, says, whole_text
from text.rules import TextRules

pytestmark = [pytest.mark.anyio, pytest.mark.services]

RESPONSES = "/v1/responses"
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    "strict": False,
}
CALLS = (
    *("Well", ".\n<tool", '_call>\n{"name": "weath', 'er", "arguments": {"at": '),
    *('"Bern"}}\n</', "tool_call>"),
)


def client_of(world: World, caller: Caller, gateway: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key=caller.key, base_url=f"{world.url_of(gateway)}/v1", max_retries=0
    )


async def send(
    world: World, caller: Caller, method: str, path: str, gateway: int = 0, **body: Any
) -> httpx.Response:
    async with httpx.AsyncClient(base_url=world.url_of(gateway), timeout=30) as client:
        headers = {"authorization": f"Bearer {caller.key}"}
        return await client.request(method, path, json=body or None, headers=headers)


def prompt_of(world: World) -> str:
    store, manifest = tiny_store()
    rules = TextRules.load(store.directory(manifest.version))
    return rules.decode(world.worker.requests[-1].prompt_ids)


async def test_the_sdk_gets_a_response_whole_and_streamed(world: World, caller: Caller) -> None:
    world.worker.default = answers(3)
    async with client_of(world, caller) as client:
        whole = await client.responses.create(model=MODEL, input="Hi", metadata={"k": "v"})
        async with client.responses.stream(model=MODEL, input="Hi", metadata={"k": "v"}) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_response()
    for response in (whole, streamed):
        assert response.output_text == whole_text(3)
        assert response.status == "completed"
        assert response.metadata == {"k": "v"}
        assert response.usage is not None
        assert response.usage.output_tokens == 3
        assert response.service_tier == "default"
        assert response.model_extra == {"store": True}
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    rows = await world.settled(caller, 2)
    assert [row.cause for row in rows] == [EndCause.COMPLETE] * 2


async def test_a_stream_is_legal_and_its_end_is_what_is_read_again(
    world: World, caller: Caller
) -> None:
    world.worker.default = says(*CALLS)
    sent = await send(
        world, caller, "POST", RESPONSES, model=MODEL, input="W?", stream=True, tools=[TOOL]
    )
    told = check_responses_stream(sent.content)
    assert told.status == "completed"
    assert [item["type"] for item in told.output] == ["message", "function_call"]
    read = await send(world, caller, "GET", f"{RESPONSES}/{told.id}")
    assert read.json() == told.response


# litellm #15740, #17814: re-reading a stored response was billed again.
async def test_reading_a_kept_response_again_costs_nothing(world: World, caller: Caller) -> None:
    async with client_of(world, caller) as client:
        made = await client.responses.create(model=MODEL, input="Hi")
        await world.settled(caller, 1)
        before = await world.balance(caller)
        for _ in range(5):
            read = await client.responses.retrieve(made.id)
            assert read.output_text == made.output_text
            await client.responses.input_items.list(made.id)
    assert len(await world.settled(caller, 1)) == 1
    assert await world.balance(caller) == before


async def test_a_conversation_goes_on_from_its_name_at_once(world: World, caller: Caller) -> None:
    world.worker.default = says("Blue", ".")
    async with client_of(world, caller) as client:
        first = await client.responses.create(
            model=MODEL, input="My colour?", instructions="Be brief."
        )
        async with client.responses.stream(
            model=MODEL, input="And yours?", previous_response_id=first.id
        ) as stream:
            async for event in stream:
                if event.type == "response.completed":  # before the stream's end is read
                    third = await client.responses.create(
                        model=MODEL, input="Why?", previous_response_id=event.response.id
                    )
    prompt = prompt_of(world)
    assert third.previous_response_id is not None
    places = [prompt.index(said) for said in ("My colour?", "Blue.", "And yours?", "Why?")]
    assert places == sorted(places)
    assert prompt.count("Blue.") == 2
    assert "Be brief." not in prompt  # instructions are of their own response alone


async def test_results_of_tools_are_sent_to_the_calls_before(world: World, caller: Caller) -> None:
    world.worker.default = says(*CALLS)
    async with client_of(world, caller) as client:
        first = await client.responses.create(model=MODEL, input="Weather?", tools=[TOOL])
        (call,) = [item for item in first.output if item.type == "function_call"]
        world.worker.default = says("Rain.")
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "wet"}
        last = await client.responses.create(
            model=MODEL, input=[result], previous_response_id=first.id
        )
        assert last.output_text == "Rain."
        assert "wet" in prompt_of(world)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(
                model=MODEL, input="Never mind.", previous_response_id=first.id
            )
    assert call.call_id in str(refused.value)


async def test_another_tenants_response_is_none(world: World, caller: Caller) -> None:
    made = (await send(world, caller, "POST", RESPONSES, model=MODEL, input="Hi")).json()
    other = await world.add_caller()
    name = made["id"]
    for method, path in (
        ("GET", f"{RESPONSES}/{name}"),
        ("GET", f"{RESPONSES}/{name}/input_items"),
        ("DELETE", f"{RESPONSES}/{name}"),
        ("POST", f"{RESPONSES}/{name}/cancel"),
    ):
        assert (await send(world, other, method, path)).status_code == 404
    continued = await send(
        world, other, "POST", RESPONSES, model=MODEL, input="Hi", previous_response_id=name
    )
    assert continued.status_code == 404
    assert error_of(continued)["param"] == "previous_response_id"
    assert (await send(world, caller, "GET", f"{RESPONSES}/{name}")).status_code == 200


async def test_what_is_deleted_is_in_no_prompt_any_more(world: World, caller: Caller) -> None:
    async with client_of(world, caller) as client:
        first = await client.responses.create(model=MODEL, input="A secret")
        second = await client.responses.create(
            model=MODEL, input="More", previous_response_id=first.id
        )
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError) as refused:
            await client.responses.create(model=MODEL, input="On", previous_response_id=second.id)
        assert first.id in str(refused.value)
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(first.id)


async def test_nothing_is_kept_that_is_not_to_be(world: World, caller: Caller) -> None:
    async with client_of(world, caller) as client:
        unkept = await client.responses.create(model=MODEL, input="Hi", store=False)
        assert unkept.model_extra == {"store": False}
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(unkept.id)
        kept = await client.responses.create(model=MODEL, input="Hi")
        async with world.postgres.transaction() as conn:
            assert await put_policy(conn, caller.tenant_id, keep=False) == 1
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(kept.id)
        refused = await client.responses.create(model=MODEL, input="Hi")
        assert refused.model_extra == {"store": False}
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(refused.id)


async def test_what_is_past_its_time_is_gone_before_it_is_swept(
    world: World, caller: Caller
) -> None:
    made = (await send(world, caller, "POST", RESPONSES, model=MODEL, input="Hi")).json()
    async with world.postgres.transaction() as conn:
        await conn.execute(b"UPDATE responses SET expires_at = now() WHERE id = %s", [made["id"]])
    assert (await send(world, caller, "GET", f"{RESPONSES}/{made['id']}")).status_code == 404
    async with world.postgres.transaction() as conn:
        assert await delete_expired(conn) == 1


async def test_input_items_are_told_in_pages(world: World, caller: Caller) -> None:
    said: Any = [{"role": "user", "content": f"number {i}"} for i in range(5)]
    async with client_of(world, caller) as client:
        made = await client.responses.create(model=MODEL, input=said)
        page: Any = client.responses.input_items.list(made.id, limit=2, order="asc")
        texts = [item.content[0].text async for item in page]
        newest: Any = await client.responses.input_items.list(made.id)
    assert texts == [f"number {i}" for i in range(5)]
    assert [item.content[0].text for item in newest.data] == texts[::-1]


async def test_a_count_is_the_prompt_that_is_billed(world: World, caller: Caller) -> None:
    async with client_of(world, caller) as client:
        first = await client.responses.create(model=MODEL, input="Hello there")
        asked: Any = {"model": MODEL, "input": "Go on", "previous_response_id": first.id}
        counted = await client.responses.input_tokens.count(**asked)
        made = await client.responses.create(**asked)
    assert made.usage is not None
    assert counted.input_tokens == made.usage.input_tokens
    assert len(await world.settled(caller, 2)) == 2


# ogx PR #5224: an error in a stream had the shape of an HTTP error.
async def test_an_error_in_a_stream_is_flat_and_ends_in_a_failed_response(
    world: World, caller: Caller
) -> None:
    world.worker.default = says("One ", "two ", "three", dies_after=2)
    sent = await send(world, caller, "POST", RESPONSES, model=MODEL, input="Hi", stream=True)
    told = check_responses_stream(sent.content)
    assert told.status == "failed"
    assert told.error is not None
    assert told.error["message"]
    read = await send(world, caller, "GET", f"{RESPONSES}/{told.id}")
    assert read.status_code == 404


async def test_an_answer_cut_short_says_why_and_can_be_continued(
    world: World, caller: Caller
) -> None:
    world.worker.default = answers(50)
    async with client_of(world, caller) as client:
        made = await client.responses.create(model=MODEL, input="Hi", max_output_tokens=4)
        assert made.status == "incomplete"
        assert made.incomplete_details is not None
        assert made.incomplete_details.reason == "max_output_tokens"
        assert made.output[0].status == "incomplete"
        await client.responses.create(model=MODEL, input="Go on", previous_response_id=made.id)
    assert whole_text(4).strip() in prompt_of(world)


async def test_two_gateways_know_the_same_responses(world: World, caller: Caller) -> None:
    await world.start_gateway()
    made = (await send(world, caller, "POST", RESPONSES, model=MODEL, input="Hi")).json()
    asked = {"model": MODEL, "input": "On", "previous_response_id": made["id"]}
    continued = await send(world, caller, "POST", RESPONSES, gateway=1, **asked)
    assert continued.status_code == 200, continued.text


async def test_a_client_that_leaves_leaves_nothing_kept(world: World, caller: Caller) -> None:
    world.worker.default = answers(200, gap_s=0.02)
    async with client_of(world, caller) as client:
        stream = await client.responses.create(model=MODEL, input="Hi", stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
    (row,) = await world.settled(caller, 1)
    assert row.cause is EndCause.CLIENT_CANCELLED
    async with world.postgres.connection() as conn:
        cursor = await conn.execute(
            b"SELECT count(*) FROM responses WHERE tenant_id = %s", [caller.tenant_id]
        )
        assert await cursor.fetchone() == (0,)


ODD = (
    ("GET", "", 405),
    ("PUT", "/{id}", 405),
    ("GET", "/{id}/cancel", 405),
    ("GET", "/{id}/else", 404),
    ("GET", "/{id}?stream=true", 400),
    ("GET", "/{id}?starting_after=1", 400),
    ("GET", "/{id}?more=1", 400),
    ("GET", "/{id}?include=reasoning.encrypted_content", 200),
    ("GET", "/{id}/input_items?limit=0", 400),
    ("GET", "/{id}/input_items?limit=0001000", 400),
    ("GET", "/{id}/input_items?order=up", 400),
    ("GET", "/{id}/input_items?after=x", 400),
    ("GET", "/" + "x" * 3000, 404),
    ("GET", "/", 404),
)


async def test_odd_requests_about_a_response(world: World, caller: Caller) -> None:
    made = (await send(world, caller, "POST", RESPONSES, model=MODEL, input="Hi")).json()
    for method, path, status in ODD:
        answer = await send(world, caller, method, RESPONSES + path.replace("{id}", made["id"]))
        assert answer.status_code == status, (method, path, answer.text)
    refused = await send(world, caller, "POST", f"{RESPONSES}/{made['id']}/cancel")
    assert refused.status_code == 400
    assert "background" in error_of(refused)["message"]


async def test_many_at_once_are_all_kept_or_say_that_they_are_not(
    world: World, caller: Caller
) -> None:
    made = await asyncio.gather(
        *(send(world, caller, "POST", RESPONSES, model=MODEL, input="Hi") for _ in range(12))
    )
    for response in made:
        body = response.json()
        read = await send(world, caller, "GET", f"{RESPONSES}/{body['id']}")
        assert (read.status_code == 200) is body["store"]


async def test_a_conversation_that_does_not_fit_loses_its_oldest_turns_if_asked(
    world: World, caller: Caller
) -> None:
    said: Any = []
    for i in range(12):
        said += [
            {"role": "user", "content": f"question{i} " + "word " * 20},
            {"role": "assistant", "content": f"answer{i}"},
        ]
    said.append({"role": "user", "content": "the last"})
    asked: Any = {"model": MODEL, "input": said, "instructions": "Be brief."}
    refused = await send(world, caller, "POST", RESPONSES, **asked)
    assert refused.status_code == 400
    assert error_of(refused)["code"] == "context_length_exceeded"
    async with client_of(world, caller) as client:
        made = await client.responses.create(truncation="auto", **asked)
        counted = await client.responses.input_tokens.count(truncation="auto", **asked)
    assert made.status in {"completed", "incomplete"}
    assert made.usage is not None
    assert counted.input_tokens == made.usage.input_tokens
    prompt = prompt_of(world)
    assert "Be brief." in prompt
    assert "the last" in prompt
    assert "question11" in prompt
    assert "question0" not in prompt
    page = await send(world, caller, "GET", f"{RESPONSES}/{made.id}/input_items?limit=100")
    assert len(page.json()["data"]) == len(said)  # what is left out is not forgotten


async def test_a_repeat_under_one_key_is_one_response_and_brings_back_none_that_was_deleted(
    world: World, caller: Caller
) -> None:
    async with client_of(world, caller) as client:
        asked: Any = {"model": MODEL, "input": "Hi"}
        keyed: Any = {"extra_headers": {"idempotency-key": "k1"}}
        first = await client.responses.create(**asked, **keyed)
        await world.settled(caller, 1)
        again = await client.responses.create(**asked, **keyed)
        assert again.id == first.id
        assert again.model_extra == {"store": True}
        async with client.responses.stream(**asked, **keyed) as stream:
            assert [event.type async for event in stream][-1] == "response.completed"
            assert (await stream.get_final_response()).output_text == first.output_text
        await client.responses.delete(first.id)
        last = await client.responses.create(**asked, **keyed)
        assert (last.id, last.model_extra) == (first.id, {"store": False})
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
    await world.settled(caller, 1)


async def test_a_repeat_is_answered_when_what_it_continued_was_deleted(
    world: World, caller: Caller
) -> None:
    async with client_of(world, caller) as client:
        before = await client.responses.create(model=MODEL, input="Hi")
        asked: Any = {"model": MODEL, "input": "Go on", "previous_response_id": before.id}
        first = await client.responses.create(**asked, extra_headers={"idempotency-key": "k2"})
        await world.settled(caller, 2)
        await client.responses.delete(before.id)
        again = await client.responses.create(**asked, extra_headers={"idempotency-key": "k2"})
        assert (again.id, again.output_text) == (first.id, first.output_text)
        assert again.previous_response_id == before.id
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(**asked, extra_headers={"idempotency-key": "k3"})
    assert len(world.worker.requests) == 2
    await world.settled(caller, 2)


async def test_what_is_kept_is_sealed_for_its_tenant_and_name(
    postgres_url: str, valkey_url: str, tmp_path: Path
) -> None:
    keys = ",".join(f"k{i}:{base64.b64encode(bytes([i]) * 32).decode()}" for i in (1, 2))
    async with a_world(postgres_url, valkey_url, tmp_path, responses_keys=keys) as world:
        caller = await world.add_caller()
        async with client_of(world, caller) as client:
            first = await client.responses.create(model=MODEL, input="sesame")
            second = await client.responses.create(
                model=MODEL, input="Go on", previous_response_id=first.id
            )
            assert "sesame" in prompt_of(world)
            async with world.postgres.transaction() as conn:
                cursor = await conn.execute(
                    b"SELECT body, key_id FROM responses WHERE id = %s", [first.id]
                )
                row = await cursor.fetchone()
                assert row is not None
                assert b"sesame" not in bytes(row[0])
                assert row[1] == "k1"
                await conn.execute(
                    b"UPDATE responses AS r SET body = o.body, nonce = o.nonce FROM responses AS o"
                    b" WHERE r.id = %s AND o.id = %s",
                    [second.id, first.id],
                )
            assert (await client.responses.retrieve(first.id)).output_text == first.output_text
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(second.id)


async def test_what_is_large_is_kept_and_what_is_too_large_says_that_it_is_not(
    world: World, caller: Caller
) -> None:
    async with client_of(world, caller) as client:
        before = time.time()
        asked: Any = {"model": MODEL, "truncation": "auto"}
        large: Any = [{"role": "user", "content": "x" * 200_000}, {"role": "user", "content": "y"}]
        made = await client.responses.create(input=large, **asked)
        assert made.model_extra == {"store": True}
        assert made.completed_at is not None
        assert int(before) <= made.completed_at <= time.time()
        page: Any = await client.responses.input_items.list(made.id, order="asc")
        assert len(page.data[0].content[0].text) == 200_000
        huge: Any = [{"role": "user", "content": "x" * 9_000_000}, *large[1:]]
        unkept = await client.responses.create(input=huge, **asked)
        assert unkept.model_extra == {"store": False}


async def test_what_is_kept_of_a_screened_answer_is_what_was_told(
    world: World, caller: Caller
) -> None:
    rule = Rule(
        name="terms", stages=("output",), detector=Terms(terms=("swordfish",)), action="mask"
    )
    policy = Policy(rules=(rule,))
    async with world.postgres.transaction() as conn:
        await safety.put_policy(conn, "masked-responses", policy, Rulebook(policy).hold_chars)
        assigned = safety.Assignment(policy="masked-responses", version=None, keep_text=False)
        await safety.assign_policy(conn, caller.tenant_id, assigned)
    world.worker.default = says("The word is sword", "fish, they say.")

    async def is_masked() -> bool:
        made = await send(world, caller, "POST", RESPONSES, model=MODEL, input="Word?")
        return "swordfish" not in made.text

    await until_answered(is_masked)
    async with client_of(world, caller) as client:
        async with client.responses.stream(model=MODEL, input="Word?") as stream:
            told = (await stream.get_final_response()).output_text
            name = (await stream.get_final_response()).id
        assert "swordfish" not in told
        assert "they say." in told
        assert (await client.responses.retrieve(name)).output_text == told
        await client.responses.create(model=MODEL, input="Again.", previous_response_id=name)
    assert "swordfish" not in prompt_of(world)
