"""The console's pages: what each asks of the admin API, and the template that shows it."""

from typing import Annotated
from urllib.parse import quote

from litestar import Response, Router, get
from litestar.di import NamedDependency, Provide
from litestar.params import FromPath, QueryParameter

from control_plane.access.origins import origin_of
from control_plane.services import Services
from control_plane.ui import fleet_view, pulse_view, rollout_view, tenant_view
from control_plane.ui.client import SignedOutError
from control_plane.ui.console import Asked, Console, console_of, sign_in_first
from control_plane.ui.playground import chat

MANY = 500  # rows that are shown without asking for more
PAGE = 50

Word = Annotated[str, QueryParameter(max_length=200)]
Minutes = Annotated[int, QueryParameter(ge=1, le=10_000)]
Ui = NamedDependency[Console]


@get("/sign-in")
async def sign_in(request: Asked, console: Ui) -> Response[str]:
    """With the ways there are."""
    ways = await console.api.get(request, "/login")
    return console.render(request, "sign_in.html", ways=ways)


@get("/welcome")
async def welcome(request: Asked, console: Ui) -> Response[str]:
    """Where an invitation becomes a password."""
    return console.render(request, "welcome.html")


@get("/")
async def overview(request: Asked, console: Ui, minutes: Minutes = 15) -> Response[str]:
    """What a person on call looks at first."""
    found = await console.api.all(
        request,
        pulse=("/pulse", {"minutes": minutes}),
        deployments=("/deployments", {"limit": MANY}),
        replicas=("/replicas", {"limit": MANY}),
    )
    picture = found["pulse"].data
    shown = {"minutes": minutes, **found}
    if picture is not None:
        span_ms = picture["as_of_ms"] - picture["from_ms"]
        shown["figures"] = pulse_view.pulse_figures(picture["points"], span_ms)
        shown["charts"] = pulse_view.pulse_charts(picture)
    if found["deployments"].ok and found["replicas"].ok:
        pools = fleet_view.pools(
            found["deployments"].data["deployments"], found["replicas"].data["replicas"]
        )
        shown |= {"pools": pools, "fleet": fleet_view.fleet_figures(pools)}
    return await console.page(request, "overview.html", **shown)


@get("/fleet")
async def fleet(request: Asked, console: Ui) -> Response[str]:
    """Every replica, by deployment."""
    found = await console.api.all(
        request,
        deployments=("/deployments", {"limit": MANY}),
        replicas=("/replicas", {"limit": MANY}),
    )
    pools = []
    if found["deployments"].ok and found["replicas"].ok:
        pools = fleet_view.pools(
            found["deployments"].data["deployments"], found["replicas"].data["replicas"]
        )
    figures = fleet_view.fleet_figures(pools)
    return await console.page(request, "fleet.html", pools=pools, figures=figures, **found)


@get("/models")
async def models(request: Asked, console: Ui) -> Response[str]:
    """Public names with where they lead, and the versions there are."""
    found = await console.api.all(
        request,
        routes=("/routes", {"limit": MANY}),
        models=("/models", {"limit": MANY}),
        prices=("/prices", {"limit": MANY}),
    )
    return await console.page(request, "models.html", summary=tenant_view.route_summary, **found)


@get("/rollouts")
async def rollouts(request: Asked, console: Ui) -> Response[str]:
    """Those under way first."""
    found = await console.api.all(request, rollouts=("/rollouts", {"limit": PAGE}))
    return await console.page(request, "rollouts.html", **found)


@get("/rollouts/{name:str}")
async def rollout(request: Asked, console: Ui, name: FromPath[str]) -> Response[str]:
    """One, with its two sides beside each other and why each step was taken."""
    found = await console.api.all(request, rollout=f"/rollouts/{quote(name, safe='')}")
    compared = found["rollout"].data["comparison"] if found["rollout"].ok else None
    sides = rollout_view.sides(compared) if compared else []
    return await console.page(request, "rollout.html", name=name, sides=sides, **found)


@get("/scaling")
async def scaling(request: Asked, console: Ui) -> Response[str]:
    """Policies, and what was decided by them."""
    found = await console.api.all(
        request,
        policies=("/scaling-policies", {"limit": MANY}),
        decisions=("/scaling-decisions", {"limit": PAGE}),
    )
    return await console.page(request, "scaling.html", **found)


@get("/tenants")
async def tenants(request: Asked, console: Ui, name: Word = "", after: Word = "") -> Response[str]:
    """A page of them."""
    query = {"name": name, "after": after, "limit": PAGE}
    found = await console.api.all(request, tenants=("/tenants", query))
    return await console.page(request, "tenants.html", name=name, **found)


@get("/tenants/{tenant:str}")
async def tenant(request: Asked, console: Ui, tenant: FromPath[str]) -> Response[str]:
    """One tenant: keys, money, limits, its last requests."""
    base = f"/tenants/{quote(tenant, safe='')}"
    found = await console.api.all(
        request,
        tenant=base,
        keys=(f"{base}/keys", {"limit": MANY}),
        account=f"{base}/account",
        limits=f"{base}/limits",
        usage=("/usage", {"tenant_id": tenant, "limit": 20}),
        hits=("/safety-hits", {"tenant": tenant, "limit": 10}),
    )
    return await console.page(request, "tenant.html", held=tenant_view.held, **found)


@get("/usage")
async def usage(request: Asked, console: Ui, model: Word = "", after: Word = "") -> Response[str]:
    """This month by day and by model, and requests one by one."""
    found = await console.api.all(
        request,
        days=("/usage/totals", {"by": "day", "model": model, "limit": 100}),
        models=("/usage/totals", {"by": "model,cause", "model": model, "limit": 200}),
        requests=("/usage", {"model": model, "after": after, "limit": PAGE}),
    )
    chart = tenant_view.usage_chart(found["days"].data) if found["days"].ok else None
    return await console.page(request, "usage.html", chart=chart, model=model, **found)


@get("/safety")
async def safety(request: Asked, console: Ui) -> Response[str]:
    """Policies, and what they met."""
    found = await console.api.all(
        request,
        policies=("/safety-policies", {"limit": MANY}),
        hits=("/safety-hits", {"limit": PAGE}),
    )
    return await console.page(request, "safety.html", **found)


@get("/audit")
async def audit(
    request: Asked, console: Ui, subject: Word = "", before: Word = ""
) -> Response[str]:
    """Who changed what."""
    query = {"subject": subject, "before": before, "limit": PAGE}
    found = await console.api.all(request, audit=("/audit-log", query))
    return await console.page(request, "audit.html", subject=subject, **found)


@get("/playground")
async def playground(request: Asked, console: Ui) -> Response[str]:
    """One conversation with a model, through a gateway, with a key of a tenant."""
    found = await console.api.all(request, routes=("/routes", {"limit": MANY}))
    return await console.page(request, "playground.html", **found)


@get("/users")
async def users(request: Asked, console: Ui, services: NamedDependency[Services]) -> Response[str]:
    """Operators, and how they come in."""
    found = await console.api.all(request, users=("/users", {"limit": MANY}))
    origin = origin_of(services.settings.public_url or str(request.url))
    return await console.page(request, "users.html", origin=origin, **found)


def console_router() -> Router:
    """Pages are HTML for people: they have no place in the API's description."""
    return Router(
        "/console",
        route_handlers=[
            sign_in,
            welcome,
            overview,
            fleet,
            models,
            rollouts,
            rollout,
            scaling,
            tenants,
            tenant,
            usage,
            safety,
            users,
            audit,
            playground,
            chat,
        ],
        dependencies={"console": Provide(console_of, sync_to_thread=False)},
        exception_handlers={SignedOutError: sign_in_first},
        include_in_schema=False,
    )
