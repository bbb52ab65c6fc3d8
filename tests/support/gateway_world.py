"""A real gateway in this process, on real Postgres and Valkey, in front of scripted workers."""

import asyncio
import atexit
import functools
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from artifacts.manifest import Manifest
from artifacts.pull import pull
from artifacts.store import ModelStore
from core.allowance import NOTHING_SAID, Allowance
from core.fleet import Capacity, Register, ReplicaState
from core.ids import ENTROPY_BYTES, KeyId, key_id
from core.money import Price
from core.pricing import ListedPrice
from core.tenancy import KEY_ENTROPY_BYTES, key_digest, mint_key, public_part
from core.tickets import Limits
from gateway.server import Server, listen, make_server
from gateway.settings import GatewaySettings
from store import registry, tenants
from store.accounts import account
from store.dispatch import audit
from store.fleet import put_replica
from store.postgres import Postgres
from store.prices import seed_prices
from store.usage import UsageFilter, UsageRow, usage_page
from tests.support.registry import a_new_tenant, open_postgres
from tests.support.scripted_worker import ScriptedWorker
from tests.support.tiny_llama import TinyLlama, write_hf

SECRET = "an internal secret for tests"
PEPPER = "a pepper for tests, long enough"
MODEL = "tiny"
CONTEXT = 512
DEPLOYMENT = "tiny-a"
POOL = "tiny-a@local"
# One micro-unit for a prompt token, half of one if cached, four for an output token.
PRICE = Price(
    id="tiny-1", input_micro=1_000_000, cached_input_micro=500_000, output_micro=4_000_000
)
SOON_S = 8.0


class Caller(msgspec.Struct, frozen=True):
    """A tenant and one key of its."""

    tenant_id: str
    key_id: KeyId
    key: str


def a_capacity(*, kv_blocks: int = 1000, sequences: int = 64) -> Capacity:
    return Capacity(
        kv_blocks=kv_blocks, block_tokens=16, context_tokens=CONTEXT, sequences=sequences
    )


@functools.cache
def tiny_store() -> tuple[ModelStore, Manifest]:
    """A store with one tiny model in it, made once for the process: nothing writes to it."""
    root = Path(tempfile.mkdtemp(prefix="headworks-tiny-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    source = write_hf(root / "source", TinyLlama(context=CONTEXT))
    store = ModelStore(root / "models")
    return store, pull(str(source), store, name=MODEL)


class World:
    """What a test looks at and acts on."""

    def __init__(self, postgres: Postgres, settings: GatewaySettings, manifest: Manifest) -> None:
        self.postgres = postgres
        self.settings = settings
        self.manifest = manifest
        self.workers: list[ScriptedWorker] = []
        self.servers: list[tuple[Server, asyncio.Task[None]]] = []

    @property
    def worker(self) -> ScriptedWorker:
        return self.workers[0]

    @property
    def gateway(self) -> Any:
        return self.servers[0][0]._gateway

    @property
    def names(self) -> set[str]:
        """Public names that the gateway knows."""
        return {table.model for table in self.gateway.routes.view.tables}

    @property
    def url(self) -> str:
        return self.url_of(0)

    def url_of(self, index: int) -> str:
        port = self.servers[index][0].servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    async def add_caller(
        self, *, limits: Limits | None = None, hard_cap_micro: int | None = None, **changes: Any
    ) -> Caller:
        said = Allowance(**msgspec.structs.asdict(limits)) if limits is not None else NOTHING_SAID
        fields = {"allowance": said, "hard_cap_micro": hard_cap_micro} | changes
        new = a_new_tenant(**fields)
        key = mint_key(secrets.token_bytes(KEY_ENTROPY_BYTES))
        identity = key_id(secrets.token_bytes(ENTROPY_BYTES))
        async with self.postgres.transaction() as conn:
            await tenants.create_tenant(conn, new)
            await tenants.create_key(
                conn,
                key_id=identity,
                tenant_id=new.id,
                name="test",
                public=public_part(key),
                digest=key_digest(PEPPER.encode(), key),
            )
        return Caller(new.id, identity, key)

    async def add_worker(self, replica_id: str | None = None) -> ScriptedWorker:
        worker = ScriptedWorker(SECRET.encode(), replica_id or f"rep-{len(self.workers)}")
        self.workers.append(worker)
        await worker.start()
        await self.register(worker)
        return worker

    async def register(
        self, worker: ScriptedWorker, state: ReplicaState = ReplicaState.READY, **changes: Any
    ) -> None:
        """As its control link would."""
        message = Register(
            replica_id=worker.replica_id,
            boot_id=worker.boot_id,
            url=worker.url,
            deployment=DEPLOYMENT,
            region="local",
            version=self.manifest.version,
            state=state,
            capacity=a_capacity(),
        )
        async with self.postgres.transaction() as conn:
            await put_replica(conn, msgspec.structs.replace(message, **changes))

    async def start_gateway(self) -> Server:
        server = make_server(self.settings)
        task = asyncio.create_task(server.serve(sockets=[listen(self.settings)]))
        async with asyncio.timeout(30):
            while not server.started:
                assert not task.done(), "the gateway did not start"
                await asyncio.sleep(0.01)
        self.servers.append((server, task))
        await until(lambda: not server._gateway.reasons() or not self.workers)
        return server

    async def warm_up(self) -> None:
        """A dispatcher with an empty memory waits a second for what others may hold."""
        caller = await self.add_caller()
        async with httpx.AsyncClient(base_url=self.url, timeout=30) as client:
            headers = {"authorization": f"Bearer {caller.key}"}
            body = {"model": MODEL, "prompt": "Hello", "max_tokens": 1}
            answer = await client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        for worker in self.workers:
            worker.requests.clear()
            worker.journal.clear()

    async def stop_gateway(self) -> None:
        server, task = self.servers.pop()
        server.stop()
        async with asyncio.timeout(60):
            await task

    async def usage(self, caller: Caller) -> list[UsageRow]:
        """The tenant's rows, oldest first."""
        async with self.postgres.connection() as conn:
            shown = UsageFilter(tenant_id=caller.tenant_id)
            page = await usage_page(conn, shown, limit=1000)
        return page.rows[::-1]

    async def settled(self, caller: Caller, count: int) -> list[UsageRow]:
        """The tenant's rows when there are `count` and all are settled."""
        rows: list[UsageRow] = []
        async with asyncio.timeout(SOON_S):
            while True:
                rows = await self.usage(caller)
                if len(rows) >= count and all(row.state == "settled" for row in rows):
                    assert len(rows) == count
                    return rows
                await asyncio.sleep(0.02)

    async def balance(self, caller: Caller) -> tuple[int, int]:
        """Posted and reserved."""
        async with self.postgres.connection() as conn:
            found = await account(conn, caller.tenant_id)
        assert found is not None
        return found.posted_micro, found.reserved_micro

    async def dispatcher_is_empty(self) -> None:
        """Every account at the dispatcher is back to zero, soon."""
        async with asyncio.timeout(SOON_S):
            while True:
                found = await audit(self.settings.redis_url)
                if found.is_idle:
                    return
                await asyncio.sleep(0.05)


async def until(condition: Any, within_s: float = SOON_S) -> None:
    """Poll a condition that does not announce itself."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - the code under test has no such event
            await asyncio.sleep(0.01)


async def until_answered(condition: Any, within_s: float = SOON_S) -> None:
    """As `until`, for a condition that has to ask."""
    async with asyncio.timeout(within_s):
        while not await condition():  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.05)


@asynccontextmanager
async def a_world(
    postgres_url: str, valkey_url: str, directory: Path, *, workers: int = 1, **changes: Any
) -> AsyncIterator[World]:
    store, manifest = tiny_store()
    values: dict[str, Any] = {
        "database_url": postgres_url,
        "redis_url": valkey_url,
        "internal_secret": SECRET,
        "key_pepper": PEPPER,
        "models_dir": str(store.root),
        "spool_dir": str(directory / "spool"),
        "gateway_port": 0,
        "poll_ms": 100,
        "drain_ms": 1_000,
        "settle_ms": 5_000,
    }
    settings = GatewaySettings(**(values | changes))
    async with open_postgres(postgres_url) as postgres:
        world = World(postgres, settings, manifest)
        async with postgres.transaction() as conn:
            await _register_model(conn, manifest)
        for _ in range(workers):
            await world.add_worker()
        await world.start_gateway()
        await world.warm_up()
        try:
            yield world
        finally:
            while world.servers:
                await world.stop_gateway()
            for worker in world.workers:
                await worker.stop()
                await world.register(worker, ReplicaState.STOPPED)


async def _register_model(conn: Any, manifest: Manifest) -> None:
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
        conn, name=DEPLOYMENT, version=manifest.version, region="local"
    )
    await registry.put_route(conn, model=MODEL, deployment=DEPLOYMENT, max_output_tokens=0)
