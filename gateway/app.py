"""The gateway's Litestar application: one mount, and which path is answered by what.

Litestar opens and closes it. Below the mount requests are raw ASGI: a typed handler costs as
much as the rest of a request, and is never told that its client has left. Whatever is none of
our paths is refused in the caller's dialect.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast
from urllib.parse import unquote

from litestar import Litestar, asgi
from litestar import types as litestar_types

from gateway.api.answers import AnswerLimits
from gateway.api.counting import CountTokensEndpoint
from gateway.api.endpoint import Edge, EdgeLimits
from gateway.api.generate import CHAT, COMPLETIONS, MESSAGES, GenerateEndpoint
from gateway.api.health import Health
from gateway.api.models import PREFIX, ModelEndpoint, ModelsEndpoint, NowhereEndpoint
from gateway.api.own import OwnLimitsEndpoint, OwnUsageEndpoint
from gateway.api.responder import Receive, Scope, Send
from gateway.api.responses import (
    RESPONSES,
    CountResponseEndpoint,
    KeptResponseEndpoint,
    ResponsesEndpoint,
)
from gateway.api.shortener import Shortener
from gateway.gateway import Gateway, now_ms
from gateway.images import ImageLimits
from gateway.patience import Bounds

_log = logging.getLogger(__name__)

Answerer = Callable[[Scope, Receive, Send], Awaitable[None]]


def create_app(gateway: Gateway) -> Litestar:
    """Opens and closes the gateway with the server's lifespan."""
    paths = Paths(gateway)

    @asynccontextmanager
    async def opened(_app: Litestar) -> AsyncIterator[None]:
        try:
            await gateway.open()
        except Exception:
            _log.exception("the gateway cannot start")
            raise
        try:
            paths.build()
            yield
        finally:
            await gateway.close()

    @asgi("/", is_mount=True, copy_scope=False)
    async def mount(
        scope: litestar_types.Scope, receive: litestar_types.Receive, send: litestar_types.Send
    ) -> None:
        await paths(cast("Scope", scope), cast("Receive", receive), cast("Send", send))

    return Litestar([mount], lifespan=[opened], openapi_config=None, logging_config=None)


class Paths:
    """What answers each path."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._paths: dict[str, Answerer] = {}
        self._below: dict[str, Answerer] = {}  # of what each of these begins
        self._nowhere: Answerer | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        # A mount rewrites the path; ours mean what the client wrote.
        path = scope["path"] = unquote(scope["raw_path"].decode("ascii"))
        answerer = self._paths.get(path)
        if answerer is None:
            below = (each for prefix, each in self._below.items() if path.startswith(prefix))
            answerer = next(below, self._nowhere)
        assert answerer is not None, "the server takes no request before the lifespan began"
        await answerer(scope, receive, send)

    def build(self) -> None:
        """Once the gateway is open."""
        gateway, settings = self._gateway, self._gateway.settings
        edge = Edge(
            auth=gateway.auth,
            metrics=gateway.metrics,
            limits=EdgeLimits(
                body_bytes_max=settings.body_bytes_max,
                body_timeout_s=settings.body_timeout_ms / 1000,
                patience=Bounds(
                    deadline_ms=settings.deadline_ms_max,
                    first_token_ms=settings.first_token_ms_max,
                    idle_ms=settings.idle_ms_max,
                ),
                images=ImageLimits(
                    bytes_max=settings.image_bytes_max, count_max=settings.images_max
                ),
            ),
            claims=gateway.claims,
            now_ms=now_ms,
            new_request_id=gateway.new_request_id,
        )
        patience = AnswerLimits(
            headers_wait_s=settings.headers_wait_ms / 1000, ping_s=settings.ping_ms / 1000
        )
        health = Health(
            reasons=gateway.reasons, refresh=gateway.refresh_metrics, metrics=gateway.metrics
        )
        relay, routes, kept = gateway.relay, gateway.routes, gateway.kept_responses
        shortener = Shortener(routes, gateway.prompts, now_ms)
        self._paths = {
            "/v1/chat/completions": GenerateEndpoint(edge, relay, CHAT, patience),
            "/v1/completions": GenerateEndpoint(edge, relay, COMPLETIONS, patience),
            "/v1/messages": GenerateEndpoint(edge, relay, MESSAGES, patience),
            "/v1/messages/count_tokens": CountTokensEndpoint(edge, routes, gateway.prompts),
            "/v1/responses": ResponsesEndpoint(edge, relay, kept, patience, shortener),
            "/v1/responses/input_tokens": CountResponseEndpoint(edge, kept, shortener),
            "/v1/models": ModelsEndpoint(edge, routes),
            "/v1/limits": OwnLimitsEndpoint(edge, gateway.dispatch),
            "/v1/usage": OwnUsageEndpoint(edge, gateway.own_usage),
            "/health/live": health.live,
            "/health/ready": health.ready,
            "/health": health.ready,  # where load generators and balancers ask unasked
            "/healthz": health.live,
            "/metrics": health.exposition,
        }
        self._below = {
            PREFIX: ModelEndpoint(edge, routes),
            RESPONSES: KeptResponseEndpoint(edge, kept),
        }
        self._nowhere = NowhereEndpoint(edge)
