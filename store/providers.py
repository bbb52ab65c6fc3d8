"""Outside providers as rows. Their keys are here sealed, and are not opened here.

What this release does not know in a row's settings is passed over: a newer control plane may
have written it, and a gateway goes on with what it understands.
"""

from typing import Any

import msgspec
from psycopg.types.json import Jsonb

from core.providers import ProviderDialect, ProviderSettings, ProviderView
from core.secrets import Sealed
from store.changes import next_change
from store.postgres import Connection
from store.queries import load
from store.rows import struct_row

_sql = load("providers")
_KNOWN = frozenset(ProviderSettings.__struct_fields__)


class ProviderRow(ProviderView, frozen=True, kw_only=True):
    """A provider, and since when there is one of this name."""

    created_ms: int


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    dialect: ProviderDialect
    base_url: str
    key_id: str | None
    nonce: bytes | None
    sealed: bytes | None
    settings: dict[str, Any]
    version: int
    created_ms: int


async def begin_change(conn: Connection) -> int:
    """The version of what this transaction is about to change. Writers wait for one another."""
    return await next_change(conn, "routing")


async def create_provider(conn: Connection, provider: ProviderView) -> bool:
    """False when the name is taken. Its version is that of the change."""
    row = await (await conn.execute(_sql["create_provider"], _values(provider))).fetchone()
    return row is not None


async def replace_provider(conn: Connection, provider: ProviderView) -> bool:
    """As `create_provider`, of one that there is; false where there is none."""
    row = await (await conn.execute(_sql["replace_provider"], _values(provider))).fetchone()
    return row is not None


async def delete_provider(conn: Connection, name: str) -> bool:
    """Whether there was one."""
    row = await (await conn.execute(_sql["delete_provider"], {"name": name})).fetchone()
    return row is not None


async def provider(conn: Connection, name: str) -> ProviderRow | None:
    """By its name."""
    async with conn.cursor(row_factory=struct_row(_Row)) as cursor:
        await cursor.execute(_sql["provider"], {"name": name})
        row = await cursor.fetchone()
    return None if row is None else _provider(row)


async def providers_page(conn: Connection, *, after: str = "", limit: int) -> list[ProviderRow]:
    """In order of name, after `after`."""
    async with conn.cursor(row_factory=struct_row(_Row)) as cursor:
        await cursor.execute(_sql["providers_page"], {"after": after, "limit": limit})
        return [_provider(row) for row in await cursor.fetchall()]


async def providers_in_view(conn: Connection) -> tuple[ProviderView, ...]:
    """All of them: a table may lead to any."""
    async with conn.cursor(row_factory=struct_row(_Row)) as cursor:
        await cursor.execute(_sql["providers_in_view"])
        return tuple(_provider(row) for row in await cursor.fetchall())


def _values(provider: ProviderView) -> dict[str, Any]:
    key = provider.key
    return {
        "name": provider.name,
        "dialect": provider.dialect,
        "base_url": provider.base_url,
        "key_id": None if key is None else key.key_id,
        "nonce": None if key is None else key.nonce,
        "sealed": None if key is None else key.sealed,
        "settings": Jsonb(msgspec.to_builtins(provider.settings)),
        "version": provider.version,
    }


def _provider(row: _Row) -> ProviderRow:
    key = None
    if row.key_id is not None and row.nonce is not None and row.sealed is not None:
        key = Sealed(key_id=row.key_id, nonce=row.nonce, sealed=row.sealed)
    known = {field: value for field, value in row.settings.items() if field in _KNOWN}
    return ProviderRow(
        name=row.name,
        dialect=row.dialect,
        base_url=row.base_url,
        key=key,
        settings=msgspec.convert(known, ProviderSettings),
        version=row.version,
        created_ms=row.created_ms,
    )
