"""Tenants and keys as the database tells them, and what gateways make of it.

A safety policy comes once with any number of its tenants, and is read once for all of them.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import msgspec

from core.allowance import NOTHING_SAID, OutputPolicy, SaidRow, layered, said_by
from core.ids import KeyId, TenantId
from core.safety.policy import Assigned, Policy
from core.tenancy import KeyRecord, Tenant

# By name and version; None for one that this release does not understand.
Policies: TypeAlias = Mapping[tuple[str, int], Policy | None]


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """Keys and tenants as they are now, and the number to ask from next time."""

    keys: tuple[KeyRecord, ...]
    tenants: tuple[Tenant, ...]
    version: int


class _PolicyRow(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    version: int
    rules: list[Any]


class _Held(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    version: int
    keep_text: bool

    def assigned(self, policies: Policies) -> Assigned:
        return Assigned(
            name=self.name,
            version=self.version,
            policy=policies[self.name, self.version],
            keep_text=self.keep_text,
        )


class TenantRow(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant, with what it and its tier say of limits."""

    id: TenantId
    name: str
    salt: bytes
    said: list[SaidRow] | None
    output_policy: OutputPolicy
    overload_output_tokens: int
    weight: int
    price_book: str
    tier: str
    billed: bool
    disabled: bool
    version: int
    hard_cap_micro: int | None
    hard_capped: bool
    models: tuple[str, ...] | None
    safety: _Held | None = None  # where it was asked for

    def tenant(self, policies: Policies | None = None) -> Tenant:
        """With what it holds of these policies."""
        said = self.said or []
        by_model = layered(said_by(said, "tenant"), said_by(said, "tier"))
        whole = by_model.pop("")
        return Tenant(
            id=self.id,
            name=self.name,
            salt=self.salt,
            limits=whole.limits,
            bounds=whole.bounds,
            key_allowance=said_by(said, "tier_key").get("", NOTHING_SAID),
            model_allowances=by_model,
            output_policy=self.output_policy,
            overload_output_tokens=self.overload_output_tokens,
            weight=self.weight,
            hard_cap_micro=self.hard_cap_micro,
            price_book=self.price_book,
            tier=self.tier,
            billed=self.billed,
            hard_capped=self.hard_capped,
            models=self.models,
            safety=None if self.safety is None else self.safety.assigned(policies or {}),
            disabled=self.disabled,
            version=self.version,
        )


class _KeyRow(msgspec.Struct, frozen=True, kw_only=True):
    id: KeyId
    tenant_id: TenantId
    name: str
    revoked: bool
    hard_capped: bool
    said: list[SaidRow] | None
    models: tuple[str, ...] | None
    version: int

    def key(self) -> KeyRecord:
        """As gateways cache it."""
        by_model = said_by(self.said or [], "key")
        return KeyRecord(
            id=self.id,
            tenant_id=self.tenant_id,
            name=self.name,
            revoked=self.revoked,
            hard_capped=self.hard_capped,
            allowance=by_model.pop("", NOTHING_SAID),
            model_allowances=by_model,
            models=self.models,
            version=self.version,
        )


class FoundRow(msgspec.Struct, frozen=True, kw_only=True):
    """A key and its tenant, read at once."""

    key: _KeyRow
    tenant: TenantRow
    policies: list[_PolicyRow] | None

    def found(self) -> tuple[KeyRecord, Tenant]:
        """As gateways cache them."""
        return self.key.key(), self.tenant.tenant(_read(self.policies or ()))


class ChangedRow(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that changed, in one row, in order of version."""

    version: int
    keys: list[_KeyRow] | None
    tenants: list[TenantRow] | None
    policies: list[_PolicyRow] | None

    def changes(self) -> Changes:
        """As gateways cache them."""
        policies = _read(self.policies or ())
        return Changes(
            keys=tuple(row.key() for row in self.keys or ()),
            tenants=tuple(row.tenant(policies) for row in self.tenants or ()),
            version=self.version,
        )


def _read(rows: Iterable[_PolicyRow]) -> Policies:
    return {(row.name, row.version): _readable(row.rules) for row in rows}


def _readable(rules: list[Any]) -> Policy | None:
    """One tenant's policy that we do not understand must not keep us from reading the others'."""
    try:
        return msgspec.convert({"rules": rules}, Policy)
    except msgspec.ValidationError:
        return None
