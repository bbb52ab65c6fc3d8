"""An exchange's events as a response: a stream of them, or one body when all are there.

A stream's headers wait for the engine to start, so that what fails before is a status of its
own; after `headers_wait_s` they go out all the same, and signs of life follow. Whatever
happens, the exchange hears what was written and when nobody reads it any more.
"""

import asyncio
from collections.abc import Callable

import msgspec

from core.errors import Code, Refusal
from core.money import EndCause
from core.protocol import Usage
from gateway.accumulator import Accumulator
from gateway.api.faces import Face
from gateway.api.responder import Receive, Responder
from gateway.conversation import (
    Answer,
    Broke,
    CallDelta,
    CallStart,
    ChoiceEnd,
    Conversation,
    Delta,
    Done,
    Opened,
    StreamEvent,
    StreamWriter,
)
from gateway.relay.exchange import Exchange
from gateway.sse import SSE_HEADERS

WHOLE_WAIT_S = 3_600.0  # the exchange ends by its own deadline long before
FAULT = Refusal(code=Code.INTERNAL, message="The answer could not be told.")


class AnswerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How long a client may hear nothing."""

    headers_wait_s: float = 10.0
    ping_s: float = 10.0


class Telling:
    """Tells one exchange's answer to its client."""

    def __init__(
        self,
        exchange: Exchange,
        respond: Responder,
        *,
        face: Face,
        limits: AnswerLimits,
        now_ms: Callable[[], int],
    ) -> None:
        self._exchange = exchange
        self._respond = respond
        self._face = face
        self._limits = limits
        self._now_ms = now_ms
        self._clock = asyncio.get_running_loop().time
        self._client_left = False

    async def watch(self, receive: Receive) -> None:
        """Cancel the exchange when its client leaves, streaming or not."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._client_left = True
        self._exchange.cancel(EndCause.CLIENT_CANCELLED)

    async def stream(self, make_writer: Callable[[str], StreamWriter]) -> None:
        """Server-sent events; a refusal that comes before any of them is an HTTP error."""
        channel = self._exchange.channel
        events = await channel.take(self._limits.headers_wait_s)
        if events and isinstance(events[0][0], Broke):
            await self._refuse(events[0][0].refusal)
            return
        writer = make_writer(self._exchange.request_id)
        await self._start_stream()
        while True:
            await self._write_events(writer, events)
            if events and isinstance(events[-1][0], Done | Broke):
                return
            events = await channel.take(self._limits.ping_s)

    async def whole(
        self, conversation: Conversation, encode: Callable[[Answer, str], bytes]
    ) -> None:
        """One body when the answer is whole, or one refusal."""
        gathered = Accumulator(conversation)
        tokens = 0
        while True:
            for event, count in await self._exchange.channel.take(WHOLE_WAIT_S):
                tokens += count
                match event:
                    case Opened():
                        gathered.open(event)
                    case Delta():
                        gathered.delta(event)
                    case CallStart():
                        gathered.call(event)
                    case CallDelta():
                        gathered.arguments(event)
                    case ChoiceEnd():
                        gathered.end(event)
                    case Done(usage=usage):
                        await self._write_whole(gathered, usage, encode)
                        self._delivered(tokens)
                        return
                    case Broke(refusal=refusal):
                        await self._refuse(refusal)
                        return

    async def _start_stream(self) -> None:
        headers = {**SSE_HEADERS, **self._limit_headers()}
        await self._respond.start(200, headers, self._exchange.request_id)

    async def _write_events(
        self, writer: StreamWriter, events: list[tuple[StreamEvent, int]]
    ) -> None:
        if events:
            data = b"".join([writer.write(event) for event, _ in events])
        else:
            data = writer.keep_alive()
        last = bool(events) and isinstance(events[-1][0], Done | Broke)
        if data or last:
            await self._write(data, more=not last)
        self._delivered(sum(tokens for _, tokens in events))

    async def _write_whole(
        self, gathered: Accumulator, usage: Usage, encode: Callable[[Answer, str], bytes]
    ) -> None:
        request_id = self._exchange.request_id
        body = encode(gathered.answer(usage), request_id)
        await self._respond.whole(200, body, self._limit_headers(), request_id)

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
        headroom = self._exchange.headroom
        if headroom is None:
            return {}
        return self._face.limit_headers(headroom, self._now_ms())
