"""One HTTP/1.1 connection to a worker: a request goes out, an answer of frames comes in.

The parser is httptools'; this adds timeouts, back-pressure (the socket is not read while the
consumer lags) and the grammar of `core.protocol`. Invariant: an answer ends in a terminal
frame or in an error, never in silence.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import cast

import httptools
import msgspec

from core.protocol import (
    BOOT_HEADER,
    Failed,
    Finished,
    Frame,
    FrameReader,
    Load,
    Nack,
    ProtocolError,
    Started,
    Tokens,
)

FRAMES_CONTENT_TYPE = b"application/x-headworks-frames"
OTHER_BODY_BYTES_MAX = 65_536  # of an answer that is not frames, read only to keep the connection
HTTP_OK = 200


class WorkerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The bound of every wait and buffer of the worker hop."""

    connect_s: float = 2.0
    head_s: float = 10.0  # request written to response head
    first_frame_s: float = 60.0  # response head to first frame
    idle_s: float = 60.0  # frame to frame
    abort_s: float = 1.0
    keep_alive_s: float = 60.0  # under the worker's own, so that it rarely closes first
    idle_per_worker: int = 64
    frames_buffered_max: int = 256


class ConnectFailedError(Exception):
    """Nothing was sent: another replica, or the same one later, may be tried freely.

    `refused`: the machine answered, and nobody listens there.
    """

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


class CutError(Exception):
    """The answer ended without its terminal frame.

    `unanswered` is true when the peer closed the connection before a byte of an answer.
    """

    def __init__(self, reason: str, *, unanswered: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.unanswered = unanswered


class WorkerRefusedError(Exception):
    """The worker answered with a status other than 200: nothing runs."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the worker answered {status}")
        self.status = status


class Answer:
    """What has arrived of one answer and not yet been read."""

    def __init__(self, limits: WorkerLimits) -> None:
        self._limits = limits
        self._reader = FrameReader()
        self._frames: deque[Frame] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._started = False
        self.status = 0
        self.boot_id = ""  # of who answers, where a header says so
        self.ended = False  # the terminal frame arrived
        self.complete = False  # the HTTP message is over
        self.on_drained: Callable[[], None] | None = None

    async def read(self) -> list[Frame]:
        """Every frame at hand, at least one. Raises CutError or WorkerRefusedError."""
        while not self._frames:
            if self._error is not None:
                raise self._error
            assert not self.ended, "nothing follows the terminal frame"
            await self._wait()
        frames = list(self._frames)
        self._frames.clear()
        if self.on_drained is not None:
            self.on_drained()
        return frames

    async def outcome(self) -> int:
        """The HTTP status, for an answer that carries no frames. Raises CutError."""
        while not self.complete and self._error is None:
            await self._wait()
        if isinstance(self._error, CutError) and not self.complete:
            raise self._error
        return self.status

    @property
    def lagging(self) -> bool:
        """Whether the consumer is so far behind that the socket should wait."""
        return len(self._frames) >= self._limits.frames_buffered_max

    def feed(self, data: bytes) -> None:
        """Take body bytes. Raises ProtocolError on a broken or misplaced frame."""
        for frame in self._reader.feed(data):
            self._accept(frame)
        self._wake()

    def finish(self) -> None:
        """The HTTP message is over."""
        self.complete = True
        if not self.ended and self._error is None:
            where = "inside a frame" if self._reader.mid_frame else "before a terminal frame"
            self._error = CutError(f"the answer ended {where}")
        self._wake()

    def fail(self, error: Exception) -> None:
        """The first failure counts; frames that came before it are still read."""
        if not self.ended and self._error is None:
            self._error = error
        self._wake()

    def _accept(self, frame: Frame) -> None:
        if self.ended:
            if isinstance(frame, Load):
                return  # a worker that refuses may still say how full it is
            raise ProtocolError("a frame follows the terminal frame")
        match frame:
            case Tokens():  # first: there are hundreds of these for each of the others
                if not self._started:
                    raise ProtocolError("tokens before the attempt started")
            case Started() | Nack() if self._started:
                raise ProtocolError("an attempt is taken or refused once")
            case Started():
                self._started = True
            case Nack() | Finished() | Failed():
                self.ended = True
            case _:
                pass
        self._frames.append(frame)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class WorkerConnection(asyncio.Protocol):
    """A connection carrying one answer at a time."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        limits: WorkerLimits,
        on_idle: Callable[["WorkerConnection"], None],
        on_lost: Callable[["WorkerConnection"], None],
    ) -> None:
        self._loop = loop
        self._limits = limits
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: Answer | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._allowed_s = 0.0  # from _active_s to the next thing we wait for
        self._waiting_for = ""
        self._active_s = 0.0
        self._paused = False
        self._answered = False
        self._carries_frames = False
        self._keep_alive = False
        self._other_bytes = 0

    @property
    def usable(self) -> bool:
        """Whether another request may be sent on it."""
        return (
            self._transport is not None
            and not self._transport.is_closing()
            and self._answer is None
        )

    def send(self, request: bytes) -> Answer:
        """Write a request; its answer fills as it comes."""
        assert self.usable
        assert self._transport is not None
        self._answer = answer = Answer(self._limits)
        answer.on_drained = self._resume
        self._answered = self._carries_frames = False
        self._other_bytes = 0
        self._transport.write(request)
        self._expect("response head", self._limits.head_s)
        return answer

    def abort(self) -> None:
        """Cut it now; an answer in progress fails."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio gives the socket."""
        # uvloop's transports have all its methods, and another base.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Asyncio gives what the socket holds."""
        if self._answer is None:
            self.abort()  # nobody asked
            return
        self._answered = True
        self._active_s = self._loop.time()
        answer = self._answer
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            cause = error.__context__ if isinstance(error.__context__, ProtocolError) else error
            self._fail(CutError(f"the answer is not ours: {cause}"))
            return
        if answer.lagging and not answer.complete and not self._paused:
            self._paused = True
            assert self._transport is not None
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Asyncio says it is over."""
        self._stop_timer()
        self._on_lost(self)
        if self._answer is not None:
            self._answer.fail(
                CutError(f"connection lost: {exc or 'closed'}", unanswered=not self._answered)
            )
            self._answer = None

    # httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        """One response header."""
        if name.lower() == b"content-type":
            self._carries_frames = value.strip() == FRAMES_CONTENT_TYPE
        elif name.lower() == BOOT_HEADER and self._answer is not None:
            self._answer.boot_id = value.strip().decode("latin-1")

    def on_headers_complete(self) -> None:
        """The response head is over."""
        assert self._answer is not None
        self._answer.status = self._parser.get_status_code()
        self._keep_alive = self._parser.should_keep_alive()
        if self._answer.status != HTTP_OK:
            self._answer.fail(WorkerRefusedError(self._answer.status))
        self._expect("first frame", self._limits.first_frame_s)

    def on_body(self, body: bytes) -> None:
        """Some of the response body."""
        assert self._answer is not None
        if self._carries_frames and self._answer.status == HTTP_OK:
            self._answer.feed(body)
            self._expect("next frame", self._limits.idle_s)
            return
        self._other_bytes += len(body)
        if self._other_bytes > OTHER_BODY_BYTES_MAX:
            raise ProtocolError("an answer without frames is too long")

    def on_message_complete(self) -> None:
        """The response is over: the connection may carry the next one."""
        assert self._answer is not None
        answer, self._answer = self._answer, None
        answer.on_drained = None
        self._stop_timer()
        answer.finish()
        if self._keep_alive and not self._paused:
            self._on_idle(self)
        else:
            self.abort()

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self._active_s = self._loop.time()
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    def _fail(self, error: CutError) -> None:
        if self._answer is not None:
            self._answer.fail(error)
        self.abort()

    # One timer for an answer, moved only when it fires: a token costs no timer.

    def _expect(self, what: str, seconds: float) -> None:
        self._waiting_for, self._allowed_s = what, seconds
        self._active_s = self._loop.time()
        if self._timer is not None and self._timer.when() > self._active_s + seconds:
            self._stop_timer()
        if self._timer is None:
            self._timer = self._loop.call_later(seconds, self._on_timer)

    def _on_timer(self) -> None:
        left_s = self._active_s + self._allowed_s - self._loop.time()
        if self._paused:
            left_s = self._allowed_s  # the consumer lags, not the worker
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._on_timer)
            return
        self._timer = None
        self._fail(CutError(f"no {self._waiting_for} within {self._allowed_s:g} s"))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
