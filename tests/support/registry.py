"""Builders of the control plane's rows, with defaults: a test states only what it is about."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from core.allowance import Allowance
from core.fleet import Beat, Capacity, Register, ReplicaState
from core.ids import ENTROPY_BYTES, tenant_id
from core.money import Price
from core.pricing import ListedPrice
from store import registry, tenants
from store.postgres import Connection, Postgres, PostgresConfig
from store.prices import seed_prices


@asynccontextmanager
async def open_postgres(url: str) -> AsyncIterator[Postgres]:
    postgres = await Postgres.open(PostgresConfig(database_url=url, application_name="test"))
    try:
        yield postgres
    finally:
        await postgres.close()


def a_new_tenant(**changes: Any) -> tenants.NewTenant:
    fields: dict[str, Any] = {
        "id": tenant_id(secrets.token_bytes(ENTROPY_BYTES)),
        "name": f"tenant {secrets.token_hex(4)}",
        "salt": secrets.token_bytes(16),
        "allowance": Allowance(requests_per_min=60, concurrency=4),
        "weight": 2,
        "hard_cap_micro": 1_000_000,
        "disabled": False,
    }
    return tenants.NewTenant(**(fields | changes))


async def a_version(conn: Connection, version: str = "v1", model: str = "smol") -> str:
    await registry.register_version(
        conn,
        version=version,
        model=model,
        family="llama",
        context_tokens=2048,
        state=registry.VersionState.READY,
        manifest={"name": model},
    )
    return version


async def a_deployment(conn: Connection, name: str = "smol-a", **changes: str) -> str:
    fields = {"version": "v1", "region": "local"} | changes
    await a_version(conn, fields["version"])
    await registry.create_deployment(conn, name=name, **fields)
    return name


async def a_price(conn: Connection, model: str = "smol", effective_ms: int = 0) -> Price:
    price = Price(
        id=f"{model}@{effective_ms}", input_micro=100, cached_input_micro=50, output_micro=400
    )
    await seed_prices(conn, [ListedPrice(model=model, effective_ms=effective_ms, price=price)])
    return price


def a_register(**changes: Any) -> Register:
    fields: dict[str, Any] = {
        "replica_id": "rep-0",
        "boot_id": "boot_1",
        "url": "http://127.0.0.1:8100",
        "deployment": "smol-a",
        "region": "local",
        "version": "v1",
        "state": ReplicaState.READY,
        "capacity": Capacity(kv_blocks=64, block_tokens=16, context_tokens=2048, sequences=8),
    }
    return Register(**(fields | changes))


def a_beat(**changes: Any) -> Beat:
    fields: dict[str, Any] = {
        "replica_id": "rep-0",
        "boot_id": "boot_1",
        "seq": 1,
        "state": ReplicaState.READY,
        "kv_blocks_free": 60,
        "running": 1,
        "waiting": 0,
        "steps": 7,
    }
    return Beat(**(fields | changes))
