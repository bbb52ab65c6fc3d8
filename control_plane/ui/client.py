"""The admin API as a page asks it: in this process, in the name of whoever looks at the page.

The console has no rights and no logic of its own. What a person may not read, they do not see;
what the API refuses, the page says.
"""

import asyncio
from collections.abc import Mapping
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx
import msgspec
from litestar import Request
from litestar.types import ASGIApp

from control_plane.auth import RENEWAL_HEADER

# Of a page's request, what the API judges its caller by.
PASSED_ON = ("authorization", "cookie", "host", "user-agent", RENEWAL_HEADER)
UNAUTHORIZED, FORBIDDEN, OK_MAX = 401, 403, 299


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the API said: `data` when it is `ok`, and otherwise why not, as a sentence."""

    status: int
    data: Any = None
    message: str = ""

    @property
    def ok(self) -> bool:
        """Whether there is something to show."""
        return self.status <= OK_MAX

    @property
    def is_forbidden(self) -> bool:
        """Whether somebody else might see it."""
        return self.status == FORBIDDEN


class SignedOutError(Exception):
    """Nobody is signed in, or no more."""


class AdminApi:
    """Asks the application that it is a part of."""

    def __init__(self, app: ASGIApp) -> None:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)  # type: ignore[arg-type]  # Litestar's types of ASGI are narrower than httpx's
        # One for all who look: nobody's cookie is kept, to be shown for somebody else.
        nowhere = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
        self._http = httpx.AsyncClient(
            transport=transport, base_url="http://console", cookies=nowhere
        )

    async def get(
        self, request: Request[Any, Any, Any], path: str, **query: str | int | None
    ) -> Answer:
        """One answer. Raises SignedOutError."""
        headers = {n: v for n in PASSED_ON if (v := request.headers.get(n)) is not None}
        params = {n: v for n, v in query.items() if v not in ("", None)}
        answer = await self._http.get(f"/admin{path}", params=params, headers=headers)
        if answer.status_code == UNAUTHORIZED:
            raise SignedOutError
        if answer.is_success:
            return Answer(status=answer.status_code, data=msgspec.json.decode(answer.content))
        return Answer(status=answer.status_code, message=_sentence(answer))

    async def all(
        self, request: Request[Any, Any, Any], **paths: str | tuple[str, Mapping[str, Any]]
    ) -> dict[str, Answer]:
        """Several at once, by the names that the page has for them. Raises SignedOutError."""
        asked = {n: (p, {}) if isinstance(p, str) else p for n, p in paths.items()}
        answers = await asyncio.gather(
            *(self.get(request, path, **query) for path, query in asked.values())
        )
        return dict(zip(asked, answers, strict=True))


def _sentence(answer: httpx.Response) -> str:
    try:
        return str(msgspec.json.decode(answer.content)["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        return f"the control plane answered with status {answer.status_code}"
