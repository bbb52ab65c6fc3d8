"""`GET /v1/limits` and `GET /v1/usage`: what a caller may do now, and what it has used.

By its key alone, and never another tenant's. Neither charges, holds or counts anything. The same
in both dialects: neither has such a page for who has no administrator's key.
"""

import re
from datetime import UTC, datetime
from typing import Any, Protocol
from urllib.parse import parse_qsl

import msgspec

from core.errors import Code, refuse
from core.scopes import OwnScope, own_scopes
from core.tickets import Remaining, Scope, Seen
from gateway.api.endpoint import Edge, Endpoint
from gateway.api.responder import Receive, Responder
from gateway.api.responder import Scope as Asgi
from gateway.own_usage import Month, MonthUsage, OwnUsage, month_of
from store.usage_totals import Total

SCOPES_MAX = 200  # told of; a request is limited by all
QUERY_FIELDS_MAX = 16

_MONTH = re.compile(r"(20\d{2})-(0[1-9]|1[0-2])")
_encode = msgspec.json.Encoder().encode


class Looks(Protocol):
    """Of `store.dispatch.Dispatch`, what looking needs."""

    @property
    def degraded(self) -> bool:
        """Whether this gateway decides alone."""

    async def look(self, tenant: str, scopes: tuple[Scope, ...]) -> tuple[Seen, ...]:
        """What a request in these scopes would find left."""


class OwnLimitsEndpoint(Endpoint):
    """The limits of a key's requests in each scope, with what is left of them now."""

    method = "GET"

    def __init__(self, edge: Edge, dispatch: Looks) -> None:
        super().__init__(edge, name="own_limits", face=None)
        self._dispatch = dispatch

    async def answer(self, scope: Asgi, receive: Receive, respond: Responder) -> None:  # noqa: ARG002 - a GET has no body
        """The list."""
        identity = await self.edge.auth.authenticate(scope["headers"])
        _refuse_others(_query(scope))
        own = own_scopes(identity.tenant, identity.key)
        told = own[:SCOPES_MAX]
        seen = await self._dispatch.look(identity.tenant.id, tuple(one.scope for one in told))
        body = {
            "object": "list",
            "data": [_limit(one, left) for one, left in zip(told, seen, strict=True)],
            "has_more": len(own) > len(told),
            "degraded": self._dispatch.degraded,
        }
        await respond.whole(200, _encode(body), {}, self.edge.new_request_id())


class OwnUsageEndpoint(Endpoint):
    """A month's sums of a key's tenant, by model, and of the key itself."""

    method = "GET"

    def __init__(self, edge: Edge, usage: OwnUsage) -> None:
        super().__init__(edge, name="own_usage", face=None)
        self._usage = usage

    async def answer(self, scope: Asgi, receive: Receive, respond: Responder) -> None:  # noqa: ARG002 - a GET has no body
        """The sums."""
        identity = await self.edge.auth.authenticate(scope["headers"])
        query = _query(scope)
        month = self._month(query.pop("month", None))
        _refuse_others(query)
        usage = await self._usage.of(identity.tenant.id, identity.key.id, month)
        await respond.whole(200, _encode(_told(usage)), {}, self.edge.new_request_id())

    def _month(self, text: str | None) -> Month:
        """The one that is said, or the present one, UTC."""
        if text is None:
            return current_month(self.edge.now_ms())
        found = _MONTH.fullmatch(text)
        if found is None:
            raise refuse(Code.BAD_REQUEST, "month: must be as 2026-11", param="month")
        return month_of(int(found[1]), int(found[2]))


def current_month(now_ms: int) -> Month:
    """The month of this moment, UTC."""
    now = datetime.fromtimestamp(now_ms / 1000, tz=UTC)
    return month_of(now.year, now.month)


def _limit(own: OwnScope, seen: Seen) -> dict[str, Any]:
    limits, room, bounds = own.scope.limits, seen.room, own.bounds
    concurrency = None
    if limits.concurrency:
        left = max(0, limits.concurrency - seen.held)
        concurrency = {"limit": limits.concurrency, "remaining": left}
    return {
        "object": "limit",
        "scope": own.kind,
        "model": own.model or None,
        "requests_per_min": _bucket(room.requests),
        "input_tokens_per_min": _bucket(room.input_tokens),
        "output_tokens_per_min": _bucket(room.output_tokens),
        "concurrency": concurrency,
        "prompt_tokens_max": bounds.prompt_tokens_max or None,
        "output_tokens_max": bounds.output_tokens_max or None,
        "deadline_ms_max": bounds.deadline_ms_max or None,
    }


def _bucket(left: Remaining) -> dict[str, int] | None:
    if not left.limit:
        return None
    return {"limit": left.limit, "remaining": left.remaining, "reset_ms": left.reset_ms}


def _told(usage: MonthUsage) -> dict[str, Any]:
    return {
        "object": "usage",
        "start_time": usage.month.start_ms // 1000,
        "end_time": usage.month.end_ms // 1000,
        "as_of_time": usage.as_of_ms // 1000,
        "total": _sums(usage.total),
        "key": _sums(usage.key),
        "models": [{"model": total.model, **_sums(total)} for total in usage.models],
    }


def _sums(total: Total | None) -> dict[str, int]:
    """By the names that OpenAI's usage has for them."""
    return {
        "num_model_requests": total.requests if total else 0,
        "input_tokens": total.prompt_tokens if total else 0,
        "input_cached_tokens": total.cached_tokens if total else 0,
        "output_tokens": total.output_tokens if total else 0,
        "cost_micro": total.billed_micro + total.adjusted_micro if total else 0,
    }


def _query(scope: Asgi) -> dict[str, str]:
    text = scope["query_string"].decode("latin-1")
    try:
        return dict(parse_qsl(text, max_num_fields=QUERY_FIELDS_MAX, keep_blank_values=True))
    except ValueError:
        raise refuse(Code.BAD_REQUEST, "The query has too many fields.") from None


def _refuse_others(query: dict[str, str]) -> None:
    if query:
        path = next(iter(query))[:64]
        raise refuse(Code.BAD_REQUEST, f"Unrecognized query parameter: {path}", param=path)
