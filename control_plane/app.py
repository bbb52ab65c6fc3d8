"""The control plane as an ASGI application: routes, guards, error bodies, jobs beside them."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from litestar import Litestar, Router
from litestar.datastructures import State
from litestar.di import Provide
from litestar.enums import ScopeType
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from control_plane import auth, errors
from control_plane.background import Background
from control_plane.bodies import check_body
from control_plane.described import described
from control_plane.endpoints import (
    ADMIN_HANDLERS,
    FLEET_HANDLERS,
    HEALTH_HANDLERS,
    PUBLIC_HANDLERS,
)
from control_plane.jobs import jobs
from control_plane.launchers.base import Launcher
from control_plane.launchers.external import ExternalLauncher
from control_plane.metrics import Metrics
from control_plane.services import Services, open_services
from control_plane.settings import ControlPlaneSettings
from control_plane.ui.client import AdminApi
from control_plane.ui.console import Console, static
from control_plane.ui.pages import console_router


def create_app(settings: ControlPlaneSettings, launcher: Launcher | None = None) -> Litestar:
    """One process's application; nothing is opened before its lifespan begins.

    Without a launcher, replicas are somebody else's to start.
    """
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncIterator[None]:
        async with open_services(settings, metrics) as services:
            app.state.services = services
            app.state.console = Console(AdminApi(app))
            background = Background(
                metrics,
                timeout_ms=settings.job_timeout_ms,
                backoff_max_ms=settings.backoff_max_ms,
                leadership=services.leadership,
            )
            background.start(jobs(services, launcher or ExternalLauncher()))
            try:
                yield
            finally:
                await background.close()

    admin = Router(
        "/admin",
        route_handlers=described(ADMIN_HANDLERS),
        guards=[auth.admin_guard(settings.admin_token)],
    )
    public = Router("/admin", route_handlers=described(PUBLIC_HANDLERS))
    workers = Router(
        "/fleet",
        route_handlers=FLEET_HANDLERS,
        guards=[auth.fleet_guard(settings.internal_secret.encode())],
    )
    return Litestar(
        [
            *(admin, public, workers, console_router(), static),
            *HEALTH_HANDLERS,
        ],
        lifespan=[lifespan],
        dependencies={
            "services": Provide(_services, sync_to_thread=False),
            "actor": Provide(auth.actor, sync_to_thread=False),
            "caller": Provide(auth.caller, sync_to_thread=False),
        },
        exception_handlers=errors.HANDLERS,
        before_request=check_body,
        middleware=[_counting(metrics)],
        request_max_body_size=settings.body_bytes_max,
        openapi_config=OpenAPIConfig(
            title="Headworks control plane", version="1", render_plugins=[JsonRenderPlugin()]
        ),
        logging_config=None,
    )


def _services(state: State) -> Services:
    services: Services = state.services
    return services


def _counting(metrics: Metrics) -> Callable[[ASGIApp], ASGIApp]:
    """Middleware that counts and times answers by path template, never by path."""

    def wrap(app: ASGIApp) -> ASGIApp:
        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != ScopeType.HTTP:
                return await app(scope, receive, send)
            template, method, began = scope["path_template"], scope["method"], time.monotonic()

            async def watch(message: Message) -> None:
                if message["type"] == "http.response.start":
                    metrics.requests.labels(template, method, str(message["status"])).inc()
                    metrics.seconds.labels(template).observe(time.monotonic() - began)
                await send(message)

            return await app(scope, receive, watch)

        return counted

    return wrap
