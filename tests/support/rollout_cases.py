"""A public name, two deployments of two versions with ready replicas, and a rollout between."""

import asyncio
import secrets
from typing import Any

from core.route_table import RouteTable
from store import registry
from store.fleet import put_replica
from tests.support.control_plane import ControlPlane
from tests.support.registry import a_deployment, a_register
from tests.support.rollout_rows import add_requests

SOON_S = 20.0
# Nothing that waits for time: what is there decides at the next look.
QUICK_STEP = {"least_ms": 0, "most_ms": 600_000, "least_requests": 30}
QUICK_RULES = {"keep_warm_ms": 0, "settle_ms": 0, "tick_ms_max": 1000, "restore_ms": 0}
# Wide enough for small samples that are alike, and narrow enough for what is plainly worse.
QUICK_GATES = [
    {"metric": "errors", "plus": 0.6},
    {"metric": "first_token_p95", "ratio": 1.0, "plus": 1000.0, "role": "guards"},
]


class RolloutCase:
    """Names of its own, so that cases share a control plane."""

    def __init__(self, plane: ControlPlane) -> None:
        mark = secrets.token_hex(4)
        self.plane = plane
        self.name = f"roll-{mark}"
        self.model = f"org/model-{mark}"
        self.stable, self.canary = f"old-{mark}", f"new-{mark}"
        self.versions = {self.stable: f"v1-{mark}", self.canary: f"v2-{mark}"}

    async def made(self, *, region: str = "local", ready: bool = True) -> "RolloutCase":
        async with self.plane.services.postgres.transaction() as conn:
            await a_deployment(conn, self.stable, version=self.versions[self.stable])
            await a_deployment(conn, self.canary, version=self.versions[self.canary], region=region)
            await registry.put_route(
                conn, model=self.model, deployment=self.stable, max_output_tokens=0
            )
        await self.add_replica(self.stable)
        if ready:
            await self.add_replica(self.canary)
        return self

    async def add_replica(self, deployment: str, **changes: Any) -> None:
        said = {"replica_id": f"rep-{secrets.token_hex(4)}", "boot_id": secrets.token_hex(4)}
        message = a_register(
            deployment=deployment, version=self.versions[deployment], **(said | changes)
        )
        async with self.plane.services.postgres.transaction() as conn:
            await put_replica(conn, message)

    def body(self, *percents: int, **changes: Any) -> dict[str, Any]:
        return {
            "name": self.name,
            "model": self.model,
            "canary": self.canary,
            "steps": [{"percent": percent, **QUICK_STEP} for percent in percents or (10, 100)],
            "gates": QUICK_GATES,
            "rules": QUICK_RULES,
        } | changes

    async def create(self, *percents: int, **changes: Any) -> Any:
        return await self.plane.admin("POST", "/rollouts", self.body(*percents, **changes))

    async def say(self, word: str, **body: Any) -> Any:
        return await self.plane.admin("POST", f"/rollouts/{self.name}/{word}", body)

    async def read(self) -> Any:
        answer = await self.plane.admin("GET", f"/rollouts/{self.name}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def until(self, *states: str, closed: bool | None = None) -> Any:
        """What it says once it is in one of these states."""
        seen: Any = None
        async with asyncio.timeout(SOON_S):
            while (
                seen is None or seen["state"] not in states or closed not in (None, seen["closed"])
            ):
                await asyncio.sleep(0.02)
                seen = await self.read()
        return seen

    async def until_step(self, percent: int) -> Any:
        """What it says once the canary has this share."""
        seen: Any = None
        async with asyncio.timeout(SOON_S):
            while seen is None or seen["percent"] != percent:
                await asyncio.sleep(0.02)
                seen = await self.read()
        return seen

    async def events(self) -> list[str]:
        """Oldest first."""
        page = (await self.plane.admin("GET", f"/rollouts/{self.name}/events")).json()
        return [event["event"] for event in page["events"]][::-1]

    async def table(self) -> RouteTable:
        async with self.plane.services.postgres.connection() as conn:
            found = await registry.route(conn, self.model)
        assert found is not None
        return found

    async def shares(self) -> dict[str, int]:
        return {target.deployment: target.weight for target in (await self.table()).targets}

    async def served(self, deployment: str, count: int = 60, **changes: Any) -> None:
        """So many requests that began now, and ended."""
        async with self.plane.services.postgres.transaction() as conn:
            cursor = await conn.execute(
                "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint"
            )
            row = await cursor.fetchone()
            assert row is not None
            fields = {"model": self.model, "version": self.versions[deployment]}
            await add_requests(conn, count, at_ms=int(row[0]), **(fields | changes))
