"""The worker's side of the fleet protocol: register, beat, deliver the journal.

The control plane being away changes nothing for what runs: beats and journal entries wait,
the journal up to its bound on disk, and delivery goes on when it is back.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import httpx
import msgspec

from core import fleet, internal_token
from core.fleet import Beat, BeatReply, Capacity, JournalEntry, JournalReply, Register, Registered
from worker.attempts import wall_ms
from worker.journal import BATCH_ENTRIES_MAX, Journal, LeftBehind, remove_boot
from worker.server import Server
from worker.settings import WorkerSettings

AUDIENCE = "control-plane"
TOKEN_LIFE_MS = 60_000
RETRY_FIRST_S = 0.2
RETRY_MAX_S = 5.0
JOURNAL_INTERVAL_S = 0.25
REQUEST_TIMEOUT_S = 5.0

Reply = TypeVar("Reply")

_log = logging.getLogger(__name__)


class FencedError(Exception):
    """The control plane will not have this boot: a newer one, or a version it does not serve."""


class ControlLink:
    """Runs until cancelled. `on_drain` is called once, when the control plane asks for it."""

    def __init__(
        self,
        settings: WorkerSettings,
        server: Server,
        *,
        capacity: Callable[[], Capacity],
        can_resume: bool,
        left_behind: list[LeftBehind],
        on_drain: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._server = server
        self._capacity = capacity
        self._can_resume = can_resume
        self._left_behind = left_behind
        self._on_drain = on_drain
        self._beat_seq = 0
        self._interval_s = 1.0
        self._draining = False
        self._client = httpx.AsyncClient(
            base_url=settings.control_plane_url, timeout=REQUEST_TIMEOUT_S
        )

    async def run(self) -> None:
        """Register, then beat and deliver side by side. Raises FencedError."""
        await self._patiently(self._register)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat_for_ever())
            tasks.create_task(self._deliver_for_ever())

    async def beat_once(self) -> None:
        """Tell the present state now; not being heard is not an error."""
        try:
            await self._beat()
        except (httpx.HTTPError, FencedError) as error:
            _log.info("a beat was not heard", extra={"facts": {"reason": str(error)}})

    async def close(self) -> None:
        """Say the last state and deliver what is left, once and within a bound."""
        await self.beat_once()
        try:
            await self._deliver(self._server.journal)
        except (httpx.HTTPError, FencedError) as error:
            _log.warning("journal kept for later", extra={"facts": {"reason": str(error)}})
        await self._client.aclose()

    async def _register(self) -> None:
        settings = self._settings
        reply = await self._post(
            "/fleet/register",
            Register(
                replica_id=settings.replica_id,
                boot_id=self._server.boot_id,
                url=settings.url,
                deployment=settings.deployment,
                region=settings.region,
                version=settings.model_version,
                state=self._server.lifecycle.state,
                capacity=self._capacity(),
                can_resume=self._can_resume,
            ),
            Registered,
        )
        self._interval_s = reply.beat_interval_ms / 1000

    async def _beat_for_ever(self) -> None:
        while True:
            await self._patiently(self._beat)
            await asyncio.sleep(self._interval_s)

    async def _beat(self) -> None:
        self._beat_seq += 1
        load = self._server.load()
        engine = self._server.engine
        beat = Beat(
            replica_id=self._settings.replica_id,
            boot_id=self._server.boot_id,
            seq=self._beat_seq,
            state=self._server.lifecycle.state,
            kv_blocks_free=load.kv_blocks_free,
            running=load.running,
            waiting=load.waiting,
            steps=engine.load().steps if engine is not None else 0,
        )
        reply = await self._post("/fleet/beat", beat, BeatReply)
        if not reply.known:
            await self._register()
        if reply.drain and not self._draining:
            self._draining = True
            self._on_drain()

    async def _deliver_for_ever(self) -> None:
        for left in self._left_behind:
            await self._deliver_left_behind(left)
        while True:
            if self._server.journal.unacked:
                await self._patiently(partial(self._deliver, self._server.journal))
            await asyncio.sleep(JOURNAL_INTERVAL_S)

    async def _deliver(self, journal: Journal) -> None:
        entries = journal.batch()
        if entries:
            await self._send(journal.boot_id, entries)
            journal.acknowledge(entries)

    async def _deliver_left_behind(self, left: LeftBehind) -> None:
        for start in range(0, len(left.entries), BATCH_ENTRIES_MAX):
            entries = left.entries[start : start + BATCH_ENTRIES_MAX]
            await self._patiently(partial(self._send, left.boot_id, entries))
        remove_boot(Path(self._settings.journal_dir), left.boot_id)

    async def _send(self, boot_id: str, entries: tuple[JournalEntry, ...]) -> None:
        message = fleet.Journal(
            replica_id=self._settings.replica_id, boot_id=boot_id, entries=entries
        )
        await self._post("/fleet/journal", message, JournalReply)

    async def _patiently(self, call: Callable[[], Awaitable[None]]) -> None:
        """Repeat `call` with back-off until the control plane takes it."""
        delay_s = RETRY_FIRST_S
        while True:
            try:
                return await call()
            except httpx.HTTPError as error:
                _log.info("control plane is away", extra={"facts": {"reason": str(error)}})
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, RETRY_MAX_S)

    async def _post(self, path: str, message: msgspec.Struct, reply: type[Reply]) -> Reply:
        token = internal_token.sign(
            self._settings.internal_secret.encode(),
            audience=AUDIENCE,
            subject=self._settings.replica_id,
            expires_ms=wall_ms() + TOKEN_LIFE_MS,
        )
        response = await self._client.post(
            path,
            content=msgspec.json.encode(message),
            headers={"authorization": f"Bearer {token}", "content-type": "application/json"},
        )
        if response.status_code == httpx.codes.CONFLICT:
            raise FencedError(response.text)
        response.raise_for_status()
        return msgspec.json.decode(response.content, type=reply)
