"""One response: its head once, its body in pieces, the request's id in both dialects' headers.

Counts responses by status. Writes to a client that left are dropped by the server.
"""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from core.errors import Code, Refusal
from gateway.api.faces import Face
from gateway.metrics import Metrics

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

JSON = {"content-type": "application/json"}


class Responder:
    """`endpoint` is a label, never a path of the client's making."""

    def __init__(self, send: Send, *, face: Face, endpoint: str, metrics: Metrics) -> None:
        self._send = send
        self._face = face
        self._endpoint = endpoint
        self._metrics = metrics
        self.started = False
        self.more_headers: dict[str, str] = {}  # of whatever is answered

    async def start(self, status: int, headers: Mapping[str, str], request_id: str) -> None:
        """The head."""
        assert not self.started
        self.started = True
        self._metrics.responses.labels(self._endpoint, str(status)).inc()
        told = {**headers, **self.more_headers}
        pairs = [(name.encode(), value.encode()) for name, value in told.items()]
        pairs += [(b"x-request-id", request_id.encode()), (b"request-id", request_id.encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, body: bytes, *, more: bool) -> None:
        """Some of the body."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def whole(
        self, status: int, body: bytes, headers: Mapping[str, str], request_id: str
    ) -> None:
        """A JSON body at once."""
        length = {"content-length": str(len(body))}
        await self.start(status, {**JSON, **length, **headers}, request_id)
        await self.write(body, more=False)

    async def refuse(
        self, refusal: Refusal, request_id: str, headers: Mapping[str, str] | None = None
    ) -> None:
        """The dialect's error."""
        status, body, more = self._face.refusal(refusal, request_id)
        if refusal.code is Code.TOO_LARGE:
            more["connection"] = "close"  # the rest of the body may still be on its way
        await self.whole(status, body, {**(headers or {}), **more}, request_id)
