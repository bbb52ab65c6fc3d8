"""What binds one request: the scopes that it counts in, and the bounds that it must keep.

    tenant               the tenant's word, else its tier's
    key:<id>             the key's word, else its tier's for keys
    model:<name>         the tenant's word on the model, else its tier's
    key:<id> model:<n>   the key's word on the model

A scope counts apart from the others, and a request counts in each of its own. Of a bound the
smallest of all four holds. Pure; names are made here and read back here.
"""

from collections.abc import Iterable

import msgspec

from core.allowance import NOTHING_SAID, UNBOUNDED, UNLIMITED, Allowance, Bounds
from core.tenancy import KeyRecord, Tenant
from core.tickets import TENANT_SCOPE, Scope


def scopes_of(tenant: Tenant, key: KeyRecord, model: str) -> tuple[Scope, ...]:
    """Those besides the tenant's own that limit anything, in the order they are told of."""
    scopes = (
        Scope(name=name, limits=allowance.limits)
        for name, allowance in _further(tenant, key, model)
    )
    return tuple(scope for scope in scopes if scope.limits != UNLIMITED)


def bounds_of(tenant: Tenant, key: KeyRecord, model: str) -> Bounds:
    """The smallest of each bound that anybody set."""
    bounds = [tenant.bounds, *(said.bounds for _, said in _further(tenant, key, model))]
    if all(bound == UNBOUNDED for bound in bounds):
        return UNBOUNDED
    return Bounds(
        prompt_tokens_max=_least(bound.prompt_tokens_max for bound in bounds),
        output_tokens_max=_least(bound.output_tokens_max for bound in bounds),
        deadline_ms_max=_least(bound.deadline_ms_max for bound in bounds),
    )


class OwnScope(msgspec.Struct, frozen=True, kw_only=True):
    """One scope of a caller's, with what is said for it; `model` "" is for all together."""

    kind: str
    model: str
    scope: Scope
    bounds: Bounds


def own_scopes(tenant: Tenant, key: KeyRecord) -> tuple[OwnScope, ...]:
    """Every scope that this key's requests may count in: the tenant's, then those that say more."""
    found = [("", Scope(name=TENANT_SCOPE, limits=tenant.limits), tenant.bounds)]
    found += [
        (model, Scope(name=name, limits=said.limits), said.bounds)
        for model in ("", *sorted({*tenant.model_allowances, *key.model_allowances}))
        for name, said in _further(tenant, key, model)
        if _is_of(name, model)
    ]
    return tuple(
        OwnScope(kind=scope_kind(scope.name), model=model, scope=scope, bounds=bounds)
        for model, scope, bounds in found
    )


def scope_words(name: str) -> tuple[str, str]:
    """Whose limits a scope has, and for what: ("Your account", " for the model `m`")."""
    key, _, model = name.partition("model:")
    whose = "This API key" if key.startswith("key:") else "Your account"
    return whose, f" for the model `{model}`" if model else ""


def scope_kind(name: str) -> str:
    """Which of the four kinds it is, without whose: tenant, key, model or key_model."""
    key, _, model = name.partition("model:")
    if key.startswith("key:"):
        return "key_model" if model else "key"
    return "model" if model else "tenant"


def _further(tenant: Tenant, key: KeyRecord, model: str) -> Iterable[tuple[str, Allowance]]:
    said = key.allowance.over(tenant.key_allowance)
    if said is not NOTHING_SAID:
        yield f"key:{key.id}", said
    of_tenant = tenant.model_allowances.get(model)
    if of_tenant is not None:
        yield f"model:{model}", of_tenant
    of_key = key.model_allowances.get(model)
    if of_key is not None:
        yield f"key:{key.id} model:{model}", of_key


def _is_of(name: str, model: str) -> bool:
    """The key's own scope is one, whatever the model."""
    return (scope_kind(name) == "key") == (model == "")


def _least(values: Iterable[int]) -> int:
    return min((value for value in values if value), default=0)
