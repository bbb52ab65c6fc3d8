"""The worker's HTTP face: generate, abort, load, changes, health, metrics. Raw ASGI: few routes.

A response to `POST /generate` is a stream of frames (core.protocol). The peer going away is
noticed by a watcher on `receive` and aborts the attempt; its last word is journalled all the
same, which is how a killed gateway's requests are settled.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Protocol

import msgspec

from core import internal_token
from core.protocol import (
    BOOT_HEADER,
    Failed,
    Finished,
    Frame,
    Generate,
    Load,
    Nack,
    ProtocolError,
    decode_generate,
    encode_frame,
)
from worker.attempts import Attempt, Attempts, Key, wall_ms
from worker.changes import Changes, Drain, ask, decode_drain
from worker.events import Emit, EngineLoad
from worker.journal import Journal
from worker.lifecycle import Lifecycle
from worker.metrics import PARTS, EngineNow, Metrics, summed
from worker.preparation import Preparation, Preparing

AUDIENCE = "worker"
FRAMES = b"application/x-headworks-frames"
LOAD_INTERVAL_S = 0.1
CHANGE_BYTES_MAX = 64 * 1024

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

_log = logging.getLogger(__name__)


class EngineFace(Preparing, Protocol):
    """The part of the engine (or another backend) that serving needs."""

    def submit(self, request: Generate, emit: Emit) -> Nack | None:
        """Take a request, or say why not. `emit` is called on the engine's thread."""

    def abort(self, request_id: str, attempt: int) -> bool:
        """Whether there was such an attempt to end."""

    def load(self) -> EngineLoad:
        """A snapshot."""


class BodyTooLargeError(Exception):
    """The request's body is over its bound."""


class Server:
    """The ASGI application.

    `engine` is None until the model is loaded, and while the worker is away; `version` is what
    it serves or is about to, "" for whatever its engine does.
    """

    def __init__(
        self,
        *,
        secret: bytes,
        boot_id: str,
        journal: Journal,
        lifecycle: Lifecycle,
        metrics: Metrics,
        request_bytes_max: int,
    ) -> None:
        self.engine: EngineFace | None = None
        self.version = ""
        self.changes: Changes | None = None
        self.drain: Drain | None = None
        self.boot_id = boot_id
        self.attempts = Attempts(journal, metrics)
        self.journal = journal
        self.lifecycle = lifecycle
        self.metrics = metrics
        self._secret = secret
        self._request_bytes_max = request_bytes_max
        self._load_seq = 0
        self._preparation = Preparation()
        self._past: EngineLoad | None = None  # the sums of engines that are no more
        metrics.registry.register(EngineNow(self.engine_load, lambda: lifecycle.word))

    def begin(self, boot_id: str, journal: Journal) -> None:
        """Another boot, with nothing of the one before."""
        self.boot_id = boot_id
        self.journal = journal
        self.attempts = Attempts(journal, self.metrics)

    def leave_engine(self) -> None:
        """Its engine has stopped. What it did stays counted."""
        if self.engine is not None:
            self._past = summed(self._past, self.engine.load())
        self.engine = None

    def engine_load(self) -> EngineLoad | None:
        """The engine's numbers, with the sums of those before it; None without an engine yet."""
        now = self.engine.load() if self.engine is not None else None
        if now is None and self._past is not None:
            return msgspec.structs.replace(self._past, **dict.fromkeys(PARTS, 0))
        return summed(self._past, now)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Route one request."""
        if scope["type"] != "http":
            return
        method, path = scope["method"], scope["path"]
        match method, path.split("/")[1:]:
            case "GET", ["health", "live"]:
                await _answer(send, 200, {"status": "live"})
            case "GET", ["health", "ready"]:
                await self._ready(send)
            case "GET", ["metrics"]:
                await self._metrics(send)
            case _ if not self._authorised(scope):
                await _answer(send, 401, {"error": "a valid internal token is needed"})
            case "GET", ["load"]:
                await self._load(send)
            case "POST", ["generate"]:
                await self._generate(receive, send)
            case "POST", ["abort", attempt]:
                await self._abort(attempt, send)
            case "POST", ["sleep" | "wake" | "version" | "drain" as change]:
                await self._change(change, receive, send)
            case _:
                await _answer(send, 404, {"error": f"no {method} {path} here"})

    def load(self) -> Load:
        """The next report; its sequence number rises."""
        self._load_seq += 1
        if self.engine is None:
            return Load(
                boot_id=self.boot_id,
                seq=self._load_seq,
                kv_blocks_total=0,
                kv_blocks_free=0,
                running=0,
                waiting=0,
            )
        now = self.engine.load()
        return Load(
            boot_id=self.boot_id,
            seq=self._load_seq,
            kv_blocks_total=now.kv_blocks_total,
            kv_blocks_free=now.kv_blocks_free,
            running=now.running,
            waiting=now.waiting,
            placed_seq=self.attempts.placed_seq,
        )

    def _authorised(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        token = headers.get(b"authorization", b"").decode("latin-1").removeprefix("Bearer ")
        subject = internal_token.verify(self._secret, token, audience=AUDIENCE, now_ms=wall_ms())
        return subject is not None

    async def _ready(self, send: Send) -> None:
        healthy = self.engine is not None and self.engine.load().healthy
        ready = self.lifecycle.takes_work and healthy
        body = {"ready": ready, "state": self.lifecycle.word, "engine_healthy": healthy}
        await _answer(send, 200 if ready else 503, body)

    async def _load(self, send: Send) -> None:
        report = self.load()
        engine = self.engine_load()
        body = {
            **{name: getattr(report, name) for name in report.__struct_fields__},
            "state": self.lifecycle.word,
            "version": self.version,
            "attempts": len(self.attempts),
            "integrity": engine.integrity if engine else True,
            "steps": engine.steps if engine else 0,
            "journal_unacked": self.journal.unacked,
        }
        await _answer(send, 200, body)

    async def _metrics(self, send: Send) -> None:
        self.metrics.journal_unacked.set(self.journal.unacked)
        text = self.metrics.text()
        await _send(send, 200, b"text/plain; version=0.0.4; charset=utf-8", text)

    async def _change(self, change: str, receive: Receive, send: Send) -> None:
        try:
            body = await _body(receive, CHANGE_BYTES_MAX)
        except (ProtocolError, BodyTooLargeError) as error:
            await _answer(send, 400, {"error": str(error) or "too long"})
            return
        if change == "drain":
            await self._be_drained(body, send)
            return
        status, answer = await ask(self.changes, change, body)
        if status == HTTPStatus.OK:
            self.metrics.changes.labels(change).inc()
        now = {"state": self.lifecycle.word, "version": self.version, "boot_id": self.boot_id}
        await _answer(send, status, now | answer)

    async def _be_drained(self, body: bytes, send: Send) -> None:
        try:
            asked = decode_drain(body)
        except ProtocolError as error:
            await _answer(send, 400, {"error": str(error)})
            return
        if self.drain is None:
            await _answer(send, 409, {"error": "this worker cannot be drained"})
            return
        within_ms = self.drain(asked.reason, asked.within_ms)
        await _answer(send, 202, {"within_ms": within_ms, "boot_id": self.boot_id})

    async def _abort(self, attempt: str, send: Send) -> None:
        request_id, _, number = attempt.rpartition(":")
        if not request_id or not number.isdigit() or self.engine is None:
            await _answer(send, 404, {"aborted": False}, boot_id=self.boot_id)
            return
        aborted = self.engine.abort(request_id, int(number))
        await _answer(send, 200, {"aborted": aborted}, boot_id=self.boot_id)

    async def _generate(self, receive: Receive, send: Send) -> None:
        try:
            request = decode_generate(await _body(receive, self._request_bytes_max))
        except ProtocolError as error:
            await _answer(send, 400, {"error": f"not a Generate message: {error}"})
            return
        except BodyTooLargeError:
            await _answer(send, 413, {"error": "the request is over request_bytes_max"})
            return
        opened = await self._open(request)
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", FRAMES), (b"cache-control", b"no-store")],
            }
        )
        if isinstance(opened, Nack):
            self.metrics.refused.labels(opened.reason).inc()
            await _send_frames(send, [opened, self.load()], more=False)
            return
        await self._stream(opened, receive, send)

    async def _open(self, request: Generate) -> Attempt | Nack:
        if self.version and request.version != self.version:
            return Nack(reason="wrong_version")
        if self.engine is not None and not await self._preparation.of(request, self.engine):
            return Nack(reason="full")
        if self.engine is None or not self.lifecycle.takes_work:
            return Nack(reason="asleep" if self.lifecycle.away else "draining")
        engine = self.engine
        return self.attempts.open(request, lambda message, to: engine.submit(message, to.emit))

    async def _stream(self, attempt: Attempt, receive: Receive, send: Send) -> None:
        """Send frames as they come; a peer that leaves aborts the attempt."""
        watcher = asyncio.create_task(self._abort_when_gone(attempt.key, receive))
        told_load_at = 0.0
        clock = asyncio.get_running_loop().time
        try:
            while True:
                frames = await attempt.next_frames()
                last = frames[-1]
                ended = isinstance(last, Finished | Failed)
                if ended or clock() - told_load_at >= LOAD_INTERVAL_S:
                    frames.insert(-1 if ended else len(frames), self.load())
                    told_load_at = clock()
                await _send_frames(send, frames, more=not ended)
                if isinstance(last, Finished | Failed):
                    self.metrics.ended(last)
                    return
        finally:
            watcher.cancel()
            self._end(attempt.key)

    async def _abort_when_gone(self, key: Key, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._end(key)

    def _end(self, key: Key) -> None:
        # Ending an attempt that has ended is nothing.
        if self.engine is not None:
            self.engine.abort(*key)


async def _body(receive: Receive, bytes_max: int) -> bytes:
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ProtocolError("the peer left before the body was whole")
        body += message.get("body", b"")
        if len(body) > bytes_max:
            raise BodyTooLargeError
        more = message.get("more_body", False)
    return bytes(body)


async def _send_frames(send: Send, frames: list[Frame], *, more: bool) -> None:
    data = b"".join(encode_frame(frame) for frame in frames)
    await send({"type": "http.response.body", "body": data, "more_body": more})


async def _answer(send: Send, status: int, body: dict[str, Any], *, boot_id: str = "") -> None:
    await _send(send, status, b"application/json", json.dumps(body).encode(), boot_id=boot_id)


async def _send(
    send: Send, status: int, content_type: bytes, body: bytes, *, boot_id: str = ""
) -> None:
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    if boot_id:
        headers.append((BOOT_HEADER, boot_id.encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
