"""The gateway's side of the worker hop: HTTP/1.1 over kept connections, frames as they arrive.

Not a general HTTP client: one peer, one method, two paths. Every wait has a bound in
`WorkerLimits`. Invariant: a caller learns exactly one of three things about an attempt: it
was never sent (`ConnectFailedError`), it ended with a terminal frame, or it was cut
(`CutError`); silence is never taken for an end.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import msgspec

from core.internal_token import sign
from core.protocol import Frame, Generate, encode_generate
from gateway.worker_connection import (
    HTTP_OK,
    Answer,
    ConnectFailedError,
    CutError,
    WorkerConnection,
    WorkerLimits,
    WorkerRefusedError,
)

__all__ = [
    "ConnectFailedError",
    "CutError",
    "FrameStream",
    "Heard",
    "WorkerClient",
    "WorkerLimits",
    "WorkerRefusedError",
]

TOKEN_LIFE_MS = 300_000
TOKEN_RENEW_MS = 60_000  # a token is replaced when it has less than this left


class FrameStream:
    """One attempt's frames. Read it to its terminal frame, or close it."""

    def __init__(
        self,
        connection: WorkerConnection,
        request: bytes,
        *,
        reconnect: Callable[[], Awaitable[WorkerConnection]] | None,
    ) -> None:
        self._connection = connection
        self._request = request
        self._reconnect = reconnect
        self._answer = connection.send(request)

    async def read(self) -> list[Frame]:
        """Every frame at hand, at least one; the terminal frame is the last of all.

        Raises CutError, WorkerRefusedError, or ConnectFailedError when a kept connection had
        gone stale and a fresh one cannot be had. A cancelled read loses nothing.
        """
        try:
            return await self._answer.read()
        except CutError as cut:
            # The worker may close a kept connection just as we write on it. Sending again is
            # safe: a worker refuses an attempt that it already has with Nack("duplicate").
            if self._reconnect is None or not cut.unanswered:
                raise
        reconnect, self._reconnect = self._reconnect, None
        self._connection = await reconnect()
        self._answer = self._connection.send(self._request)
        return await self._answer.read()

    def close(self) -> None:
        """Stop reading. An answer that has not ended costs its connection."""
        if not self._answer.ended and not self._answer.complete:
            self._connection.abort()


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """What came of an abort. `boot_id` is the life that answered, "" where none said so."""

    ended: bool = False  # the attempt was known, and ends
    boot_id: str = ""
    refused: bool = False  # nobody listens at that address


class _Idle(msgspec.Struct):
    """A kept connection and when it fell idle, on the loop's clock."""

    connection: WorkerConnection
    since_s: float


class WorkerClient:
    """Attempts and aborts on any number of workers, over pools of kept connections."""

    def __init__(
        self, *, secret: bytes, subject: str, limits: WorkerLimits, now_ms: Callable[[], int]
    ) -> None:
        self._secret = secret
        self._subject = subject
        self._limits = limits
        self._now_ms = now_ms
        self._idle: dict[tuple[str, int], deque[_Idle]] = {}
        self._open: set[WorkerConnection] = set()
        self._token = ""
        self._token_expires_ms = 0

    async def generate(self, url: str, message: Generate) -> "FrameStream":
        """Send an attempt. Raises ConnectFailedError when nothing was sent."""
        address = _address(url)
        request = self._request(address, "/generate", encode_generate(message))
        kept = self._take_idle(address)
        connection = kept or await self._connect(address)
        return FrameStream(
            connection,
            request,
            reconnect=None if kept is None else lambda: self._connect(address),
        )

    async def abort(self, url: str, request_id: str, attempt: int) -> Heard:
        """Ask the worker to end an attempt, within `abort_s`. Raises nothing."""
        try:
            address = _address(url)
            request = self._request(address, f"/abort/{request_id}:{attempt}", b"")
            async with asyncio.timeout(self._limits.abort_s):
                answer = await self._abort(address, request)
        except ConnectFailedError as error:
            return Heard(refused=error.refused)
        except (CutError, TimeoutError):
            return Heard()
        return Heard(ended=answer.status == HTTP_OK, boot_id=answer.boot_id)

    @property
    def connections(self) -> int:
        """Connections open now, busy and idle."""
        return len(self._open)

    def sweep(self) -> None:
        """Cut what has been idle for too long, and forget addresses nobody uses any more."""
        oldest_s = asyncio.get_running_loop().time() - self._limits.keep_alive_s
        for address, pool in list(self._idle.items()):
            while pool and (not pool[0].connection.usable or pool[0].since_s <= oldest_s):
                pool.popleft().connection.abort()
            if not pool:
                del self._idle[address]

    async def close(self) -> None:
        """Cut every connection."""
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()

    async def _abort(self, address: tuple[str, int], request: bytes) -> Answer:
        kept = self._take_idle(address)
        if kept is not None:
            try:
                answer = kept.send(request)
                await answer.outcome()
            except CutError:
                pass  # it had gone stale, and an abort must not be lost to that
            else:
                return answer
        connection = await self._connect(address)
        answer = connection.send(request)
        await answer.outcome()
        return answer

    async def _connect(self, address: tuple[str, int]) -> WorkerConnection:
        loop = asyncio.get_running_loop()
        connection = WorkerConnection(
            loop=loop,
            limits=self._limits,
            on_idle=lambda idle: self._keep(address, idle),
            on_lost=self._open.discard,
        )
        try:
            async with asyncio.timeout(self._limits.connect_s):
                await loop.create_connection(lambda: connection, *address)
        except (OSError, TimeoutError) as error:
            refused = isinstance(error, ConnectionRefusedError)
            raise ConnectFailedError(str(error) or type(error).__name__, refused=refused) from error
        except asyncio.CancelledError:
            connection.abort()  # it may have been made while we were being cancelled
            raise
        self._open.add(connection)
        return connection

    def _take_idle(self, address: tuple[str, int]) -> WorkerConnection | None:
        pool = self._idle.get(address)
        oldest_s = asyncio.get_running_loop().time() - self._limits.keep_alive_s
        while pool:
            idle = pool.pop()
            if idle.connection.usable and idle.since_s > oldest_s:
                return idle.connection
            idle.connection.abort()
        return None

    def _keep(self, address: tuple[str, int], connection: WorkerConnection) -> None:
        now_s = asyncio.get_running_loop().time()
        pool = self._idle.setdefault(address, deque())
        # The newest is taken first, so those that aged out are at the left.
        while pool and (
            not pool[0].connection.usable or pool[0].since_s <= now_s - self._limits.keep_alive_s
        ):
            pool.popleft().connection.abort()
        if len(pool) >= self._limits.idle_per_worker:
            connection.abort()
        else:
            pool.append(_Idle(connection, now_s))

    def _request(self, address: tuple[str, int], path: str, body: bytes) -> bytes:
        host, port = address
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {host}:{port}\r\n"
            f"authorization: Bearer {self._current_token()}\r\n"
            f"content-type: application/x-msgpack\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def _current_token(self) -> str:
        now_ms = self._now_ms()
        if self._token_expires_ms - now_ms < TOKEN_RENEW_MS:
            self._token_expires_ms = now_ms + TOKEN_LIFE_MS
            self._token = sign(
                self._secret,
                audience="worker",
                subject=self._subject,
                expires_ms=self._token_expires_ms,
            )
        return self._token


def _address(url: str) -> tuple[str, int]:
    """Raises ConnectFailedError: a row may have lost its address before its replica is gone."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 80
    except ValueError as error:
        raise ConnectFailedError(f"no address: {error}") from error
    if parts.scheme != "http" or not host:  # the worker hop is plain HTTP inside the cluster
        raise ConnectFailedError(f"no address of a worker: {url!r}")
    return host, port
