"""Who may call: operators with the admin token, our own processes with internal tokens.

Not tenants: their keys open the gateway only. Both checks take constant time in the secret.
"""

import hmac
import time
from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.types import Guard

from core import internal_token
from core.errors import Code, refuse

AUDIENCE = "control-plane"
ADMIN = "admin"  # the actor in the audit log: the token has no name of its own

Connection = ASGIConnection[Any, Any, Any, Any]


def admin_guard(token: str) -> Guard:
    """Lets in `Authorization: Bearer <token>`; refuses everything else with 401."""
    expected = token.encode()

    def guard(connection: Connection, _: BaseRouteHandler) -> None:
        if not hmac.compare_digest(bearer(connection).encode(), expected):
            raise refuse(Code.INVALID_KEY, "this needs the admin token as a bearer token")

    return guard


def actor() -> str:
    """Whom the audit log names for a change made by this request."""
    return ADMIN


def fleet_guard(secret: bytes) -> Guard:
    """Lets in a live internal token for this audience; refuses everything else with 401."""

    def guard(connection: Connection, _: BaseRouteHandler) -> None:
        now_ms = time.time_ns() // 1_000_000
        token = bearer(connection)
        if internal_token.verify(secret, token, audience=AUDIENCE, now_ms=now_ms) is None:
            raise refuse(Code.INVALID_KEY, f"this needs an internal token for {AUDIENCE}")

    return guard


def bearer(connection: Connection) -> str:
    """The bearer token, or "" where there is none."""
    scheme, _, token = connection.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
