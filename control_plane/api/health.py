"""Whether the process is alive, whether it can do its work, and what it counted."""

import asyncio
from collections.abc import Awaitable

import msgspec
from litestar import Response, get
from litestar.di import NamedDependency

from control_plane.metrics import CONTENT_TYPE
from control_plane.services import Services
from store.changes import current_change

OK = "ok"


class Live(msgspec.Struct, frozen=True):
    """The loop turns."""

    status: str = "live"


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """`postgres` and `valkey` are "ok" or the reason; `leads` is of this very control plane.

    Without Valkey gateways learn of changes by their own poll; without Postgres there is
    nothing we could do.
    """

    ready: bool
    degraded: bool
    postgres: str
    valkey: str
    leads: bool


@get("/health/live")
async def live() -> Live:
    """Touches nothing."""
    return Live()


@get("/health/ready")
async def ready(services: NamedDependency[Services]) -> Response[Ready]:
    """503 without Postgres."""
    timeout_s = services.settings.ready_timeout_ms / 1000
    postgres, valkey = await asyncio.gather(
        _state(_ask_postgres(services), timeout_s), _state(services.announcer.ping(), timeout_s)
    )
    answer = Ready(
        ready=postgres == OK,
        degraded=valkey != OK,
        postgres=postgres,
        valkey=valkey,
        leads=services.leadership.held,
    )
    return Response(answer, status_code=200 if answer.ready else 503)


@get("/metrics")
async def exposition(services: NamedDependency[Services]) -> Response[bytes]:
    """Prometheus text."""
    return Response(services.metrics.exposition(), media_type=CONTENT_TYPE)


async def _ask_postgres(services: Services) -> None:
    async with services.postgres.connection() as conn:
        await current_change(conn, "tenancy")  # also fails where nobody has migrated


async def _state(question: Awaitable[None], timeout_s: float) -> str:
    try:
        async with asyncio.timeout(timeout_s):
            await question
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason we are asked for
        return f"{type(error).__name__}: {error}"
    return OK
