"""Safety policies: written as versions, given to tenants, and what they did."""

from typing import Annotated

import msgspec
from litestar import delete, get, put
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody, QueryParameter

from control_plane.api.paging import ROWS, After, Filter, Limit
from control_plane.api.tenants import required, required_for_change
from control_plane.services import Services
from core.errors import Code, refuse
from core.safety.policy import Policy, RuleName
from core.safety.rulebook import PolicyError, Rulebook
from store import safety
from store.audit_log import record
from store.postgres import Connection

Version = Annotated[int, QueryParameter(ge=0, le=2**31 - 1)]
Before = Annotated[int, QueryParameter(ge=0, le=2**63 - 1)]


class PolicyList(msgspec.Struct, frozen=True, kw_only=True):
    """The newest versions, in order of name; `after` asks for the next ones, null at the end."""

    policies: list[safety.PolicyRow]
    after: str | None


class AssignPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`version` null is the newest, also when there is a newer one."""

    policy: RuleName
    version: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    keep_text: bool = False


class AssignedBody(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's policy; null for none."""

    tenant_id: str
    assignment: safety.Assignment | None


class HitList(msgspec.Struct, frozen=True, kw_only=True):
    """Newest first; `before` asks for older ones, null at the end."""

    hits: list[safety.HitRow]
    before: int | None


@put("/safety-policies/{name:str}")
async def put_policy(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    name: FromPath[str],
    data: JSONBody[Policy],
) -> safety.PolicyRow:
    """A new version; the newest again if it says the same. 422 for what could blow up."""
    _check_name(name)
    try:
        book = Rulebook(data)
    except PolicyError as error:
        raise refuse(Code.UNPROCESSABLE, str(error), param=error.param) from error
    async with services.postgres.transaction() as conn:
        made = await safety.put_policy(conn, name, data, book.hold_chars)
        touched = await safety.touch_followers(conn, name)
        detail = {"version": made.version, "rules": [rule.name for rule in data.rules]}
        await record(conn, actor=actor, action="safety_policy.put", subject=name, detail=detail)
    for tenant_id, version in touched.items():
        await services.announcer.tenant(tenant_id, version)
    return made


@get("/safety-policies")
async def list_policies(
    services: NamedDependency[Services], after: After = "", limit: Limit = ROWS
) -> PolicyList:
    """All of them."""
    async with services.postgres.connection() as conn:
        rows = await safety.policies_page(conn, after=after, limit=limit)
    return PolicyList(policies=rows, after=rows[-1].name if len(rows) == limit else None)


@get("/safety-policies/{name:str}")
async def read_policy(
    services: NamedDependency[Services], name: FromPath[str], version: Version = safety.NEWEST
) -> safety.PolicyRow:
    """The newest version, or the one asked for. 404 for neither."""
    async with services.postgres.connection() as conn:
        return await _required_policy(conn, name, version)


@get("/tenants/{tenant:str}/safety")
async def read_assignment(
    services: NamedDependency[Services], tenant: FromPath[str]
) -> AssignedBody:
    """404 for an unknown tenant."""
    async with services.postgres.connection() as conn:
        await required(conn, tenant)
        found = await safety.assignment(conn, tenant)
    return AssignedBody(tenant_id=tenant, assignment=found)


@put("/tenants/{tenant:str}/safety")
async def assign_policy(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    tenant: FromPath[str],
    data: JSONBody[AssignPolicy],
) -> AssignedBody:
    """In force everywhere within a second. 422 for an unknown policy or version."""
    assignment = safety.Assignment(
        policy=data.policy, version=data.version, keep_text=data.keep_text
    )
    async with services.postgres.transaction() as conn:
        await required_for_change(conn, tenant)
        if await safety.policy_by_name(conn, data.policy, data.version or safety.NEWEST) is None:
            message = "there is no such policy, or no such version of it"
            raise refuse(Code.UNPROCESSABLE, message, param="policy")
        version = await safety.assign_policy(conn, tenant, assignment)
        detail = msgspec.to_builtins(data)
        await record(conn, actor=actor, action="tenant.safety", subject=tenant, detail=detail)
    await services.announcer.tenant(tenant, version)
    return AssignedBody(tenant_id=tenant, assignment=assignment)


@delete("/tenants/{tenant:str}/safety", status_code=200)
async def unassign_policy(
    services: NamedDependency[Services], actor: NamedDependency[str], tenant: FromPath[str]
) -> AssignedBody:
    """Nothing is screened from then on. Done twice is done once."""
    async with services.postgres.transaction() as conn:
        await required_for_change(conn, tenant)
        version = await safety.unassign_policy(conn, tenant)
        if version is not None:
            await record(conn, actor=actor, action="tenant.no_safety", subject=tenant, detail={})
    if version is not None:
        await services.announcer.tenant(tenant, version)
    return AssignedBody(tenant_id=tenant, assignment=None)


@get("/safety-hits")
async def list_hits(
    services: NamedDependency[Services],
    tenant: Filter = "",
    request_id: Filter = "",
    before: Before = safety.FROM_NEWEST,
    limit: Limit = ROWS,
) -> HitList:
    """All, or those of a tenant or a request."""
    async with services.postgres.connection() as conn:
        rows = await safety.hits_page(
            conn, tenant_id=tenant, request_id=request_id, before=before, limit=limit
        )
    return HitList(hits=rows, before=rows[-1].id if len(rows) == limit else None)


async def _required_policy(conn: Connection, name: str, version: int) -> safety.PolicyRow:
    found = await safety.policy_by_name(conn, name, version)
    if found is None:
        raise refuse(Code.NOT_FOUND, f"there is no safety policy {name!r}, or no such version")
    return found


def _check_name(name: str) -> None:
    try:
        msgspec.convert(name, RuleName)
    except msgspec.ValidationError as error:
        raise refuse(Code.UNPROCESSABLE, f"not a policy's name: {error}", param="name") from error
