"""An exchange's events as a response: a stream of them, or one body when all are there.

A stream's headers wait for the engine to start, so that what fails before is a status of its
own; after `headers_wait_s` they go out all the same, and signs of life follow. Whatever
happens, the exchange hears what was written and when nobody reads it any more.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import msgspec

from core.errors import Code, Refusal
from core.money import EndCause
from gateway.accumulator import Accumulator
from gateway.api.faces import Face
from gateway.api.replayed import Replayed
from gateway.api.responder import Responder
from gateway.bill import usage_headers
from gateway.conversation import (
    Answer,
    Broke,
    Conversation,
    Done,
    StreamEvent,
    StreamWriter,
)
from gateway.relay.exchange import Exchange
from gateway.replay import Recorder
from gateway.sse import SSE_HEADERS

WHOLE_WAIT_S = 3_600.0  # the exchange ends by its own deadline long before
FAULT = Refusal(code=Code.INTERNAL, message="The answer could not be told.")


Keep = Callable[[Answer, str], Awaitable[None]]


class AnswerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How long a client may hear nothing."""

    headers_wait_s: float = 10.0
    ping_s: float = 10.0


class Telling:
    """Tells one exchange's answer to its client.

    `keep` is given a whole answer, and waited for, before the client is told that it is whole.
    `recorder` is given every event as it comes.
    """

    def __init__(
        self,
        exchange: Exchange | Replayed,
        respond: Responder,
        *,
        face: Face,
        limits: AnswerLimits,
        now_ms: Callable[[], int],
        keep: Keep | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._exchange = exchange
        self._respond = respond
        self._face = face
        self._limits = limits
        self._now_ms = now_ms
        self._keep = keep
        self._recorder = recorder
        self._clock = asyncio.get_running_loop().time
        self._client_left = False

    def client_left(self) -> None:
        """Cancel the exchange, streaming or not."""
        self._client_left = True
        self._exchange.cancel(EndCause.CLIENT_CANCELLED)

    async def stream(
        self, conversation: Conversation, make_writer: Callable[[str], StreamWriter]
    ) -> None:
        """Server-sent events; a refusal that comes before any of them is an HTTP error."""
        events = await self._take(self._limits.headers_wait_s)
        if events and isinstance(events[0][0], Broke):
            await self._refuse(events[0][0].refusal)
            return
        writer = make_writer(self._exchange.request_id)
        gathered = Accumulator(conversation) if self._keep is not None else None
        await self._start_stream()
        while True:
            if gathered is not None:
                await self._gather(gathered, events)
            await self._write_events(writer, events)
            if events and isinstance(events[-1][0], Done | Broke):
                return
            events = await self._take(self._limits.ping_s)

    async def whole(
        self, conversation: Conversation, encode: Callable[[Answer, str], bytes]
    ) -> None:
        """One body when the answer is whole, or one refusal."""
        gathered = Accumulator(conversation)
        tokens = 0
        while True:
            for event, count in await self._take(WHOLE_WAIT_S):
                tokens += count
                match event:
                    case Done():
                        await self._write_whole(gathered, event, encode)
                        self._delivered(tokens)
                        return
                    case Broke(refusal=refusal):
                        await self._refuse(refusal)
                        return
                    case _:
                        gathered.take(event)

    async def _take(self, within_s: float) -> list[tuple[StreamEvent, int]]:
        events = await self._exchange.channel.take(within_s)
        if self._recorder is not None:
            for event, tokens in events:
                self._recorder.take(event, tokens, self._exchange.request_id)
        return events

    async def _gather(self, gathered: Accumulator, events: list[tuple[StreamEvent, int]]) -> None:
        for event, _ in events:
            gathered.take(event)
            if isinstance(event, Done) and self._keep is not None:
                answer = gathered.answer(event.usage, event.bill)
                await self._keep(answer, self._exchange.request_id)

    async def _start_stream(self) -> None:
        headers = {**SSE_HEADERS, **self._limit_headers()}
        await self._respond.start(200, headers, self._exchange.request_id)

    async def _write_events(
        self, writer: StreamWriter, events: list[tuple[StreamEvent, int]]
    ) -> None:
        data = b"".join(_written(writer, events)) if events else writer.keep_alive()
        last = bool(events) and isinstance(events[-1][0], Done | Broke)
        if data or last:
            await self._write(data, more=not last)
        self._delivered(sum(tokens for _, tokens in events))

    async def _write_whole(
        self, gathered: Accumulator, done: Done, encode: Callable[[Answer, str], bytes]
    ) -> None:
        request_id = self._exchange.request_id
        answer = gathered.answer(done.usage, done.bill)
        if self._keep is not None:
            await self._keep(answer, request_id)
        body = encode(answer, request_id)
        headers = {**self._limit_headers(), **usage_headers(done.usage, done.bill)}
        await self._respond.whole(200, body, headers, request_id)

    async def _write(self, data: bytes, *, more: bool) -> None:
        # A client that takes nothing is seen by how long this one call lasts.
        self._exchange.writing_since_s = self._clock()
        await self._respond.write(data, more=more)
        self._exchange.writing_since_s = 0.0

    async def _refuse(self, refusal: Refusal) -> None:
        if not self._client_left:
            await self._respond.refuse(refusal, self._exchange.request_id, self._limit_headers())

    def _delivered(self, tokens: int) -> None:
        if not self._client_left:
            self._exchange.delivered(tokens)

    def _limit_headers(self) -> dict[str, str]:
        headroom, headers = self._exchange.headroom, self._exchange.route_headers
        if headroom is None:
            return headers
        return {**headers, **self._face.limit_headers(headroom, self._now_ms())}


def _written(writer: StreamWriter, events: list[tuple[StreamEvent, int]]) -> Iterator[bytes]:
    for event, tokens in events:
        writer.produced += tokens
        yield writer.write(event)
