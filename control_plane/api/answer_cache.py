"""Whether a tenant's exact repeats are answered from memory, for how long, and for what."""

from typing import Annotated, Literal

import msgspec
from litestar import delete, get, put
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from control_plane.api.tenants import required, required_for_change
from control_plane.services import Services
from store.answer_cache import AnswerPolicy, drop_policy, policy_of, put_policy
from store.audit_log import record


class PutAnswerCache(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole of it. `charge` is for each repeat: nothing, or its prompt as a cached one."""

    ttl_s: Annotated[int, msgspec.Meta(ge=1, le=86_400)] = 3_600
    charge: Literal["free", "cached_input"] = "free"


class AnswerCacheBody(msgspec.Struct, frozen=True, kw_only=True):
    """`policy` null: no answer is given again."""

    tenant_id: str
    policy: AnswerPolicy | None


@get("/tenants/{tenant:str}/answer-cache")
async def read_answer_cache(
    services: NamedDependency[Services], tenant: FromPath[str]
) -> AnswerCacheBody:
    """404 for an unknown tenant."""
    async with services.postgres.connection() as conn:
        await required(conn, tenant)
        return AnswerCacheBody(tenant_id=tenant, policy=await policy_of(conn, tenant))


@put("/tenants/{tenant:str}/answer-cache")
async def put_answer_cache(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    tenant: FromPath[str],
    data: JSONBody[PutAnswerCache],
) -> AnswerCacheBody:
    """In force within a second. A request must still ask for it."""
    policy = AnswerPolicy(ttl_s=data.ttl_s, charge=data.charge)
    async with services.postgres.transaction() as conn:
        await required_for_change(conn, tenant)
        await put_policy(conn, tenant, policy)
        detail = msgspec.to_builtins(policy)
        await record(conn, actor=actor, action="answer_cache.put", subject=tenant, detail=detail)
    return AnswerCacheBody(tenant_id=tenant, policy=policy)


@delete("/tenants/{tenant:str}/answer-cache", status_code=200)
async def drop_answer_cache(
    services: NamedDependency[Services], actor: NamedDependency[str], tenant: FromPath[str]
) -> AnswerCacheBody:
    """In force within a second."""
    async with services.postgres.transaction() as conn:
        await required_for_change(conn, tenant)
        if await drop_policy(conn, tenant):
            await record(conn, actor=actor, action="answer_cache.drop", subject=tenant, detail={})
    return AnswerCacheBody(tenant_id=tenant, policy=None)
