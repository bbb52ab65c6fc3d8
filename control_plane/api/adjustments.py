"""Credits, refunds, adjustments and repricings: an operator's corrections, each an entry.

The caller names each with an `id`: the same words again get the same entry, and other words
under that id are refused. Nothing that was written is ever edited.
"""

from typing import Annotated

import msgspec
from litestar import Response, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from control_plane.api.amounts import PositiveAmount, SignedAmount
from control_plane.api.names import END
from control_plane.services import Services
from core.errors import Code, RefusedError, refuse
from core.metering import Adjust, Adjusted, AdjustmentKind, LedgerRefused
from store import accounts, tenants
from store.accounts import EntryRow
from store.audit_log import record

AdjustmentId = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*" + END, max_length=100)
]
Reason = Annotated[str, msgspec.Meta(pattern=r"\S", max_length=500)]
Reference = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class CreateCredit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Money that was paid in; below 0, paid back. For a post-paid account it is only noted."""

    id: AdjustmentId
    amount_micro: SignedAmount
    reason: Reason


class CreateRefund(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request's bill, or part of it, given back to the account."""

    id: AdjustmentId
    request_id: Reference
    amount_micro: PositiveAmount
    reason: Reason


class CreateAdjustment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Added to what the account has spent; below 0, taken off it. About no one request."""

    id: AdjustmentId
    amount_micro: SignedAmount
    reason: Reason


class CreateReprice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request as if it had been billed at another price; its row keeps the one it had."""

    id: AdjustmentId
    request_id: Reference
    price_id: Reference
    reason: Reason


@post("/tenants/{tenant:str}/credits")
async def create_credit(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    tenant: FromPath[str],
    data: JSONBody[CreateCredit],
) -> Response[EntryRow]:
    """409 where a prepaid account would keep less than it has used."""
    return await _adjust(services, _word(AdjustmentKind.CREDIT, tenant, data, actor=actor))


@post("/tenants/{tenant:str}/refunds")
async def create_refund(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    tenant: FromPath[str],
    data: JSONBody[CreateRefund],
) -> Response[EntryRow]:
    """409 for more than the request costs, 404 for a request that is unknown or still open."""
    return await _adjust(services, _word(AdjustmentKind.REFUND, tenant, data, actor=actor))


@post("/tenants/{tenant:str}/adjustments")
async def create_adjustment(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    tenant: FromPath[str],
    data: JSONBody[CreateAdjustment],
) -> Response[EntryRow]:
    """409 where it would take the account over a hard limit."""
    return await _adjust(services, _word(AdjustmentKind.ADJUSTMENT, tenant, data, actor=actor))


@post("/tenants/{tenant:str}/reprices")
async def create_reprice(
    services: NamedDependency[Services],
    actor: NamedDependency[str],
    tenant: FromPath[str],
    data: JSONBody[CreateReprice],
) -> Response[EntryRow]:
    """409 where the dearer bill would go over a hard limit; 404 as for a refund."""
    return await _adjust(services, _word(AdjustmentKind.REPRICE, tenant, data, actor=actor))


def _word(kind: AdjustmentKind, tenant: str, data: msgspec.Struct, *, actor: str) -> Adjust:
    fields = msgspec.structs.asdict(data)
    if fields.get("amount_micro") == 0:
        raise refuse(Code.UNPROCESSABLE, "0 changes nothing", param="amount_micro")
    return Adjust(tenant_id=tenant, kind=kind, author=actor, **fields)


async def _adjust(services: Services, word: Adjust) -> Response[EntryRow]:
    """201 with its entry, 200 when it was known."""
    answer = await services.ledger.adjust(word)
    if isinstance(answer, LedgerRefused):
        raise refusal(word, answer)
    entry, is_new = await _recorded(services, word, answer)
    return Response(entry, status_code=201 if is_new else 200)


async def _recorded(services: Services, word: Adjust, answer: Adjusted) -> tuple[EntryRow, bool]:
    """The entry, and whether the audit log did not have it.

    The ledger commits on its own; one that died before it came here is recorded when repeated.
    """
    async with services.postgres.transaction() as conn:
        # Two that say the same take turns.
        await tenants.tenant_for_change(conn, word.tenant_id)
        is_new = not await accounts.adjustment_is_recorded(conn, word.tenant_id, word.id)
        if is_new:
            fields = msgspec.to_builtins(word)
            detail = {name: fields[name] for name in _RECORDED if fields[name]}
            await record(
                conn,
                actor=word.author,
                action=f"account.{word.kind}",
                subject=word.tenant_id,
                detail=detail | {"entry": answer.entry, "delta_micro": answer.delta_micro},
            )
        (entry,) = await accounts.entries_page(
            conn, word.tenant_id, before=answer.entry + 1, limit=1
        )
    return entry, is_new


_RECORDED = ("id", "amount_micro", "request_id", "price_id", "reason")


def refusal(word: Adjust, refused: LedgerRefused) -> RefusedError:
    """Why not, with the sums that led to it, in micro-units."""
    if refused.reason in _UNKNOWN:
        param, what = _UNKNOWN[refused.reason]
        return refuse(Code.NOT_FOUND, what.format(word=word), param=param)
    match refused.reason:
        case "id_reused":
            message = f"{word.id!r} is the id of another correction"
            return refuse(Code.CONFLICT, message, param="id")
        case "too_much" if word.kind is AdjustmentKind.CREDIT:
            most, param = "can be taken back", "amount_micro"
        case "too_much":
            message = (
                f"The request costs {refused.fits_micro} micro-units, refunds and repricings "
                "counted: no more can be given back."
            )
            return refuse(Code.CONFLICT, message, param="amount_micro")
        case "hard_cap":
            most = "more can be charged"
            param = "price_id" if word.kind is AdjustmentKind.REPRICE else "amount_micro"
        case reason:
            raise AssertionError(f"the ledger refuses a correction with {reason!r}")
    message = (
        f"The limit {refused.limit!r} is {refused.hard_cap_micro} micro-units, of which "
        f"{refused.posted_micro} are spent and {refused.reserved_micro} reserved: at most "
        f"{refused.fits_micro} {most}."
    )
    return refuse(Code.CONFLICT, message, param=param)


_UNKNOWN = {
    "no_account": (None, "there is no tenant {word.tenant_id!r}"),
    "no_request": ("request_id", "this tenant has no request {word.request_id!r} that has ended"),
    "no_price": ("price_id", "there is no price {word.price_id!r}"),
}
