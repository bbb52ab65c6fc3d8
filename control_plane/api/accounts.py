"""Accounts: balances and what bounds them, the terms an operator may set, and every entry."""

from typing import Annotated

import msgspec
from litestar import get, put
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody, QueryParameter

from control_plane.api.amounts import Amount
from control_plane.api.paging import ROWS, Limit
from control_plane.api.tenants import required, required_for_change
from control_plane.services import Services
from core import grants
from core.accounts import Account, account_limits
from core.errors import Code, refuse
from store import accounts, tenants
from store.accounts import FROM_NEWEST, CapState, EntryRow
from store.audit_log import record
from store.postgres import Connection

Before = Annotated[int, QueryParameter(ge=0, le=FROM_NEWEST)]


class PutAccount(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole of it: neither has a default, lest a limit be lost by leaving it out."""

    prepaid: bool
    hard_cap_micro: Amount | None


class AccountBody(msgspec.Struct, frozen=True, kw_only=True):
    """Balances in micro-units.

    `room_micro` is what may still be held under every hard limit on the whole account, null
    where there is none. `entries` is the number of the last entry.
    """

    tenant_id: str
    prepaid: bool
    credit_micro: int
    hard_cap_micro: int | None
    posted_micro: int
    reserved_micro: int
    room_micro: int | None
    entries: int
    caps: list[CapState]


class EntryList(msgspec.Struct, frozen=True, kw_only=True):
    """Newest first; `before` asks for older ones, null at the end."""

    entries: list[EntryRow]
    before: int | None


@get("/tenants/{tenant:str}/account")
async def read_account(services: NamedDependency[Services], tenant: FromPath[str]) -> AccountBody:
    """404 for an unknown tenant."""
    async with services.postgres.connection() as conn:
        await required(conn, tenant)
        return await _body(conn, tenant)


@put("/tenants/{tenant:str}/account")
async def put_account(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    tenant: FromPath[str],
    data: JSONBody[PutAccount],
) -> AccountBody:
    """In force at once. 409 where prepaid would begin with more used than was paid in."""
    async with services.postgres.transaction() as conn:
        await required_for_change(conn, tenant)
        version = await tenants.touch_tenant(conn, tenant)
        account = await accounts.account_for_change(conn, tenant)
        assert account is not None, "an account is opened with its tenant"
        if data.prepaid and not account.prepaid:
            _require_paid(account)
        await accounts.set_prepaid(conn, tenant, prepaid=data.prepaid)
        await accounts.set_hard_cap(conn, tenant, data.hard_cap_micro)
        detail = msgspec.to_builtins(data)
        await record(conn, actor=actor, action="account.terms", subject=tenant, detail=detail)
        body = await _body(conn, tenant)
    await services.announcer.tenant(tenant, version)
    return body


@get("/tenants/{tenant:str}/entries")
async def list_entries(
    services: NamedDependency[Services],
    tenant: FromPath[str],
    before: Before = FROM_NEWEST,
    limit: Limit = ROWS,
) -> EntryList:
    """Every change of the account, with the balances after it."""
    async with services.postgres.connection() as conn:
        await required(conn, tenant)
        rows = await accounts.entries_page(conn, tenant, before=before, limit=limit)
    return EntryList(entries=rows, before=rows[-1].seq if len(rows) == limit else None)


def room_micro(account: Account, states: list[CapState]) -> int | None:
    """What may still be held under every hard limit on the whole account."""
    limits = account_limits(account) + [
        grants.Limit(
            name=state.period,
            cap_micro=state.hard_micro,
            posted_micro=state.posted_micro,
            reserved_micro=state.reserved_micro,
        )
        for state in states
        if state.key_id == "" and state.hard_micro is not None
    ]
    return min((limit.room_micro for limit in limits), default=None)


async def _body(conn: Connection, tenant: str) -> AccountBody:
    account = await accounts.account(conn, tenant)
    assert account is not None, "an account is opened with its tenant"
    states = await accounts.caps_of(conn, tenant)
    return AccountBody(
        **msgspec.structs.asdict(account), room_micro=room_micro(account, states), caps=states
    )


def _require_paid(account: Account) -> None:
    used = account.posted_micro + account.reserved_micro
    if used > account.credit_micro:
        message = (
            f"{account.posted_micro} micro-units are spent and {account.reserved_micro} reserved, "
            f"and the credit is {account.credit_micro}: give a credit of "
            f"{used - account.credit_micro} first."
        )
        raise refuse(Code.CONFLICT, message, param="prepaid")
