"""Brings a whole stack up in order, and down again in reverse.

    services ─► migrate ─► control plane ─► seed ─► workers + gateways ─► ready
    model pull ────────────────────────────┘

`Stack.up` returns when the first request can be answered; `Stack.down` when no process is left.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import httpx

from artifacts.manifest import Manifest
from local import ports
from local.layout import Layout
from local.options import Options
from local.postgres import EmbeddedPostgres, binaries
from local.process import ProcessSpec
from local.pulling import Pull, Pulling
from local.secrets import Secrets, load_or_make
from local.seed import Admin, seed
from local.specs import Specs
from local.state import StackState, write_state
from local.supervisor import Show, Supervised
from local.valkey import EmbeddedValkey
from store.migrate import MigrationError, upgrade

SERVICE_TIMEOUT_S = 60.0
PROCESS_TIMEOUT_S = 60.0
WORKER_TIMEOUT_S = 180.0
PROBE_TIMEOUT_S = 2.0
DISK_FREE_MIN = 1024**3

_log = logging.getLogger(__name__)


class DiskFullError(Exception):
    """Too little room to start safely."""


class DatabaseError(Exception):
    """The database does not answer, or cannot be brought up to date; the message says which."""


class StopFailedError(Exception):
    """A process's end could not be seen; the message says whose."""


class Stack:
    """One stack in one data directory. The caller holds the directory's lock."""

    def __init__(
        self, options: Options, environ: Mapping[str, str], show: Show, pull: Pull
    ) -> None:
        self._options = options
        self._layout = Layout(options.data, options.models)
        self._environ = environ
        self._show = show
        self._pull = pull
        self._running: list[Supervised] = []
        self._phase = "starting"
        self._failure = ""
        self._database_url = options.database_url
        self._redis_url = options.redis_url
        self._probe = httpx.AsyncClient(timeout=PROBE_TIMEOUT_S)

    @property
    def gateway_urls(self) -> list[str]:
        """Where tenants reach it."""
        return [f"http://{self._options.host}:{port}" for port in self._options.gateway_ports]

    @property
    def control_plane_url(self) -> str:
        """Where operators reach it."""
        return f"http://{self._options.host}:{self._options.control_plane_port}"

    async def up(self) -> None:
        """Start everything. Whatever is raised, what was started is still to be brought down.

        Raises StartFailedError, PortTakenError, DiskFullError, SecretsError, PostgresError,
        DatabaseError, SeedError and what the pull raises.
        """
        self._check_machine()
        self._layout.make()
        secrets = load_or_make(self._layout)
        pulling = Pulling(self._pull)
        try:
            await self._start_services()
            await asyncio.to_thread(self._migrate)
            specs = self._specs(secrets)
            await self._start_control_plane(specs)
            manifest = await pulling.result()
        except BaseException:
            await pulling.stop()
            raise
        deployment = await asyncio.to_thread(self._seed, secrets, manifest)
        await self._start_serving(specs, deployment, manifest.version)
        self._enter("up")

    async def down(self, failure: str = "") -> None:
        """Stop everything, last started first. Returns when no process is left.

        Raises StopFailedError after that, when it could not be seen of each.
        """
        self._failure = failure
        self._phase = "failed" if failure else "stopping"
        self._note()
        serving = [child for child in self._running if child.spec.name.startswith("gateway")]
        problems = []
        for child in serving + [c for c in reversed(self._running) if c not in serving]:
            try:
                await child.stop()
            except Exception as error:  # noqa: BLE001 - the others are to be stopped all the same
                problems.append(f"{child.spec.name}: {error!r}")
        await self._probe.aclose()
        with contextlib.suppress(OSError):
            # Left behind it is not believed: the lock says that nobody lives.
            self._layout.state.unlink(missing_ok=True)
        if problems:
            raise StopFailedError("stopping failed: " + "; ".join(problems))

    def _check_machine(self) -> None:
        options = self._options
        for port in options.gateway_ports:
            ports.require_free(port, "gateway", "--gateway-port")
        ports.require_free(options.control_plane_port, "control plane", "--control-plane-port")
        for port in options.worker_ports:
            ports.require_free(port, "worker", "--worker-port")
        options.data.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(options.data).free
        if free < DISK_FREE_MIN:
            raise DiskFullError(
                f"{options.data} has {free // 1024**2} MiB free; at least "
                f"{DISK_FREE_MIN // 1024**2} MiB are needed. Make room or choose --data DIR"
            )

    def _specs(self, secrets: Secrets) -> Specs:
        return Specs(
            self._options,
            secrets,
            self._environ,
            database_url=self._database_url,
            redis_url=self._redis_url,
        )

    async def _start_services(self) -> None:
        async with asyncio.TaskGroup() as group:
            if not self._database_url:
                group.create_task(self._start_postgres())
            if not self._redis_url:
                group.create_task(self._start_valkey())

    async def _start_postgres(self) -> None:
        port = ports.kept_port(self._layout.postgres / "port")
        postgres = EmbeddedPostgres(directory=self._layout.postgres, port=port)
        await asyncio.to_thread(postgres.prepare)
        await self._start(
            postgres.spec(), partial(asyncio.to_thread, _accepts, port), SERVICE_TIMEOUT_S
        )
        await asyncio.to_thread(postgres.create_database)
        self._database_url = postgres.url

    async def _start_valkey(self) -> None:
        valkey = EmbeddedValkey(
            directory=self._layout.valkey, port=ports.kept_port(self._layout.valkey / "port")
        )
        valkey.prepare()
        await self._start(valkey.spec(), partial(_listens, valkey.port), SERVICE_TIMEOUT_S)
        self._redis_url = valkey.url

    def _migrate(self) -> None:
        try:
            upgrade(self._database_url)
        except MigrationError as error:
            which = "DATABASE_URL's database" if self._options.database_url else "the database"
            raise DatabaseError(f"{which} could not be used: {error}") from error

    async def _start_control_plane(self, specs: Specs) -> None:
        ready = partial(self._answers, f"{self.control_plane_url}/health/ready")
        await self._start(specs.control_plane(), ready, PROCESS_TIMEOUT_S)

    def _seed(self, secrets: Secrets, manifest: Manifest) -> str:
        with Admin(self.control_plane_url, secrets.admin_token) as admin:
            return seed(admin, manifest, self._layout.demo_key)

    async def _start_serving(self, specs: Specs, deployment: str, version: str) -> None:
        host = self._options.host
        async with asyncio.TaskGroup() as group:
            for index, port in enumerate(self._options.worker_ports):
                ready = partial(self._answers, f"http://{host}:{port}/health/ready")
                spec = specs.worker(index, deployment=deployment, version=version)
                group.create_task(self._start(spec, ready, WORKER_TIMEOUT_S))
            for index, url in enumerate(self.gateway_urls):
                # A gateway is ready when it knows a replica, so this waits for a worker too.
                ready = partial(self._answers, f"{url}/health/ready")
                group.create_task(self._start(specs.gateway(index), ready, WORKER_TIMEOUT_S))

    async def _start(
        self, spec: ProcessSpec, ready: Callable[[], Awaitable[bool]], timeout_s: float
    ) -> None:
        child = Supervised(spec, self._layout.log(spec.name), self._show, self._note)
        self._running.append(child)
        await child.start()
        await child.wait_ready(ready, timeout_s)

    async def _answers(self, url: str) -> bool:
        try:
            return (await self._probe.get(url)).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self._write()

    def _note(self) -> None:
        """Write if we can: a full disk must not keep anybody from being watched and stopped."""
        try:
            self._write()
        except OSError as error:
            _log.warning("cannot write the state", extra={"facts": {"reason": str(error)}})

    def _write(self) -> None:
        state = StackState(
            supervisor_pid=os.getpid(),
            phase=self._phase,
            gateway_urls=self.gateway_urls,
            control_plane_url=self.control_plane_url,
            worker_urls=[f"http://{self._options.host}:{p}" for p in self._options.worker_ports],
            database_url=self._database_url,
            redis_url=self._redis_url,
            processes={child.spec.name: child.report for child in self._running},
            failure=self._failure,
        )
        write_state(self._layout.state, state)


def root_cause(error: BaseException) -> BaseException:
    """The first failure inside a task group's bundle."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _accepts(port: int) -> bool:
    """Whether Postgres takes connections: an open port alone may still be recovering."""
    try:
        done = subprocess.run(  # noqa: S603 - our own binary
            [str(binaries() / "pg_isready"), "-q", "-h", ports.LOOPBACK, "-p", str(port)],
            check=False,
            timeout=PROBE_TIMEOUT_S * 2,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(ports.LOOPBACK, port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True
