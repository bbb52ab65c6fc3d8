"""The gateway as a raw ASGI application: which path is answered by what.

Every path is either generating, where a framework's routing would cost as much as the rest of
the request, or trivial. Whatever is none of our paths is refused in the caller's dialect.
"""

import logging
from collections.abc import Awaitable, Callable

from gateway.api.answers import AnswerLimits
from gateway.api.counting import CountTokensEndpoint
from gateway.api.endpoint import Edge, EdgeLimits
from gateway.api.generate import CHAT, COMPLETIONS, MESSAGES, GenerateEndpoint
from gateway.api.health import Health
from gateway.api.models import PREFIX, ModelEndpoint, ModelsEndpoint, NowhereEndpoint
from gateway.api.responder import Receive, Scope, Send
from gateway.gateway import Gateway, now_ms

_log = logging.getLogger(__name__)

Answerer = Callable[[Scope, Receive, Send], Awaitable[None]]


class App:
    """Opens and closes the gateway with the server's lifespan."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._paths: dict[str, Answerer] = {}
        self._model: Answerer | None = None
        self._nowhere: Answerer | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the lifespan."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        answerer = self._paths.get(scope["path"])
        if answerer is None:
            answerer = self._model if scope["path"].startswith(PREFIX) else self._nowhere
        assert answerer is not None, "the server takes no request before the lifespan began"
        await answerer(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self._gateway.open()
        except Exception as error:  # noqa: BLE001 - the server wants it as a message
            _log.error("the gateway cannot start", exc_info=error)
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        self._build()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._gateway.close()
        await send({"type": "lifespan.shutdown.complete"})

    def _build(self) -> None:
        gateway, settings = self._gateway, self._gateway.settings
        edge = Edge(
            auth=gateway.auth,
            metrics=gateway.metrics,
            limits=EdgeLimits(
                body_bytes_max=settings.body_bytes_max,
                body_timeout_s=settings.body_timeout_ms / 1000,
                deadline_ms_max=settings.deadline_ms_max,
            ),
            now_ms=now_ms,
            new_request_id=gateway.new_request_id,
        )
        patience = AnswerLimits(
            headers_wait_s=settings.headers_wait_ms / 1000, ping_s=settings.ping_ms / 1000
        )
        health = Health(
            reasons=gateway.reasons, refresh=gateway.refresh_metrics, metrics=gateway.metrics
        )
        relay, routes = gateway.relay, gateway.routes
        self._paths = {
            "/v1/chat/completions": GenerateEndpoint(edge, relay, CHAT, patience),
            "/v1/completions": GenerateEndpoint(edge, relay, COMPLETIONS, patience),
            "/v1/messages": GenerateEndpoint(edge, relay, MESSAGES, patience),
            "/v1/messages/count_tokens": CountTokensEndpoint(edge, routes, gateway.prompts),
            "/v1/models": ModelsEndpoint(edge, routes),
            "/health/live": health.live,
            "/health/ready": health.ready,
            "/metrics": health.exposition,
        }
        self._model = ModelEndpoint(edge, routes)
        self._nowhere = NowhereEndpoint(edge)
