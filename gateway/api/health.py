"""Liveness, readiness and metrics. Liveness touches nothing; readiness asks nobody either.

It tells what the background loops have lately found, so that a probe costs nothing and a
flood of them changes nothing.
"""

from collections.abc import Callable

import msgspec

from gateway.api.responder import JSON, Receive, Scope, Send
from gateway.metrics import Metrics

OK, UNAVAILABLE, NOT_ALLOWED = 200, 503, 405
TEXT = "text/plain; version=0.0.4; charset=utf-8"

Reasons = Callable[[], dict[str, str]]


class Health:
    """`reasons` says, for each part that is not well, why."""

    def __init__(self, *, reasons: Reasons, refresh: Callable[[], None], metrics: Metrics) -> None:
        self._reasons = reasons
        self._refresh = refresh
        self._metrics = metrics

    async def live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """200 whenever the process answers."""
        await _answer(scope, receive, send, status=OK, body=b'{"status":"live"}')

    async def ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        """200, or 503 with what is missing."""
        reasons = self._reasons()
        body = msgspec.json.encode({"ready": not reasons, "reasons": reasons})
        status = UNAVAILABLE if reasons else OK
        await _answer(scope, receive, send, status=status, body=body)

    async def exposition(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Prometheus's text."""
        self._refresh()
        await _answer(scope, receive, send, status=OK, body=self._metrics.text(), content_type=TEXT)


async def _answer(
    scope: Scope,
    receive: Receive,
    send: Send,
    *,
    status: int,
    body: bytes,
    content_type: str = JSON["content-type"],
) -> None:
    await receive()
    if scope["method"] not in {"GET", "HEAD"}:
        status, body = NOT_ALLOWED, b""
    headers = [
        (b"content-type", content_type.encode()),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
