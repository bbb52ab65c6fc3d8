"""A control plane that listens, and launches processes of this machine for a gateway's world."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from control_plane.app import create_app
from control_plane.launchers.choose import ROOT
from control_plane.launchers.local import LocalConfig, LocalLauncher
from control_plane.settings import ControlPlaneSettings
from core.launch import Place
from tests.support.control_plane import ADMIN_TOKEN, SECRET, the_settings
from tests.support.gateway_world import DEPLOYMENT
from tests.support.services import free_port

WAIT_S = 30.0
SCRIPTED = (sys.executable, "-m", "tests.support.launched_worker")


class Plane:
    """One life of a control plane, as an operator reaches it."""

    def __init__(self, url: str, app: Any, launcher: LocalLauncher) -> None:
        self.url = url
        self.app = app
        self.launcher = launcher
        self.client = httpx.AsyncClient(
            base_url=url, timeout=20, headers={"authorization": f"Bearer {ADMIN_TOKEN}"}
        )

    @property
    def services(self) -> Any:
        return self.app.state.services

    async def admin(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        answer = await self.client.request(method, f"/admin{path}", json=body, params=query)
        assert answer.status_code in (200, 201), answer.text
        return answer.json()

    async def want(self, replicas: int | None, name: str = DEPLOYMENT, **more: Any) -> None:
        body = {"replicas_desired": replicas, **more}
        await self.admin("PATCH", f"/deployments/{name}", body)

    async def replicas(self, name: str = DEPLOYMENT) -> list[dict[str, Any]]:
        """Those that are not gone."""
        rows = (await self.admin("GET", "/replicas", deployment=name))["replicas"]
        return [row for row in rows if row["state"] not in ("stopped", "lost")]

    async def serving(self, name: str = DEPLOYMENT) -> list[str]:
        rows = await self.replicas(name)
        return [r["replica_id"] for r in rows if r["state"] == "ready" and not r["drain_reason"]]

    async def until_serving(self, count: int, name: str = DEPLOYMENT) -> list[str]:
        async with asyncio.timeout(WAIT_S):
            while True:
                names = await self.serving(name)
                if len(names) == count and len(self.alive()) == count:
                    return names
                await asyncio.sleep(0.05)

    async def busy(self, requests: int) -> bool:
        """Whether so many run, as their workers tell."""
        return sum(row["running"] for row in await self.replicas()) == requests

    async def is_another(self, replica_id: str, pid: int | None) -> bool:
        """Whether another process runs for the id."""
        place = self.alive().get(replica_id)
        return place is not None and place.pid not in (None, pid)

    async def is_reborn(self, boots: dict[str, str]) -> bool:
        """Whether exactly one of these lives has given way to another."""
        now = {row["replica_id"]: row["boot_id"] for row in await self.replicas()}
        return sum(now.get(name) not in (None, boot) for name, boot in boots.items()) == 1

    def alive(self) -> dict[str, Place]:
        return {place.replica_id: place for place in self.launcher.places() if place.alive}


@asynccontextmanager
async def a_plane(
    postgres_url: str,
    valkey_url: str,
    directory: Path,
    *,
    port: int,
    command: tuple[str, ...] = SCRIPTED,
    models_dir: Path | None = None,
    script: dict[str, str] | None = None,
    **changes: Any,
) -> AsyncIterator[Plane]:
    """It leaves its workers behind, as a control plane that ends does."""
    changes = {"launcher_every_ms": 100, "launcher_stop_ms": 3000} | changes
    settings = the_settings(postgres_url, valkey_url, **changes)
    launcher = a_launcher(
        directory, settings, port=port, command=command, models_dir=models_dir, script=script
    )
    app = create_app(settings, launcher)
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_config=None, lifespan="on")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve([config.bind_socket()]))
    async with asyncio.timeout(WAIT_S):
        while not server.started:
            assert not serving.done(), "the control plane did not start"
            await asyncio.sleep(0.01)
    plane = Plane(f"http://127.0.0.1:{port}", app, launcher)
    try:
        yield plane
    finally:
        await plane.client.aclose()
        server.should_exit = True
        await serving


def a_launcher(
    directory: Path,
    settings: ControlPlaneSettings,
    *,
    port: int,
    command: tuple[str, ...] = SCRIPTED,
    models_dir: Path | None = None,
    script: dict[str, str] | None = None,
) -> LocalLauncher:
    config = LocalConfig(
        directory=directory,
        models_dir=models_dir or directory / "models",
        command=command,
        cwd=ROOT,
        host="127.0.0.1",
        port=free_ports(settings.launcher_replicas_max),
        places_max=settings.launcher_replicas_max,
        control_plane_url=f"http://127.0.0.1:{port}",
        internal_secret=SECRET,
        log_level="INFO",
    )
    return LocalLauncher(config, {**os.environ, **(script or {})})


def free_ports(count: int) -> int:
    """The first of a row in which most are free; a start that finds one taken takes the next."""
    return min(free_port(), 65_535 - count)


def kill_all(launcher: LocalLauncher) -> None:
    """So that no test leaves a process behind."""
    for place in launcher.places():
        if place.alive and place.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(place.pid, signal.SIGKILL)
    for child in list(launcher._children.values()):
        child.wait(WAIT_S)
