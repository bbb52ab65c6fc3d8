"""`python -m gateway` as a process: on uvloop, with signals, and when it cannot start."""

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from pathlib import Path

import httpx
import msgspec
import pytest

from core.money import EndCause
from core.settings import env_name
from gateway.settings import GatewaySettings
from tests.support.client import ask
from tests.support.gateway_requests import CHAT, a_body
from tests.support.gateway_world import Caller, World, until, until_answered
from tests.support.openai_grammar import check_openai_chat_stream
from tests.support.scripted_worker import answers, whole_text
from tests.support.services import free_port

pytestmark = [pytest.mark.anyio, pytest.mark.services]

ROOT = Path(__file__).parents[2]


def environment(settings: GatewaySettings, **changes: str) -> dict[str, str]:
    values = {
        env_name(field.name): str(getattr(settings, field.name))
        for field in msgspec.structs.fields(settings)
    }
    return {**os.environ, **values, **{env_name(k): v for k, v in changes.items()}}


async def run(environ: dict[str, str]) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gateway",
        cwd=ROOT,
        env=environ,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def ended(process: Process) -> tuple[int | None, str]:
    async with asyncio.timeout(40):
        _, stderr = await process.communicate()
    return process.returncode, stderr.decode()


async def is_ready(url: str) -> bool:
    async with httpx.AsyncClient() as client:
        try:
            return (await client.get(f"{url}/health/ready")).status_code == 200
        except httpx.TransportError:
            return False


async def test_it_serves_streams_and_stops_on_a_signal(world: World, caller: Caller) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = await run(environment(world.settings, gateway_port=str(port)))
    try:
        await until_answered(lambda: is_ready(url), within_s=30)
        world.worker.default = answers(30, gap_s=0.01)
        body = a_body(CHAT, stream=True)
        replies = await asyncio.gather(*(ask(url, CHAT, caller.key, body) for _ in range(8)))
        for reply in replies:
            told = check_openai_chat_stream(reply.body, include_usage=False)
            assert told.texts == [whole_text(30)]
        last = asyncio.create_task(ask(url, CHAT, caller.key, body))
        await until(lambda: len(world.worker.requests) == 9)
        process.send_signal(signal.SIGTERM)
        told = check_openai_chat_stream((await last).body, include_usage=False)
        assert told.texts == [whole_text(30)]
        code, stderr = await ended(process)
        assert code == 0, stderr
        assert '"level": "error"' not in stderr, stderr
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    rows = await world.settled(caller, 9)
    assert {row.cause for row in rows} == {EndCause.COMPLETE}
    await world.dispatcher_is_empty()


async def test_a_bad_setting_is_named(world: World) -> None:
    bad: list[tuple[dict[str, str], str]] = [
        ({"database_url": ""}, "HEADWORKS_DATABASE_URL is not set"),
        ({"gateway_port": "many"}, "HEADWORKS_GATEWAY_PORT"),
        ({"internal_secret": "short"}, "HEADWORKS_INTERNAL_SECRET is shorter than 16 bytes"),
        ({"lease_ms": "0"}, "HEADWORKS_LEASE_MS must be at least 1"),
    ]
    for changes, told in bad:
        environ = environment(world.settings, **changes)
        environ.pop("DATABASE_URL", None)
        code, stderr = await ended(await run(environ))
        assert (code, told in stderr) == (2, True), stderr


async def test_a_taken_port_and_an_absent_database_end_it_with_the_reason(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, stderr = await ended(await run(environment(world.settings, gateway_port=port)))
    assert code == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in stderr
    absent = environment(
        world.settings,
        database_url=f"postgresql://127.0.0.1:{free_port()}/none",
        start_timeout_ms="500",
    )
    code, stderr = await ended(await run(absent))
    assert code == 1
    assert "the gateway cannot start" in stderr
