"""Clients that leave the real worker at random stages, and a gateway that dies in the middle.

Stages: before a byte is sent, in the middle of the request, with it just sent, while queued, in
prefill, at the head, at some chunk, at the last byte. Afterwards nothing is held by anyone.
"""

import asyncio
import json
import random
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

from tests.support.client import HEAD_END, _request
from tests.support.stack import MODEL, Stack

STAGES = ("connected", "half sent", "sent", "waiting", "head", "chunk", "late chunk", "end")
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages")
AT_ONCE = 16
WAIT_S = 60.0


async def abandon(stack: Stack, *, aborts: int, seed: int) -> Counter[str]:
    """So many, half of them before a gateway is killed; returns how many left at each stage."""
    rng, left, gate = random.Random(seed), Counter[str](), asyncio.Semaphore(AT_ONCE)
    done = 0

    async def one(number: int) -> None:
        nonlocal done
        draw = random.Random(f"{seed} {number}")
        async with gate:
            stage = STAGES[number % len(STAGES)]
            left[await _leave(stack, draw, number, stage)] += 1
        done += 1
        if done == aborts // 2:
            stack.kill(rng.choice(("gateway", "gateway-2")))

    await asyncio.gather(*(one(number) for number in range(aborts)))
    await asyncio.to_thread(stack.wait_ready)
    return left


async def _leave(stack: Stack, rng: random.Random, number: int, stage: str) -> str:
    """The stage at which it left; `refused` where no gateway listened, `lost` where one died."""
    path = rng.choice(PATHS)
    anthropic = path == "/v1/messages"
    body = a_body(rng, path, number)
    parts = urlsplit(rng.choice(stack.gateway_urls))
    request = _request(path, parts.netloc, stack.key, body, anthropic=anthropic)
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except OSError:
        return "refused"
    try:
        async with asyncio.timeout(WAIT_S):
            await _go_to(stage, reader, writer, request, rng)
    except (OSError, asyncio.IncompleteReadError):
        return "lost"
    finally:
        writer.close()
    return stage


async def _go_to(
    stage: str,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    request: bytes,
    rng: random.Random,
) -> None:
    if stage == "connected":
        return
    writer.write(request if stage != "half sent" else request[: len(request) * 2 // 3])
    await writer.drain()
    if stage in ("half sent", "sent"):
        return
    if stage == "waiting":
        await asyncio.sleep(rng.uniform(0.0, 0.6))
        return
    await reader.readuntil(HEAD_END)
    if stage == "head":
        return
    chunks = {"chunk": 1, "late chunk": rng.randint(3, 20), "end": 10_000}[stage]
    for _ in range(chunks):
        if not await reader.read(4096):
            return


def a_body(rng: random.Random, path: str, number: int) -> dict[str, Any]:
    """Short and long prompts, whole answers and streams, and answers of one line or many."""
    words = " ".join(rng.choices(("river", "stone", "cloud", "seven"), k=rng.randint(1, 150)))
    said = f"{number}: {words}"
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": rng.choice((4, 16, 40)),
        "stream": rng.random() < 0.8,
    }
    if path == "/v1/completions":
        return {**body, "prompt": said}
    if path == PATHS[0] and rng.random() < 0.3:
        body["response_format"] = {"type": "json_object"}
    return {**body, "messages": [{"role": "user", "content": said}]}


def told(left: Counter[str]) -> str:
    return json.dumps(dict(left))
