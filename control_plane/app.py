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
from control_plane.api import (
    access,
    accounts,
    adjustments,
    answer_cache,
    audit_log,
    caps,
    check,
    deployments,
    fleet,
    health,
    kept_responses,
    keys,
    limits,
    login,
    models,
    oidc,
    price_books,
    prices,
    providers,
    pulse,
    reconciliation,
    replicas,
    rollout_words,
    rollouts,
    routes,
    safety,
    scaling,
    sessions,
    tenants,
    tokens,
    usage,
    usage_totals,
    users,
)
from control_plane.background import Background
from control_plane.bodies import check_body
from control_plane.described import described
from control_plane.jobs import jobs
from control_plane.launchers.base import Launcher
from control_plane.launchers.external import ExternalLauncher
from control_plane.metrics import Metrics
from control_plane.services import Services, open_services
from control_plane.settings import ControlPlaneSettings
from control_plane.ui.client import AdminApi
from control_plane.ui.console import Console, static
from control_plane.ui.pages import console_router

ADMIN_HANDLERS = [
    access.list_access,
    access.put_access,
    access.delete_access,
    access.put_key_access,
    access.delete_key_access,
    accounts.read_account,
    accounts.put_account,
    accounts.list_entries,
    adjustments.create_credit,
    adjustments.create_refund,
    adjustments.create_adjustment,
    adjustments.create_reprice,
    audit_log.list_audit_log,
    caps.list_caps,
    caps.put_cap,
    caps.delete_cap,
    caps.list_key_caps,
    caps.put_key_cap,
    caps.delete_key_cap,
    check.check,
    deployments.create_deployment,
    deployments.list_deployments,
    deployments.read_deployment,
    deployments.patch_deployment,
    kept_responses.read_kept_responses,
    kept_responses.put_kept_responses,
    answer_cache.read_answer_cache,
    answer_cache.put_answer_cache,
    answer_cache.drop_answer_cache,
    keys.create_key,
    keys.list_keys,
    keys.revoke_key,
    limits.read_tier_limits,
    limits.put_tier_limits,
    limits.read_tenant_limits,
    limits.put_tenant_limits,
    limits.read_key_limits,
    limits.put_key_limits,
    login.logout,
    login.read_me,
    login.change_password,
    models.register_model,
    models.list_models,
    models.read_model,
    models.patch_model,
    price_books.create_price_book,
    price_books.list_price_books,
    prices.create_price,
    prices.list_prices,
    providers.create_provider,
    providers.replace_provider,
    providers.list_providers,
    providers.read_provider,
    providers.delete_provider,
    providers.reseal_providers,
    pulse.read_pulse,
    reconciliation.list_differences,
    reconciliation.close_difference,
    reconciliation.close_kind,
    replicas.list_replicas,
    replicas.read_replica,
    replicas.drain_replica,
    replicas.undrain_replica,
    routes.put_route,
    routes.list_routes,
    routes.read_route,
    routes.delete_route,
    rollouts.create_rollout,
    rollouts.list_rollouts,
    rollouts.read_rollout,
    rollouts.list_rollout_events,
    rollout_words.promote_rollout,
    rollout_words.pause_rollout,
    rollout_words.resume_rollout,
    rollout_words.abort_rollout,
    rollout_words.roll_back_rollout,
    safety.put_policy,
    safety.list_policies,
    safety.read_policy,
    safety.read_assignment,
    safety.assign_policy,
    safety.unassign_policy,
    safety.list_hits,
    sessions.list_sessions,
    sessions.end_session,
    scaling.put_scaling_policy,
    scaling.list_scaling_policies,
    scaling.read_scaling_policy,
    scaling.delete_scaling_policy,
    scaling.list_scaling_decisions,
    tenants.create_tenant,
    tenants.list_tenants,
    tenants.read_tenant,
    tenants.patch_tenant,
    tokens.create_token,
    tokens.list_tokens,
    tokens.revoke_token,
    usage.list_usage,
    usage_totals.read_usage_totals,
    usage_totals.rebuild_usage_totals,
    users.create_user,
    users.list_users,
    users.read_user,
    users.patch_user,
    users.reset_user,
]

# Open to strangers: they are how one comes in.
PUBLIC_HANDLERS = [
    login.ways_in,
    login.login,
    login.accept_invitation,
    oidc.start,
    oidc.callback,
]


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
        route_handlers=[fleet.register, fleet.beat, fleet.journal],
        guards=[auth.fleet_guard(settings.internal_secret.encode())],
    )
    return Litestar(
        [
            *(admin, public, workers, console_router(), static),
            *(health.live, health.ready, health.exposition),
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
