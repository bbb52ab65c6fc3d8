"""A control plane in this process, on real services, as operators and workers reach it."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import msgspec

from control_plane.app import create_app
from control_plane.services import Services
from control_plane.settings import ControlPlaneSettings
from core import internal_token

SECRET = "an internal secret for tests"
PEPPER = "a pepper for tests, long enough"
ADMIN_TOKEN = "an admin token for tests"
# A hash that costs nothing: what is tested is who gets in.
CHEAP = {"argon2_time_cost": 1, "argon2_memory_kib": 64, "argon2_lanes": 1}


def the_settings(postgres_url: str, valkey_url: str, **changes: Any) -> ControlPlaneSettings:
    return ControlPlaneSettings(
        database_url=postgres_url,
        redis_url=valkey_url,
        internal_secret=SECRET,
        key_pepper=PEPPER,
        admin_token=ADMIN_TOKEN,
        **(CHEAP | changes),
    )


def worker_headers(*, audience: str = "control-plane", life_ms: int = 60_000) -> dict[str, str]:
    token = internal_token.sign(
        SECRET.encode(),
        audience=audience,
        subject="rep-0",
        expires_ms=time.time_ns() // 1_000_000 + life_ms,
    )
    return {"authorization": f"Bearer {token}"}


class ControlPlane:
    """The client, and what lies behind it for a test to look at."""

    def __init__(self, client: httpx.AsyncClient, services: Services) -> None:
        self.client = client
        self.services = services

    async def admin(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """The answer to an operator."""
        return await self.client.request(
            method,
            f"/admin{path}",
            json=body,
            params=query,
            headers={"authorization": f"Bearer {ADMIN_TOKEN}"},
        )

    def has_run(self, job: str) -> bool:
        """Whether a round of this background job is over: what is made now, it has not seen."""
        name, labels = "headworks_control_plane_job_runs_total", {"job": job, "outcome": "done"}
        return bool(self.services.metrics.registry.get_sample_value(name, labels))

    async def made(self, path: str, body: Any) -> Any:
        """What a create that must succeed has made."""
        answer = await self.admin("POST", path, body)
        assert answer.status_code in (200, 201), answer.text
        return answer.json()

    async def says(self, path: str, message: msgspec.Struct) -> Any:
        """The answer to a worker."""
        return await self.client.post(
            f"/fleet{path}",
            content=msgspec.json.encode(message),
            headers={**worker_headers(), "content-type": "application/json"},
        )


@asynccontextmanager
async def running(settings: ControlPlaneSettings) -> AsyncIterator[ControlPlane]:
    # Not Litestar's test client: it runs the application in a loop of its own, and a test
    # that looks into the pool behind it would wait for ever.
    app = create_app(settings)
    # Litestar's callable is typed more narrowly than httpx's.
    transport = httpx.ASGITransport(cast("Any", app), raise_app_exceptions=False)
    async with (
        app.lifespan(),
        httpx.AsyncClient(transport=transport, base_url="http://control-plane") as client,
    ):
        yield ControlPlane(client, app.state.services)


def assert_refused(answer: Any, status: int, code: str, param: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["code"], error.get("param")) == (code, param), answer.text
    assert error["message"]
