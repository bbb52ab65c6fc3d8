"""Whether a tenant's responses are kept, as its operator says."""

import msgspec
from litestar import get, put
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from control_plane.api.tenants import required, required_for_change
from control_plane.services import Services
from store.audit_log import record
from store.responses import keeps, put_policy


class PutKeptResponses(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole of it."""

    keep: bool


class KeptResponsesBody(msgspec.Struct, frozen=True, kw_only=True):
    """`deleted` are those that went with this change."""

    tenant_id: str
    keep: bool
    deleted: int = 0


@get("/tenants/{tenant:str}/responses")
async def read_kept_responses(
    services: NamedDependency[Services], tenant: FromPath[str]
) -> KeptResponsesBody:
    """404 for an unknown tenant. They are kept where nobody has said anything."""
    async with services.postgres.connection() as conn:
        await required(conn, tenant)
        return KeptResponsesBody(tenant_id=tenant, keep=await keeps(conn, tenant))


@put("/tenants/{tenant:str}/responses")
async def put_kept_responses(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    tenant: FromPath[str],
    data: JSONBody[PutKeptResponses],
) -> KeptResponsesBody:
    """In force at once. Turned off, what was kept is deleted."""
    async with services.postgres.transaction() as conn:
        await required_for_change(conn, tenant)
        deleted = await put_policy(conn, tenant, keep=data.keep)
        detail = {"keep": data.keep, "deleted": deleted}
        await record(conn, actor=actor, action="responses.policy", subject=tenant, detail=detail)
    return KeptResponsesBody(tenant_id=tenant, keep=data.keep, deleted=deleted)
