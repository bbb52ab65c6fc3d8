"""Outside providers: where they are, how they are treated, and the key they are sent.

A key goes in and never comes out. It is sealed for the provider's name, dialect and address
alone, so a changed address wants the key again.
"""

import secrets
from typing import Annotated, Literal

import msgspec
from litestar import delete, get, post, put
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody
from msgspec import UNSET, UnsetType

from control_plane.api.names import END, DeploymentName
from control_plane.api.paging import ROWS, After, Limit
from control_plane.services import Services
from core.errors import Code, RefusedError, refuse
from core.providers import (
    ProviderDialect,
    ProviderSettings,
    ProviderView,
    base_url_fault,
    key_context,
)
from core.secrets import NONCE_BYTES, CannotOpenError, KeyRing, Sealed
from core.settings import env_name
from store import providers, registry
from store.audit_log import record
from store.postgres import Connection
from store.providers import ProviderRow

RING = env_name("provider_keys")

# What a header can carry; a line end in it would be a header of its own.
KeyText = Annotated[str, msgspec.Meta(pattern=r"^[!-~]{1,4096}" + END)]


class PutProvider(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of a provider. Without `key` the one that is there stays; null is for none."""

    dialect: ProviderDialect
    base_url: str
    allow_http: bool = False
    key: KeyText | UnsetType | None = UNSET
    settings: ProviderSettings = ProviderSettings()


class CreateProvider(PutProvider, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One that is new."""

    name: DeploymentName


class ProviderBody(msgspec.Struct, frozen=True, kw_only=True):
    """A provider as it is told: of its key only whether there is one, and what seals it."""

    name: str
    dialect: ProviderDialect
    base_url: str
    has_key: bool
    sealed_with: str | None
    settings: ProviderSettings
    version: int
    created_ms: int


class ProviderList(msgspec.Struct, frozen=True, kw_only=True):
    """In order of name; `after` asks for the next ones, null at the end."""

    providers: list[ProviderBody]
    after: str | None


class DeletedProvider(msgspec.Struct, frozen=True, kw_only=True):
    """`version` is the change that removed it."""

    name: str
    version: int


class Resealed(msgspec.Struct, frozen=True, kw_only=True):
    """The providers whose keys are now sealed with the ring's first key."""

    sealed_with: str
    resealed: list[str]


@post("/providers")
async def create_provider(
    services: NamedDependency[Services], actor: NamedDependency[str], data: JSONBody[CreateProvider]
) -> ProviderBody:
    """409 for a name that is taken. A route leads to it by that name."""
    view = _view(services, data.name, data, kept=None)
    async with services.postgres.transaction() as conn:
        view = msgspec.structs.replace(view, version=await providers.begin_change(conn))
        if not await providers.create_provider(conn, view):
            message = f"there is a provider {data.name!r} already"
            raise refuse(Code.CONFLICT, message, param="name")
        await _record(conn, "create", view, data, actor=actor)
        return _body(await _found(conn, data.name))


@put("/providers/{name:str}")
async def replace_provider(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    name: FromPath[str],
    data: JSONBody[PutProvider],
) -> ProviderBody:
    """404 for an unknown one. Gateways forget what they saw of it, a dead key too."""
    async with services.postgres.transaction() as conn:
        version = await providers.begin_change(conn)
        before = await _found(conn, name)
        view = _view(services, name, data, kept=before)
        view = msgspec.structs.replace(view, version=version)
        await providers.replace_provider(conn, view)
        await _record(conn, "replace", view, data, actor=actor)
        return _body(await _found(conn, name))


@get("/providers")
async def list_providers(
    services: NamedDependency[Services], after: After = "", limit: Limit = ROWS
) -> ProviderList:
    """All of them."""
    async with services.postgres.connection() as conn:
        rows = await providers.providers_page(conn, after=after, limit=limit)
    told = [_body(row) for row in rows]
    return ProviderList(providers=told, after=rows[-1].name if len(rows) == limit else None)


@get("/providers/{name:str}")
async def read_provider(services: NamedDependency[Services], name: FromPath[str]) -> ProviderBody:
    """404 for an unknown one."""
    async with services.postgres.connection() as conn:
        return _body(await _found(conn, name))


@delete("/providers/{name:str}", status_code=200)
async def delete_provider(
    services: NamedDependency[Services], actor: NamedDependency[str], name: FromPath[str]
) -> DeletedProvider:
    """409 while a route leads to it. What runs goes on."""
    async with services.postgres.transaction() as conn:
        version = await providers.begin_change(conn)
        await _found(conn, name)
        if await registry.provider_in_use(conn, name):
            raise refuse(Code.CONFLICT, f"a route leads to provider {name!r}", param="name")
        await providers.delete_provider(conn, name)
        await record(conn, actor=actor, action="provider.delete", subject=name, detail={})
    return DeletedProvider(name=name, version=version)


@post("/providers/reseal", status_code=200)
async def reseal_providers(
    services: NamedDependency[Services], actor: NamedDependency[str]
) -> Resealed:
    """After a new key was put in front of the ring. 409 where one does not open: none is."""
    ring = services.provider_ring
    sealing_id = _sealing_id(ring)
    done: list[str] = []
    async with services.postgres.transaction() as conn:
        version = await providers.begin_change(conn)
        for held in await providers.providers_in_view(conn):
            if held.key is None or held.key.key_id == sealing_id:
                continue
            key = _seal(ring, held, _opened(ring, held, held.key))
            again = msgspec.structs.replace(held, key=key, version=version)
            await providers.replace_provider(conn, again)
            done.append(held.name)
        detail = {"sealed_with": sealing_id, "resealed": done}
        await record(conn, actor=actor, action="provider.reseal", subject="*", detail=detail)
    return Resealed(sealed_with=sealing_id, resealed=done)


def _view(
    services: Services, name: str, data: PutProvider, *, kept: ProviderRow | None
) -> ProviderView:
    fault = base_url_fault(data.base_url, allow_http=data.allow_http)
    if fault is not None:
        raise _unsound(f"base_url: {fault}", "base_url")
    settings = data.settings
    if settings.cooldown_max_ms < settings.cooldown_ms:
        raise _unsound("it must not be below cooldown_ms", "settings.cooldown_max_ms")
    view = ProviderView(
        name=name,
        dialect=data.dialect,
        base_url=data.base_url.rstrip("/"),
        settings=settings,
    )
    if isinstance(data.key, str):
        _sealing_id(services.provider_ring)
        return msgspec.structs.replace(view, key=_seal(services.provider_ring, view, data.key))
    if data.key is None or kept is None or kept.key is None:
        return view
    if _context(view) != _context(kept):
        message = "the key is sealed for the address and dialect before: send it again"
        raise refuse(Code.CONFLICT, message, param="key")
    return msgspec.structs.replace(view, key=kept.key)


def _context(view: ProviderView) -> bytes:
    return key_context(view.name, view.dialect, view.base_url)


def _seal(ring: KeyRing, view: ProviderView, key: str) -> Sealed:
    return ring.seal(key, context=_context(view), nonce=secrets.token_bytes(NONCE_BYTES))


def _sealing_id(ring: KeyRing) -> str:
    if ring.sealing_id is None:
        raise refuse(Code.CONFLICT, f"no key can be kept: {RING} is not set", param="key")
    return ring.sealing_id


def _opened(ring: KeyRing, held: ProviderView, key: Sealed) -> str:
    try:
        return ring.open(key, context=_context(held))
    except CannotOpenError as error:
        message = f"the key of provider {held.name!r} does not open: {error}"
        raise refuse(Code.CONFLICT, message) from error


async def _found(conn: Connection, name: str) -> ProviderRow:
    found = await providers.provider(conn, name)
    if found is None:
        raise refuse(Code.NOT_FOUND, f"there is no provider {name!r}")
    return found


async def _record(
    conn: Connection,
    what: Literal["create", "replace"],
    view: ProviderView,
    data: PutProvider,
    *,
    actor: str,
) -> None:
    key = "kept" if data.key is UNSET else "none" if data.key is None else "set"
    detail = {
        "dialect": view.dialect,
        "base_url": view.base_url,
        "key": key if view.key is not None else "none",
        "settings": msgspec.to_builtins(view.settings),
    }
    await record(conn, actor=actor, action=f"provider.{what}", subject=view.name, detail=detail)


def _body(row: ProviderRow) -> ProviderBody:
    return ProviderBody(
        name=row.name,
        dialect=row.dialect,
        base_url=row.base_url,
        has_key=row.key is not None,
        sealed_with=None if row.key is None else row.key.key_id,
        settings=row.settings,
        version=row.version,
        created_ms=row.created_ms,
    )


def _unsound(message: str, param: str) -> RefusedError:
    return refuse(Code.UNPROCESSABLE, message, param=param)
