"""How a page is made: who looks at it, what was answered, one template.

A page asks for itself again every few seconds and gets its middle alone; the script merges it
into what is there, so that focus, selections and what is being typed stay.
"""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from litestar import Request, Response
from litestar.datastructures import CacheControlHeader, State
from litestar.enums import MediaType
from litestar.response import Redirect
from litestar.static_files import create_static_files_router

from control_plane.auth import RENEWAL_HEADER
from control_plane.ui.client import AdminApi, SignedOutError
from control_plane.ui.formats import FILTERS

ROOT = Path(__file__).parents[1]
SIGN_IN = "/console/sign-in"

# Scripts and styles are files of ours alone, nothing is framed, nothing leaves but to ourselves.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
        " connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}

NAVIGATION = (
    ("Serving", (("Overview", "/console"), ("Fleet", "/console/fleet"))),
    (
        "Models",
        (
            ("Models", "/console/models"),
            ("Rollouts", "/console/rollouts"),
            ("Scaling", "/console/scaling"),
        ),
    ),
    (
        "Tenants",
        (
            ("Tenants", "/console/tenants"),
            ("Usage", "/console/usage"),
            ("Safety", "/console/safety"),
        ),
    ),
    (
        "Operators",
        (
            ("Playground", "/console/playground"),
            ("Operators", "/console/users"),
            ("Audit log", "/console/audit"),
        ),
    ),
)

# Who looks, while that cannot be told: without the database, or for a user without a role.
UNTOLD = {"actor": "", "kind": "", "csrf": None, "user": None}

Asked = Request[Any, Any, Any]

static = create_static_files_router(
    "/console/static",
    directories=[ROOT / "static"],
    cache_control=CacheControlHeader(max_age=3_600, private=True),
)


class Console:
    """Templates, and the API they show the answers of."""

    def __init__(self, api: AdminApi) -> None:
        self.api = api
        self._templates = Environment(
            loader=FileSystemLoader(ROOT / "templates"),
            autoescape=select_autoescape(),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters.update(FILTERS)

    async def page(self, request: Asked, template: str, **values: Any) -> Response[str]:
        """A page, or its middle alone when it asks for itself. Raises SignedOutError."""
        me = await self.api.get(request, "/me")
        return self.render(request, template, me=me.data or UNTOLD, **values)

    def render(self, request: Asked, template: str, **values: Any) -> Response[str]:
        """Without asking who looks."""
        text = self._templates.get_template(template).render(
            frame="middle.html" if request.headers.get(RENEWAL_HEADER) else "frame.html",
            navigation=NAVIGATION,
            path=request.url.path.rstrip("/"),
            query=dict(request.query_params),
            **values,
        )
        return Response(text, media_type=MediaType.HTML, headers=HEADERS)


def console_of(state: State) -> Console:
    """For handlers to ask for."""
    console: Console = state.console
    return console


def sign_in_first(request: Asked, _: SignedOutError) -> Response[Any]:
    """To the page where one signs in; a page that renews itself is taken there whole."""
    if request.headers.get(RENEWAL_HEADER):
        return Response("", headers={"hx-redirect": SIGN_IN})
    return Redirect(SIGN_IN)
