"""The gateway as an ASGI application: which path is answered by what.

Generating paths are raw ASGI routes, an ordinary handler costs twice as much. Whatever is
none of our paths is answered in the dialect that the caller speaks.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from litestar import Litestar, Request, Response, asgi
from litestar.exceptions import HTTPException
from litestar.handlers import ASGIRouteHandler
from litestar.types import Receive, Scope, Send

from core.errors import Code, Refusal
from gateway.api.answers import AnswerLimits
from gateway.api.counting import CountTokensEndpoint
from gateway.api.endpoint import Edge, EdgeLimits
from gateway.api.faces import face_of
from gateway.api.generate import CHAT, COMPLETIONS, MESSAGES, GenerateEndpoint
from gateway.api.health import Health
from gateway.api.models import ModelEndpoint, ModelsEndpoint
from gateway.api.responder import Scope as PlainScope
from gateway.gateway import Gateway, now_ms

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/v1/models/{model:path}",
    "/health/live",
    "/health/ready",
    "/metrics",
)


def create_app(gateway: Gateway) -> Litestar:
    """Opens and closes the gateway with its lifespan."""
    endpoints: dict[str, Any] = {}

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        await gateway.open()
        endpoints.update(make_endpoints(gateway))
        try:
            yield
        finally:
            await gateway.close()

    return Litestar(
        [_route(path, endpoints) for path in PATHS],
        lifespan=[lifespan],
        exception_handlers={
            HTTPException: lambda request, error: _nowhere(gateway, request, error)
        },
        openapi_config=None,
        logging_config=None,
    )


def make_endpoints(gateway: Gateway) -> Mapping[str, Any]:
    """An ASGI application for each of `PATHS`."""
    settings = gateway.settings
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
    return {
        "/v1/chat/completions": GenerateEndpoint(edge, relay, CHAT, patience),
        "/v1/completions": GenerateEndpoint(edge, relay, COMPLETIONS, patience),
        "/v1/messages": GenerateEndpoint(edge, relay, MESSAGES, patience),
        "/v1/messages/count_tokens": CountTokensEndpoint(edge, routes, gateway.prompts),
        "/v1/models": ModelsEndpoint(edge, routes),
        "/v1/models/{model:path}": ModelEndpoint(edge, routes),
        "/health/live": health.live,
        "/health/ready": health.ready,
        "/metrics": health.exposition,
    }


def _route(path: str, endpoints: Mapping[str, Any]) -> ASGIRouteHandler:
    @asgi(path, copy_scope=False)
    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        await endpoints[path](scope, receive, send)

    return handle


def _nowhere(
    gateway: Gateway, request: Request[Any, Any, Any], error: HTTPException
) -> Response[bytes]:
    """Litestar's own refusals: no such path, or a request that it cannot read."""
    code, message = Code.NOT_FOUND, f"There is nothing at {request.scope['path']}."
    if error.status_code != 404:  # noqa: PLR2004 - HTTP's own number
        code, message = Code.BAD_REQUEST, error.detail
    request_id = gateway.new_request_id()
    scope: PlainScope = dict(request.scope)
    status, body, headers = face_of(scope).refusal(Refusal(code=code, message=message), request_id)
    gateway.metrics.responses.labels("nowhere", str(status)).inc()
    ids = {"x-request-id": request_id, "request-id": request_id}
    return Response(
        body, status_code=status, media_type="application/json", headers={**headers, **ids}
    )
