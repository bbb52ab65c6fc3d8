"""Tenants: created, listed, read, changed. Never deleted: a bill outlives its payer's account."""

import secrets
from collections.abc import Set as AbstractSet
from typing import Annotated

import msgspec
from litestar import Response, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from control_plane.access.caller import Caller
from control_plane.access.roles import Permission
from control_plane.api.amounts import Amount
from control_plane.api.etags import require_match, tagged
from control_plane.api.names import TenantName, TierName
from control_plane.api.paging import ROWS, After, Filter, Limit
from control_plane.auth import AnyRequest
from control_plane.errors import ExistsError
from control_plane.services import Services
from core.allowance import NOTHING_SAID, Allowance, Bounds, OutputPolicy, said_by
from core.errors import Code, refuse
from core.ids import ENTROPY_BYTES, tenant_id
from core.tenancy import Tenant
from core.tickets import Limits
from store import limits, tenants
from store.audit_log import record
from store.postgres import Connection

SALT_BYTES = 16
Weight = Annotated[int, msgspec.Meta(ge=1, le=1000)]
OutputTokens = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]  # 0: answers are not cut
# What a tenant pays by. At first it may be what nobody need decide: list prices, without a cap.
MONEY = {"hard_cap_micro": None, "price_book": "list", "billed": True}


class LimitsBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """0 is unlimited, null what the tier says; what is left out stays, or is null at first."""

    requests_per_min: Amount | msgspec.UnsetType | None = msgspec.UNSET
    input_tokens_per_min: Amount | msgspec.UnsetType | None = msgspec.UNSET
    output_tokens_per_min: Amount | msgspec.UnsetType | None = msgspec.UNSET
    concurrency: Amount | msgspec.UnsetType | None = msgspec.UNSET
    prompt_tokens_max: Amount | msgspec.UnsetType | None = msgspec.UNSET
    output_tokens_max: Amount | msgspec.UnsetType | None = msgspec.UNSET
    deadline_ms_max: Amount | msgspec.UnsetType | None = msgspec.UNSET

    def over(self, own: Allowance) -> Allowance:
        """`own` with what is given here in place."""
        return msgspec.structs.replace(own, **_given(self))


class CreateTenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`hard_cap_micro` null is post-paid without a cap."""

    name: TenantName
    limits: LimitsBody = LimitsBody()
    output_policy: OutputPolicy = "clamp"
    overload_output_tokens: OutputTokens = 0
    weight: Weight = 1
    hard_cap_micro: Amount | None = None
    price_book: str = "list"
    tier: TierName = "standard"
    billed: bool = True
    disabled: bool = False


class PatchTenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is left out stays."""

    limits: LimitsBody | msgspec.UnsetType = msgspec.UNSET
    output_policy: OutputPolicy | msgspec.UnsetType = msgspec.UNSET
    overload_output_tokens: OutputTokens | msgspec.UnsetType = msgspec.UNSET
    weight: Weight | msgspec.UnsetType = msgspec.UNSET
    hard_cap_micro: Amount | msgspec.UnsetType | None = msgspec.UNSET
    price_book: str | msgspec.UnsetType = msgspec.UNSET
    tier: TierName | msgspec.UnsetType = msgspec.UNSET
    billed: bool | msgspec.UnsetType = msgspec.UNSET
    disabled: bool | msgspec.UnsetType = msgspec.UNSET


class TenantBody(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant without its salt, which is nobody's business.

    `limits` and `bounds` are what holds in the end, its tier's word included; 0 is unlimited.
    """

    id: str
    name: str
    limits: Limits
    bounds: Bounds
    output_policy: OutputPolicy
    overload_output_tokens: int
    weight: int
    hard_cap_micro: int | None
    price_book: str
    tier: str
    billed: bool
    disabled: bool
    version: int


class TenantList(msgspec.Struct, frozen=True, kw_only=True):
    """In order of name; `after` asks for the next ones, null at the end."""

    tenants: list[TenantBody]
    after: str | None


@post("/tenants")
async def create_tenant(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    caller: NamedDependency[Caller],
    data: JSONBody[CreateTenant],
) -> TenantBody:
    """409 with `existing_id` when the name is taken, 422 for an unknown price book."""
    _require_may_price(caller, {n for n, usual in MONEY.items() if getattr(data, n) != usual})
    new = tenants.NewTenant(
        id=tenant_id(secrets.token_bytes(ENTROPY_BYTES)),
        name=data.name,
        salt=secrets.token_bytes(SALT_BYTES),
        allowance=data.limits.over(NOTHING_SAID),
        output_policy=data.output_policy,
        overload_output_tokens=data.overload_output_tokens,
        weight=data.weight,
        hard_cap_micro=data.hard_cap_micro,
        price_book=data.price_book,
        tier=data.tier,
        billed=data.billed,
        disabled=data.disabled,
    )
    async with services.postgres.transaction() as conn:
        await _require_price_book(conn, data.price_book)
        if not await tenants.create_tenant(conn, new):
            existing = await tenants.tenant_id_by_name(conn, data.name)
            assert existing is not None, "its name was taken a moment ago"
            raise ExistsError(
                f"a tenant named {data.name!r} exists", param="name", existing_id=existing
            )
        detail = msgspec.to_builtins(data)
        await record(conn, actor=actor, action="tenant.create", subject=new.id, detail=detail)
        return body(await required(conn, new.id))


@get("/tenants")
async def list_tenants(
    services: NamedDependency[Services], name: Filter = "", after: After = "", limit: Limit = ROWS
) -> TenantList:
    """All, or the one called `name`."""
    async with services.postgres.connection() as conn:
        rows = await tenants.tenants_page(conn, name=name, after=after, limit=limit)
    last = rows[-1].name if len(rows) == limit else None
    return TenantList(tenants=[body(row) for row in rows], after=last)


@get("/tenants/{tenant:str}")
async def read_tenant(
    services: NamedDependency[Services], tenant: FromPath[str]
) -> Response[TenantBody]:
    """404 for an unknown id."""
    async with services.postgres.connection() as conn:
        found = await required(conn, tenant)
    return tagged(body(found), found.version)


@patch("/tenants/{tenant:str}")
async def patch_tenant(
    request: AnyRequest,
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    caller: NamedDependency[Caller],
    *,
    tenant: FromPath[str],
    data: JSONBody[PatchTenant],
) -> Response[TenantBody]:
    """In force everywhere within a second. 412 for another version than `If-Match` names."""
    _require_may_price(caller, MONEY.keys() & _given(data).keys())
    async with services.postgres.transaction() as conn:
        before = await required_for_change(conn, tenant)
        require_match(request, before.version)
        if data.price_book is not msgspec.UNSET:
            await _require_price_book(conn, data.price_book)
        changes = _given(data)
        changes.pop("limits", None)
        if data.limits is not msgspec.UNSET:
            own = said_by(await limits.said_of(conn, ["tenant"], tenant), "tenant")
            await limits.say(conn, "tenant", tenant, data.limits.over(own.get("", NOTHING_SAID)))
        changed = await tenants.change_tenant(conn, msgspec.structs.replace(before, **changes))
        detail = msgspec.to_builtins(data)
        await record(conn, actor=actor, action="tenant.change", subject=tenant, detail=detail)
    await services.announcer.tenant(changed.id, changed.version)
    return tagged(body(changed), changed.version)


def body(tenant: Tenant) -> TenantBody:
    """As the API shows it."""
    shown = {name: getattr(tenant, name) for name in TenantBody.__struct_fields__}
    return TenantBody(**shown)


async def required(conn: Connection, tenant: str) -> Tenant:
    """Raises RefusedError: 404."""
    return _found(await tenants.tenant_by_id(conn, tenant), tenant)


async def required_for_change(conn: Connection, tenant: str) -> Tenant:
    """As `required`, with other changers of it waiting until the transaction ends."""
    return _found(await tenants.tenant_for_change(conn, tenant), tenant)


def _found(row: Tenant | None, tenant: str) -> Tenant:
    if row is None:
        raise refuse(Code.NOT_FOUND, f"there is no tenant {tenant!r}")
    return row


async def _require_price_book(conn: Connection, book: str) -> None:
    if not await tenants.knows_price_book(conn, book):
        message = f"there is no price book {book!r}"
        raise refuse(Code.UNPROCESSABLE, message, param="price_book")


def _require_may_price(caller: Caller, fields: AbstractSet[str]) -> None:
    """Raises RefusedError: 403. The account's own calls need the same."""
    if fields and not caller.may(Permission.MONEY_WRITE):
        message = f"this needs the permission {Permission.MONEY_WRITE.value!r} too"
        raise refuse(Code.FORBIDDEN, message, param=min(fields))


def _given(struct: msgspec.Struct) -> dict[str, object]:
    fields = msgspec.structs.asdict(struct)
    return {name: value for name, value in fields.items() if value is not msgspec.UNSET}
