"""The worker as a process of its own, over a tiny model, with a control plane that takes all."""

import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from artifacts.pull import pull
from artifacts.store import ModelStore
from core import internal_token
from core.protocol import Frame, FrameReader, Generate, Load, encode_generate
from tests.support.services import free_port
from tests.support.tiny_llama import TinyLlama, write_hf

SECRET = "a secret that is long enough"
WAIT_S = 60


def tiny_store(root: Path, *seeds: int, **shape: Any) -> list[str]:
    """A store at `root` with one version for each seed; returns their hashes."""
    store = ModelStore(root / "models")
    versions = []
    for seed in seeds or (0,):
        write_hf(root / f"tiny-{seed}", TinyLlama(seed=seed, **shape))
        versions.append(pull(str(root / f"tiny-{seed}"), store).version)
    return versions


def bearer() -> dict[str, str]:
    expires = time.time_ns() // 1_000_000 + 600_000
    token = internal_token.sign(
        SECRET.encode(), audience="worker", subject="gw", expires_ms=expires
    )
    return {"authorization": f"Bearer {token}"}


class WorkerProcess:
    """`module` is run with these settings; its output is in `output`."""

    def __init__(
        self,
        root: Path,
        version: str,
        *,
        module: str = "worker",
        address_space: int = 0,
        **settings: Any,
    ) -> None:
        self.port = free_port()
        given = {
            "internal_secret": SECRET,
            "replica_id": "r1",
            "models_dir": root / "models",
            "model_version": version,
            "journal_dir": root / "journal",
            "control_plane_url": "http://127.0.0.1:9",
            "worker_port": self.port,
            "kv_blocks": 64,
            "max_sequences": 8,
            "threads": 1,
            **settings,
        }
        environment = {f"HEADWORKS_{name.upper()}": str(value) for name, value in given.items()}

        limit = f"ulimit -v {address_space // 1024}; " if address_space else ""
        self._log = root / f"worker-{self.port}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", limit + 'exec "$0" -m "$1"', sys.executable, module],
                env=os.environ | {"OMP_WAIT_POLICY": "passive"} | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=WAIT_S)

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()

    async def until_ready(self) -> "WorkerProcess":
        async with asyncio.timeout(WAIT_S):
            while not await self._is_ready():
                assert self.process.poll() is None, self.output
                await asyncio.sleep(0.05)
        return self

    async def until_running(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while not (await self.load())["running"]:  # noqa: ASYNC110 - bounded
                await asyncio.sleep(0.01)

    async def _is_ready(self) -> bool:
        try:
            return (await self.client.get("/health/ready")).status_code == 200
        except httpx.TransportError:
            return False

    async def post(self, path: str, body: Any = None) -> httpx.Response:
        content = b"" if body is None else json.dumps(body).encode()
        return await self.client.post(path, content=content, headers=bearer())

    async def load(self) -> dict[str, Any]:
        return (await self.client.get("/load", headers=bearer())).json()

    async def generate(self, request: Generate) -> list[Frame]:
        return [frame async for frame in self.frames(request) if not isinstance(frame, Load)]

    async def frames(self, request: Generate) -> AsyncIterator[Frame]:
        reader = FrameReader()
        async with self.client.stream(
            "POST", "/generate", content=encode_generate(request), headers=bearer()
        ) as response:
            assert response.status_code == 200, await response.aread()
            async for data in response.aiter_raw():
                for frame in reader.feed(data):
                    yield frame

    async def end(self) -> int:
        """Its exit status."""
        return await asyncio.to_thread(self.process.wait, WAIT_S)


@asynccontextmanager
async def a_worker(root: Path, version: str, **options: Any) -> AsyncIterator[WorkerProcess]:
    """Killed at the end, whatever it does then."""
    worker = WorkerProcess(root, version, **options)
    try:
        yield worker
    finally:
        await worker.client.aclose()
        worker.process.kill()
        worker.process.wait()
