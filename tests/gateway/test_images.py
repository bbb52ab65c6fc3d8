"""Images through a real gateway, sent by the official SDKs: carried, led elsewhere, or refused."""

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from core.route_table import Condition, Fallback, Target
from tests.gateway.test_providers import HOUSE, KEYS, SAID, by_dialect, lead_to
from tests.gateway.test_route_tables import put
from tests.support.both_sdks import SDKs
from tests.support.gateway_requests import CHAT, a_body, headers_of
from tests.support.gateway_world import DEPLOYMENT, MODEL, Caller, World, a_world
from tests.support.provider_server import ProviderServer, refusal

pytestmark = [pytest.mark.anyio, pytest.mark.services]

BYTES_MAX = 64
PNG = b"\x89PNG\r\n\x1a\n" + bytes(BYTES_MAX - 8)
DATA = base64.b64encode(PNG).decode()
FAR = "https://pictures.example/cat.png"
THEIRS: Any = {"provider": "acme-openai", "model": "smollm2", "context_tokens": 9_000}

CHAT_PARTS: Any = [
    {"type": "text", "text": "What is that?"},
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DATA}"}},
    {"type": "image_url", "image_url": {"url": FAR}},
]
BLOCKS: Any = [
    {"type": "text", "text": "What is that?"},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}},
    {"type": "image", "source": {"type": "url", "url": FAR}},
]
ITEMS: Any = [
    {"type": "input_text", "text": "What is that?"},
    {"type": "input_image", "detail": "auto", "image_url": f"data:image/png;base64,{DATA}"},
    {"type": "input_image", "detail": "auto", "image_url": FAR},
]


@pytest.fixture
async def world(postgres_url: str, valkey_url: str, tmp_path: Path) -> AsyncIterator[World]:
    limits = {"image_bytes_max": BYTES_MAX, "images_max": 3}
    async with a_world(postgres_url, valkey_url, tmp_path, provider_keys=KEYS, **limits) as made:
        yield made


@pytest.fixture
async def sdks(world: World, caller: Caller) -> AsyncIterator[SDKs]:
    async with SDKs(world, caller) as made:
        yield made


@pytest.fixture
async def server() -> AsyncIterator[ProviderServer]:
    async with ProviderServer(by_dialect("plain")) as made:
        yield made


def user(parts: Any) -> Any:
    return [{"role": "user", "content": parts}]


async def chat(sdks: SDKs, model: str, parts: Any = CHAT_PARTS) -> str:
    answer = await sdks.openai.chat.completions.create(model=model, messages=user(parts))
    return str(answer.choices[0].message.content)


async def message(sdks: SDKs, model: str) -> str:
    answer = await sdks.anthropic.messages.create(model=model, messages=user(BLOCKS), max_tokens=50)
    return "".join(getattr(block, "text", "") for block in answer.content)


async def response(sdks: SDKs, model: str, items: Any = ITEMS, **more: Any) -> Any:
    return await sdks.openai.responses.create(model=model, input=user(items), **more)


async def test_images_come_to_either_dialect_from_every_interface(
    world: World, caller: Caller, sdks: SDKs, server: ProviderServer
) -> None:
    for dialect, parts in (("openai", CHAT_PARTS), ("anthropic", BLOCKS)):
        await lead_to(world, server, dialect)
        assert (await chat(sdks, HOUSE)).startswith(SAID)
        assert (await message(sdks, HOUSE)).startswith(SAID)
        first = await response(sdks, HOUSE)
        assert first.output_text.startswith(SAID)
        for body in server.bodies:
            assert body["messages"] == user(parts)
        server.bodies.clear()
        again = await response(sdks, HOUSE, "And now?", previous_response_id=first.id)
        assert again.output_text.startswith(SAID)
        assert server.bodies.pop()["messages"][0] == user(parts)[0]
    rows = await world.settled(caller, 8)
    assert all(row.prompt_tokens > 3_200 for row in rows)  # two images, by estimate
    assert {row.metered_prompt_tokens for row in rows} == {34}  # as the provider tells
    await world.dispatcher_is_empty()


async def test_our_own_models_refuse_images_by_part_and_name_before_anything_is_held(
    world: World, caller: Caller, sdks: SDKs
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(sdks, MODEL)
    assert refused.value.param == "messages[0].content[1].image_url"
    assert refused.value.code == "unsupported_parameter"
    assert f"'{MODEL}' takes no images" in refused.value.message
    with pytest.raises(anthropic.BadRequestError) as also:
        await message(sdks, MODEL)
    assert "messages.0.content.1.source: the model 'tiny'" in str(also.value)
    with pytest.raises(openai.BadRequestError) as refused:
        await response(sdks, MODEL)
    assert refused.value.param == "input[0].content[1].image_url"
    with pytest.raises(anthropic.BadRequestError):
        await sdks.anthropic.messages.count_tokens(model=MODEL, messages=user(BLOCKS))
    with pytest.raises(openai.BadRequestError):
        await sdks.openai.responses.input_tokens.count(model=MODEL, input=user(ITEMS))
    assert world.worker.requests == []
    assert await world.usage(caller) == []
    await world.dispatcher_is_empty()


async def test_images_go_to_the_targets_and_fallbacks_that_take_them(
    world: World, sdks: SDKs, server: ProviderServer, caplog: pytest.LogCaptureFixture
) -> None:
    await lead_to(world, server, "openai")
    ours, theirs = Target(deployment=DEPLOYMENT, weight=99), Target(**THEIRS)
    meant = Target(**THEIRS, when=Condition(images=True))
    spare = Fallback(on=("images",), target=theirs)
    for table in (
        {"targets": (ours, theirs)},
        {"targets": (Target(deployment=DEPLOYMENT, when=Condition(images=False)), meant)},
        {"targets": (ours,), "fallbacks": (spare,)},
    ):
        await put(world, HOUSE, **table)
        assert (await chat(sdks, HOUSE)).startswith(SAID)
        count = await sdks.anthropic.messages.count_tokens(model=HOUSE, messages=user(BLOCKS))
        assert count.input_tokens > 3_200
    assert len(server.bodies) == 3
    assert (await chat(sdks, HOUSE, "Hello")).startswith("w0.0")
    for table in (
        {"targets": (ours,), "fallbacks": (Fallback(on=("capacity",), target=theirs),)},
        {"targets": (theirs,), "fallbacks": (Fallback(on=("error",), target=ours),)},
    ):
        await put(world, HOUSE, **table)
        server.answer = lambda body: refusal(500, message=f"cannot fetch {FAR}")
        with pytest.raises(openai.APIStatusError):
            await chat(sdks, HOUSE)
    assert len(world.worker.requests) == 1  # what had no image
    assert caplog.records
    assert not any(FAR in str(vars(record)) for record in caplog.records)


async def test_a_setting_of_a_provider_keeps_addresses_or_images_from_it(
    world: World, caller: Caller, sdks: SDKs, server: ProviderServer
) -> None:
    await lead_to(world, server, "openai", images="data")
    assert (await chat(sdks, HOUSE, CHAT_PARTS[:2])).startswith(SAID)
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(sdks, HOUSE)
    assert refused.value.param == "messages[0].content[2].image_url"
    await lead_to(world, server, "openai", images="none")
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(sdks, HOUSE)
    assert f"the model '{HOUSE}' takes no images" in refused.value.message
    assert len(server.bodies) == 1


async def test_images_are_bounded_in_size_and_number(
    world: World, caller: Caller, sdks: SDKs, server: ProviderServer
) -> None:
    await lead_to(world, server, "openai")
    large = base64.b64encode(PNG + b"x").decode()
    part: Any = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{large}"}}
    for parts, param in (
        ([part], "messages[0].content[0].image_url"),
        ([CHAT_PARTS[1]] * 4, "messages[0].content[3].image_url"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await chat(sdks, HOUSE, parts)
        assert refused.value.param == param
    with pytest.raises(anthropic.BadRequestError):
        await sdks.anthropic.messages.count_tokens(model=HOUSE, messages=user(BLOCKS[1:] * 2))
    with pytest.raises(openai.BadRequestError):
        await sdks.openai.responses.input_tokens.count(model=HOUSE, input=user(ITEMS[1:] * 2))
    assert server.bodies == []


async def test_another_image_is_another_request_for_an_idempotency_key(
    world: World, caller: Caller, server: ProviderServer
) -> None:
    await lead_to(world, server, "openai")
    other = base64.b64encode(PNG[:-1] + b"x").decode()
    headers = headers_of(caller) | {"idempotency-key": "k"}
    async with httpx.AsyncClient(base_url=world.url, timeout=30) as client:
        told = []
        for data in (DATA, DATA, other):
            part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
            body = a_body(CHAT, model=HOUSE, messages=user([part]))
            told.append(await client.post(CHAT, json=body, headers=headers))
            await world.settled(caller, 1)
    assert [answer.status_code for answer in told] == [200, 200, 422]
    assert told[1].headers["x-headworks-replayed"] == "true"
    assert len(server.bodies) == 1
