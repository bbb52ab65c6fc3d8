"""Engines that a benchmark can ask for tokens: our worker, an OpenAI-compatible server,
transformers. Each answers prompts of ids, greedily and to the given length.

Times are the client's, on one clock; counts are those of the usage that the engine itself
reports at the end of an answer.
"""

import asyncio
import itertools
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx
import msgspec

from core.protocol import Choice, Failed, Finished, Generate, Nack, Sampling, Tokens
from gateway.worker_client import WorkerClient, WorkerLimits
from tests.support.services import free_port

START_S = 900.0  # vLLM compiles at its first start
NACK_RETRY_S = 0.05
SECRET = "benchmark-secret-of-no-value"  # noqa: S105 - guards a worker on loopback for minutes


class Answer(msgspec.Struct):
    """`times` are of events that brought tokens, in seconds; one may bring several tokens."""

    sent: float
    times: list[float] = []
    output_tokens: int = 0
    cached_tokens: int = 0


class Peer(Protocol):
    """Started once, asked many times, from one event loop."""

    name: str

    async def start(self) -> None: ...
    async def answer(self, prompt: Sequence[int], max_tokens: int) -> Answer: ...
    async def versions(self) -> dict[str, str]: ...
    async def stop(self) -> None: ...


class Process:
    """A server started for the benchmark, in a group of its own, and stopped with it."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self._command, self._environ, self._log = command, environ, log
        self._running: asyncio.subprocess.Process | None = None

    async def start(self, ready_url: str) -> None:
        """Returns when `ready_url` answers 200."""
        with self._log.open("wb") as log:
            self._running = await asyncio.create_subprocess_exec(
                *self._command,
                env={**os.environ, **self._environ},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        async with asyncio.timeout(START_S), httpx.AsyncClient() as client:
            while True:
                if self._running.returncode is not None:
                    raise RuntimeError(f"{self._command[0]} ended; see {self._log}")
                try:
                    if (await client.get(ready_url, timeout=5)).status_code == httpx.codes.OK:
                        return
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.5)

    async def stop(self) -> None:
        """With all that it started."""
        if self._running is not None and self._running.returncode is None:
            os.killpg(self._running.pid, signal.SIGTERM)
            try:
                await asyncio.wait_for(self._running.wait(), 30)
            except TimeoutError:
                os.killpg(self._running.pid, signal.SIGKILL)
                await self._running.wait()


class OurWorker:
    """`python -m worker` without a control plane, spoken to as a gateway does."""

    def __init__(
        self, name: str, *, models: Path, version: str, scratch: Path, environ: Mapping[str, str]
    ) -> None:
        self.name = name
        self._version = version
        self._numbers = itertools.count(time.time_ns())
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        settings = {
            "INTERNAL_SECRET": SECRET,
            "REPLICA_ID": f"benchmark-{port}",
            "MODELS_DIR": str(models),
            "MODEL_VERSION": version,
            "JOURNAL_DIR": str(scratch / f"journal-{port}"),
            "CONTROL_PLANE_URL": "http://127.0.0.1:9",  # nobody is there: only the link minds
            "WORKER_PORT": str(port),
            "KV_MEMORY_MB": "2048",
            "LOG_LEVEL": "ERROR",
            # Nobody queues before it here, and asking again and again would be load.
            "WAITING_TOKENS_MAX": str(1 << 20),
        }
        self._process = Process(
            [sys.executable, "-m", "worker"],
            {**{f"HEADWORKS_{key}": value for key, value in settings.items()}, **environ},
            scratch / f"{name}.log",
        )
        self._client = WorkerClient(
            secret=SECRET.encode(),
            subject="benchmark",
            limits=WorkerLimits(first_frame_s=600, idle_s=600, idle_per_worker=512),
            now_ms=lambda: time.time_ns() // 1_000_000,
        )

    async def start(self) -> None:
        await self._process.start(f"{self._url}/health/ready")

    async def answer(
        self, prompt: Sequence[int], max_tokens: int, into: Answer | None = None
    ) -> Answer:
        """With `into` that is filled as it comes, for whoever watches."""
        answer = into or Answer(sent=time.perf_counter())
        message = Generate(
            request_id=f"req_{next(self._numbers)}",
            attempt=1,
            version=self._version,
            prompt_ids=tuple(prompt),
            choices=(Choice(index=0),),
            sampling=Sampling(seed=0, max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            tenant_salt=b"benchmark",
        )
        while not await self._heard(message, answer):  # noqa: ASYNC110 - nothing tells of room
            await asyncio.sleep(NACK_RETRY_S)
        return answer

    async def _heard(self, message: Generate, answer: Answer) -> bool:
        stream = await self._client.generate(self._url, message)
        while True:
            for frame in await stream.read():
                match frame:
                    case Tokens():
                        answer.times.append(time.perf_counter())
                    case Finished(usage=usage):
                        answer.output_tokens = usage.output_tokens
                        answer.cached_tokens = usage.cached_tokens
                        return True
                    case Nack(reason="full"):
                        return False
                    case Nack() | Failed():
                        raise RuntimeError(f"{self.name}: {frame}")
                    case _:
                        pass

    async def versions(self) -> dict[str, str]:
        return {"model_version": self._version}

    async def stop(self) -> None:
        await self._client.close()
        await self._process.stop()


class OpenAIServer:
    """Anything with `/v1/completions` that takes ids: `NAME=URL [COMMAND …]`."""

    def __init__(self, spec: str, scratch: Path) -> None:
        self.name, _, rest = spec.partition("=")
        self._url, *command = shlex.split(rest)
        self._process = Process(command, {}, scratch / f"{self.name}.log") if command else None
        self._model = ""

    async def start(self) -> None:
        if self._process is not None:
            await self._process.start(f"{self._url}/models")
        async with httpx.AsyncClient() as client:
            models = (await client.get(f"{self._url}/models")).json()
        self._model = models["data"][0]["id"]

    async def answer(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        answer = Answer(sent=time.perf_counter())
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async for event in _events(f"{self._url}/completions", json.dumps(body).encode()):
            if event.get("choices"):
                answer.times.append(time.perf_counter())
            if usage := event.get("usage"):
                answer.output_tokens = usage["completion_tokens"]
                details = usage.get("prompt_tokens_details") or {}
                answer.cached_tokens = details.get("cached_tokens") or 0
        return answer

    async def versions(self) -> dict[str, str]:
        parts = urlsplit(self._url)
        async with httpx.AsyncClient() as client:
            told = await client.get(f"{parts.scheme}://{parts.netloc}/version")
        return {"model": self._model, **(told.json() if told.is_success else {})}

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop()


async def _events(url: str, body: bytes) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event, read with as little of our own time as can be."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        head = (
            f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        status = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in status[:16]:
            raise RuntimeError(f"{url}: {status!r} {await reader.read(2000)!r}")
        buffer = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            buffer += (await reader.readexactly(size + 2))[:-2]
            *whole, buffer = buffer.split(b"\n\n")
            for event in whole:
                if event.startswith(b"data: {"):
                    yield msgspec.json.decode(event[6:])
    finally:
        writer.close()
