"""Gateways on a Postgres, a Valkey and an engine of their own, each on the core it is given."""

import asyncio
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.engine import STORE, pulled
from benchmarks.http_load import Target
from benchmarks.mock_engine import BOOT_ID
from benchmarks.own_postgres import free_port, own_postgres
from core.allowance import Allowance
from core.fleet import Capacity, Register, ReplicaState
from core.ids import ENTROPY_BYTES, key_id, tenant_id
from core.money import Price
from core.pricing import ListedPrice
from core.tenancy import KEY_ENTROPY_BYTES, key_digest, mint_key, public_part
from local.valkey import EmbeddedValkey
from store import registry, tenants
from store.fleet import put_replica
from store.migrate import upgrade
from store.postgres import Postgres, PostgresConfig
from store.prices import seed_prices

MODEL = "smollm2-135m-instruct"
PEPPER = "a pepper for benchmarks"
SECRET = "an internal secret for benchmarks"  # noqa: S105 - of processes that end with the run
PRICE = Price(id="bench-1", input_micro=100_000, cached_input_micro=50_000, output_micro=400_000)
# Limits that are counted and never reached.
LIMITS = Allowance(
    requests_per_min=100_000_000,
    input_tokens_per_min=1_000_000_000,
    output_tokens_per_min=1_000_000_000,
    concurrency=10_000,
)
HARD_CAP_MICRO = 10**15
START_TIMEOUT_S = 60.0


class Child:
    """One process of ours on one core."""

    def __init__(
        self, argv: list[str], *, env: dict[str, str], log: Path, core: int | None
    ) -> None:
        with log.open("wb") as out:
            self._process = subprocess.Popen(  # noqa: S603 - a list that this module makes, and no shell
                argv,
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        if core is not None:  # the threads that it will start inherit it
            os.sched_setaffinity(self._process.pid, {core})

    @property
    def cpu_s(self) -> float:
        """Processor time it has used."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def memory_mb(self) -> float:
        """Resident."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def ended(self) -> bool:
        """By itself."""
        return self._process.poll() is not None

    def stop(self) -> None:
        """Kindly, then not."""
        self._process.terminate()
        try:
            self._process.wait(START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Stack(msgspec.Struct, kw_only=True):
    """What is measured. `gateways` by target name."""

    direct: Target
    targets: list[Target]
    gateways: dict[str, Child]
    mock_url: str


@contextmanager
def gateway_stack(*, core: int | None, bare: bool) -> Iterator[Stack]:
    """A governed gateway, one without governance if `bare`, and the engine itself."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headworks-bench-")))
        database = stack.enter_context(own_postgres())
        upgrade(database)
        redis = stack.enter_context(_valkey(scratch))
        port = free_port()
        mock = [sys.executable, "-m", "benchmarks.mock_engine", "--port", str(port)]
        _child(stack, mock, env={}, log=scratch / "mock.log", core=None)
        url = f"http://127.0.0.1:{port}"
        key = asyncio.run(_seed(database, url))
        made: dict[str, Child] = {}
        targets = []
        kinds = {"headworks": "gateway"} | (
            {"ungoverned": "benchmarks.gateway_bare"} if bare else {}
        )
        for name, module in kinds.items():
            own = free_port()
            nobody = f"redis://127.0.0.1:{free_port()}/0"
            env = _environ(database, redis if name == "headworks" else nobody, own, scratch / name)
            argv = [sys.executable, "-m", module]
            made[name] = _child(stack, argv, env=env, log=scratch / f"{name}.log", core=core)
            target = Target(name=name, url=f"http://127.0.0.1:{own}/v1", key=key, model=MODEL)
            _await_ready(target, made[name], scratch / f"{name}.log")
            targets.append(target)
        direct = Target(name="direct", url=f"{url}/v1")
        yield Stack(direct=direct, targets=targets, gateways=made, mock_url=url)


def set_pace(mock_url: str, *, first_ms: float = 0.0, interval_ms: float = 0.0) -> None:
    """How fast the engine answers from now on."""
    pace = {"first_ms": first_ms, "interval_ms": interval_ms}
    httpx.post(f"{mock_url}/pace", json=pace).raise_for_status()


def _child(stack: ExitStack, argv: list[str], **how: Any) -> Child:
    child = Child(argv, **how)
    stack.callback(child.stop)
    return child


@contextmanager
def _valkey(scratch: Path) -> Iterator[str]:
    server = EmbeddedValkey(directory=scratch / "valkey", port=free_port())
    server.prepare()
    spec = server.spec()
    child = Child(list(spec.argv), env=dict(spec.env), log=scratch / "valkey.log", core=None)
    try:
        yield server.url
    finally:
        child.stop()


def _environ(database: str, redis: str, port: int, scratch: Path) -> dict[str, str]:
    return {
        "DATABASE_URL": database,
        "REDIS_URL": redis,
        "HEADWORKS_INTERNAL_SECRET": SECRET,
        "HEADWORKS_KEY_PEPPER": PEPPER,
        "HEADWORKS_MODELS_DIR": str(STORE),
        "HEADWORKS_SPOOL_DIR": str(scratch),
        "HEADWORKS_GATEWAY_PORT": str(port),
        "HEADWORKS_LOG_LEVEL": "WARNING",
    }


async def _seed(database: str, mock_url: str) -> str:
    """One model served by the mock engine, and one tenant's key."""
    _, manifest = pulled(MODEL, "float32")
    postgres = await Postgres.open(
        PostgresConfig(database_url=database, application_name="benchmark")
    )
    key, tenant = mint_key(secrets.token_bytes(KEY_ENTROPY_BYTES)), tenant_id(b"t" * ENTROPY_BYTES)
    async with postgres.transaction() as conn:
        await registry.register_version(
            conn,
            version=manifest.version,
            model=MODEL,
            family=manifest.family,
            context_tokens=manifest.context_tokens,
            state=registry.VersionState.READY,
            manifest={"name": MODEL},
        )
        await seed_prices(conn, [ListedPrice(model=MODEL, effective_ms=0, price=PRICE)])
        await registry.create_deployment(
            conn, name="bench", version=manifest.version, region="local"
        )
        await registry.put_route(conn, model=MODEL, deployment="bench", max_output_tokens=0)
        await tenants.create_tenant(
            conn,
            tenants.NewTenant(
                id=tenant,
                name="benchmark",
                salt=b"s" * 16,
                allowance=LIMITS,
                weight=1,
                hard_cap_micro=HARD_CAP_MICRO,
                disabled=False,
            ),
        )
        await tenants.create_key(
            conn,
            key_id=key_id(b"k" * ENTROPY_BYTES),
            tenant_id=tenant,
            name="benchmark",
            public=public_part(key),
            digest=key_digest(PEPPER.encode(), key),
        )
        capacity = Capacity(
            kv_blocks=1 << 24,
            block_tokens=16,
            context_tokens=manifest.context_tokens,
            sequences=1 << 16,
        )
        await put_replica(
            conn,
            Register(
                replica_id="mock",
                boot_id=BOOT_ID,
                url=mock_url,
                deployment="bench",
                region="local",
                version=manifest.version,
                state=ReplicaState.READY,
                capacity=capacity,
            ),
        )
    await postgres.close()
    return key


def _await_ready(target: Target, child: Child, log: Path) -> None:
    """Until it lists the model; a dispatcher with an empty memory then waits a second."""
    deadline = time.monotonic() + START_TIMEOUT_S
    headers = {"authorization": f"Bearer {target.key}"}
    while True:
        if child.ended() or time.monotonic() > deadline:
            raise RuntimeError(log.read_text())
        try:
            if MODEL in httpx.get(f"{target.url}/models", headers=headers).text:
                time.sleep(2.0)
                return
        except httpx.TransportError:
            time.sleep(0.1)
