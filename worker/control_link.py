"""The worker's side of the fleet protocol: register, beat, deliver the journal.

The control plane being away changes nothing for what runs: beats and journal entries wait,
the journal up to its bound on disk, and delivery goes on when it is back. Only being fenced
ends the link; an entry that the control plane will never take does not hold up the others.
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
RESTART_FIRST_S = 1.0
RESTART_MAX_S = 30.0
JOURNAL_INTERVAL_S = 0.25
REQUEST_TIMEOUT_S = 5.0
REASON_CHARS = 500

# The control plane will never take such a message; 413 may only mean that it is too long.
REFUSED = frozenset({httpx.codes.REQUEST_ENTITY_TOO_LARGE, httpx.codes.UNPROCESSABLE_ENTITY})

# Not an answer, or not one of the control plane's: a proxy's page, say.
AWAY = (httpx.HTTPError, msgspec.MsgspecError)

Reply = TypeVar("Reply")
Taken = Callable[[tuple[JournalEntry, ...]], None]

_log = logging.getLogger(__name__)


class FencedError(Exception):
    """The control plane will not have this boot: a newer one, or a version it does not serve."""


class ControlLink:
    """Runs until cancelled. `on_drain` hears how long, each time the control plane asks for it.

    It registers again whenever its capacity is another: before a load it holds nothing.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        server: Server,
        *,
        capacity: Callable[[], Capacity],
        can_resume: bool,
        left_behind: list[LeftBehind],
        on_drain: Callable[[int | None], None],
        age_ms: Callable[[], int] = lambda: 0,
        ending: Callable[[], tuple[str, int | None]] = lambda: ("", None),
    ) -> None:
        self._settings = settings
        self._server = server
        self._capacity = capacity
        self._can_resume = can_resume
        self._left_behind = list(left_behind)
        self._on_drain = on_drain
        self._age_ms = age_ms
        self._ending = ending
        self._told_capacity: Capacity | None = None
        self._beat_seq = 0
        self._interval_s = 1.0
        self._client = httpx.AsyncClient(
            base_url=settings.control_plane_url, timeout=REQUEST_TIMEOUT_S
        )

    async def run(self) -> None:
        """Keep the link up. Raises FencedError; what else ends it is logged, and it restarts."""
        clock = asyncio.get_running_loop().time
        delay_s = RESTART_FIRST_S
        while True:
            started_at = clock()
            try:
                await self._live()
            except Exception as error:
                fence = _fence(error)
                if fence is not None:
                    raise fence from error
                _log.exception("the link to the control plane ended; it starts again")
            if clock() - started_at > RESTART_MAX_S:
                delay_s = RESTART_FIRST_S
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, RESTART_MAX_S)

    async def _live(self) -> None:
        """Register, then beat and deliver side by side."""
        await self._patiently(self._register)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat_for_ever())
            tasks.create_task(self._deliver_for_ever())

    async def beat_once(self) -> None:
        """Tell the present state now; not being heard is not an error."""
        try:
            await self._beat()
        except Exception as error:  # noqa: BLE001 - the loop beats too, and ends for what it must
            _log.info("a beat was not heard", extra={"facts": {"reason": str(error)}})

    async def close(self) -> None:
        """Say the last state and deliver what is left, once and within a bound."""
        await self.beat_once()
        try:
            await self._deliver(self._server.journal)
        except (*AWAY, FencedError) as error:
            _log.warning("journal kept for later", extra={"facts": {"reason": str(error)}})
        await self._client.aclose()

    async def _register(self) -> None:
        settings, capacity = self._settings, self._capacity()
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
                capacity=capacity,
                can_resume=self._can_resume,
                age_ms=self._age_ms(),
            ),
            Registered,
        )
        self._told_capacity = capacity
        self._interval_s = reply.beat_interval_ms / 1000

    async def _beat_for_ever(self) -> None:
        while True:
            await self._patiently(self._beat)
            await asyncio.sleep(self._interval_s)

    async def _beat(self) -> None:
        if self._told_capacity not in (None, self._capacity()):
            await self._register()
        self._beat_seq += 1
        load = self._server.load()
        engine = self._server.engine_load()
        reason, drain_ms = self._ending()
        beat = Beat(
            replica_id=self._settings.replica_id,
            boot_id=self._server.boot_id,
            seq=self._beat_seq,
            state=self._server.lifecycle.state,
            kv_blocks_free=load.kv_blocks_free,
            running=load.running,
            waiting=load.waiting,
            steps=engine.steps if engine is not None else 0,
            drain_reason=reason,
            drain_ms=drain_ms,
        )
        reply = await self._post("/fleet/beat", beat, BeatReply)
        if not reply.known:
            await self._register()
        if reply.drain:
            self._on_drain(reply.drain_ms)

    async def _deliver_for_ever(self) -> None:
        while self._left_behind:
            await self._deliver_left_behind(self._left_behind[0])
            del self._left_behind[0]
        while True:
            if self._server.journal.unacked:
                await self._patiently(partial(self._deliver, self._server.journal))
            await asyncio.sleep(JOURNAL_INTERVAL_S)

    async def _deliver(self, journal: Journal) -> None:
        entries = journal.batch()
        if entries:
            await self._send(journal.boot_id, entries, journal.acknowledge)

    async def _deliver_left_behind(self, left: LeftBehind) -> None:
        for start in range(0, len(left.entries), BATCH_ENTRIES_MAX):
            entries = left.entries[start : start + BATCH_ENTRIES_MAX]
            await self._patiently(partial(self._send, left.boot_id, entries, _forget))
        remove_boot(Path(self._settings.journal_dir), left.boot_id)

    async def _send(self, boot_id: str, entries: tuple[JournalEntry, ...], taken: Taken) -> None:
        """Deliver, in halves if need be. `taken` hears of what needs no more delivery."""
        message = fleet.Journal(
            replica_id=self._settings.replica_id, boot_id=boot_id, entries=entries
        )
        try:
            await self._post("/fleet/journal", message, JournalReply)
        except httpx.HTTPStatusError as error:
            if error.response.status_code not in REFUSED:
                raise
            if len(entries) > 1:
                middle = len(entries) // 2
                await self._send(boot_id, entries[:middle], taken)
                await self._send(boot_id, entries[middle:], taken)
                return
            self._set_aside(boot_id, entries[0], error.response)
        taken(entries)

    def _set_aside(self, boot_id: str, entry: JournalEntry, response: httpx.Response) -> None:
        # These totals now have one witness less, the log one more line to settle by hand.
        facts = {
            "request": entry.request_id,
            "attempt": entry.attempt,
            "boot": boot_id,
            "entry": msgspec.to_builtins(entry),
            "status": response.status_code,
            "reason": response.text[:REASON_CHARS],
        }
        _log.error("the control plane refused a journal entry", extra={"facts": facts})
        self._server.metrics.journal_refused.inc()

    async def _patiently(self, call: Callable[[], Awaitable[None]]) -> None:
        """Repeat `call` with back-off until the control plane takes it."""
        delay_s = RETRY_FIRST_S
        while True:
            try:
                return await call()
            except AWAY as error:
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


def _forget(_entries: tuple[JournalEntry, ...]) -> None:
    # An earlier life's journal goes as a whole.
    return


def _fence(error: BaseException) -> FencedError | None:
    """The refusal, should it be somewhere in a task group's errors."""
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(_fence, error.exceptions)), None)
    return error if isinstance(error, FencedError) else None
