"""Roles, permissions, and which permission each call of the admin API needs.

    role ──► permissions ◄── token (a part of its owner's)
                 ▲
          (method, path template)

A call that the table does not name is closed to everybody, whatever they hold: a new endpoint
works when somebody has decided who may use it.
"""

from collections.abc import Iterable
from enum import StrEnum


class Permission(StrEnum):
    """What a call needs. One for each kind of harm, not one for each call."""

    IDENTIFY = "identify"  # who am I: every credential may
    SELF = "self"  # one's own password, sessions and tokens: people, never tokens
    READ = "read"  # everything but people, money and what happened
    MONEY_READ = "money.read"
    AUDIT_READ = "audit.read"
    USERS_READ = "users.read"
    TENANTS_WRITE = "tenants.write"  # tenants, their keys, limits and policies
    MONEY_WRITE = "money.write"  # accounts, caps, corrections, prices
    MODELS_WRITE = "models.write"
    FLEET_WRITE = "fleet.write"  # deployments, rollouts, scaling, replicas
    ROUTES_WRITE = "routes.write"
    PROVIDERS_WRITE = "providers.write"
    BOOKS_WRITE = "books.write"  # closing differences, sums made anew
    USERS_WRITE = "users.write"


class Role(StrEnum):
    """What a person is. A user may have several; their permissions add up."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    BILLING = "billing"
    ADMIN = "admin"


EVERYTHING = frozenset(Permission)
_LOOK = frozenset({Permission.IDENTIFY, Permission.SELF, Permission.READ, Permission.MONEY_READ})

ROLES: dict[Role, frozenset[Permission]] = {
    Role.VIEWER: _LOOK,
    Role.OPERATOR: _LOOK
    | {
        Permission.AUDIT_READ,
        Permission.TENANTS_WRITE,
        Permission.MODELS_WRITE,
        Permission.FLEET_WRITE,
        Permission.ROUTES_WRITE,
        Permission.PROVIDERS_WRITE,
        Permission.BOOKS_WRITE,
    },
    Role.BILLING: _LOOK | {Permission.AUDIT_READ, Permission.MONEY_WRITE, Permission.BOOKS_WRITE},
    Role.ADMIN: EVERYTHING,
}

# A token that could make tokens would outlive its own end.
NEVER_A_TOKENS = frozenset({Permission.SELF})
# Of a token that is revoked or expired nothing is left; of any other, at least this.
ALWAYS_A_TOKENS = frozenset({Permission.IDENTIFY})

_CALLS: dict[Permission, tuple[str, ...]] = {
    Permission.IDENTIFY: ("GET /admin/me",),
    Permission.SELF: (
        "POST /admin/logout",
        "POST /admin/me/password",
        "GET /admin/sessions",
        "DELETE /admin/sessions/{session}",
        "GET /admin/tokens",
        "POST /admin/tokens",
        "DELETE /admin/tokens/{token}",
    ),
    Permission.READ: (
        "GET /admin/check",
        "GET /admin/deployments",
        "GET /admin/deployments/{name}",
        "GET /admin/keys/{key}/limits",
        "GET /admin/models",
        "GET /admin/models/{version}",
        "GET /admin/providers",
        "GET /admin/providers/{name}",
        "GET /admin/pulse",
        "GET /admin/reconciliation",
        "GET /admin/replicas",
        "GET /admin/replicas/{replica}",
        "GET /admin/rollouts",
        "GET /admin/rollouts/{name}",
        "GET /admin/rollouts/{name}/events",
        "GET /admin/routes",
        "GET /admin/routes/{model}",
        "GET /admin/safety-hits",
        "GET /admin/safety-policies",
        "GET /admin/safety-policies/{name}",
        "GET /admin/scaling-decisions",
        "GET /admin/scaling-policies",
        "GET /admin/scaling-policies/{target}",
        "GET /admin/tenants",
        "GET /admin/tenants/{tenant}",
        "GET /admin/tenants/{tenant}/answer-cache",
        "GET /admin/tenants/{tenant}/keys",
        "GET /admin/tenants/{tenant}/limits",
        "GET /admin/tenants/{tenant}/models",
        "GET /admin/tenants/{tenant}/responses",
        "GET /admin/tenants/{tenant}/safety",
        "GET /admin/tiers/{tier}/limits",
    ),
    Permission.MONEY_READ: (
        "GET /admin/keys/{key}/caps",
        "GET /admin/price-books",
        "GET /admin/prices",
        "GET /admin/tenants/{tenant}/account",
        "GET /admin/tenants/{tenant}/caps",
        "GET /admin/tenants/{tenant}/entries",
        "GET /admin/usage",
        "GET /admin/usage/totals",
    ),
    Permission.AUDIT_READ: ("GET /admin/audit-log",),
    Permission.USERS_READ: ("GET /admin/users", "GET /admin/users/{user}"),
    Permission.TENANTS_WRITE: (
        "POST /admin/tenants",
        "PATCH /admin/tenants/{tenant}",
        "PUT /admin/tenants/{tenant}/answer-cache",
        "DELETE /admin/tenants/{tenant}/answer-cache",
        "POST /admin/tenants/{tenant}/keys",
        "PUT /admin/tenants/{tenant}/limits",
        "PUT /admin/tenants/{tenant}/models",
        "DELETE /admin/tenants/{tenant}/models",
        "PUT /admin/tenants/{tenant}/responses",
        "PUT /admin/tenants/{tenant}/safety",
        "DELETE /admin/tenants/{tenant}/safety",
        "DELETE /admin/keys/{key}",
        "PUT /admin/keys/{key}/limits",
        "PUT /admin/keys/{key}/models",
        "DELETE /admin/keys/{key}/models",
        "PUT /admin/safety-policies/{name}",
        "PUT /admin/tiers/{tier}/limits",
    ),
    Permission.MONEY_WRITE: (
        "PUT /admin/keys/{key}/caps/{period}",
        "DELETE /admin/keys/{key}/caps/{period}",
        "POST /admin/price-books",
        "POST /admin/prices",
        "PUT /admin/tenants/{tenant}/account",
        "PUT /admin/tenants/{tenant}/caps/{period}",
        "DELETE /admin/tenants/{tenant}/caps/{period}",
        "POST /admin/tenants/{tenant}/adjustments",
        "POST /admin/tenants/{tenant}/credits",
        "POST /admin/tenants/{tenant}/refunds",
        "POST /admin/tenants/{tenant}/reprices",
    ),
    Permission.MODELS_WRITE: ("POST /admin/models", "PATCH /admin/models/{version}"),
    Permission.FLEET_WRITE: (
        "POST /admin/replicas/{replica}/drain",
        "DELETE /admin/replicas/{replica}/drain",
        "POST /admin/rollouts",
        "POST /admin/rollouts/{name}/abort",
        "POST /admin/rollouts/{name}/pause",
        "POST /admin/rollouts/{name}/promote",
        "POST /admin/rollouts/{name}/resume",
        "POST /admin/rollouts/{name}/rollback",
        "POST /admin/deployments",
        "PATCH /admin/deployments/{name}",
        "PUT /admin/scaling-policies/{target}",
        "DELETE /admin/scaling-policies/{target}",
    ),
    Permission.ROUTES_WRITE: (
        "PUT /admin/routes/{model}",
        "DELETE /admin/routes/{model}",
    ),
    Permission.PROVIDERS_WRITE: (
        "POST /admin/providers",
        "PUT /admin/providers/{name}",
        "DELETE /admin/providers/{name}",
        "POST /admin/providers/reseal",
    ),
    Permission.BOOKS_WRITE: (
        "POST /admin/reconciliation/close",
        "POST /admin/reconciliation/{difference}/close",
        "POST /admin/usage/totals/rebuild",
    ),
    Permission.USERS_WRITE: (
        "POST /admin/users",
        "PATCH /admin/users/{user}",
        "POST /admin/users/{user}/reset",
    ),
}

CALLS: dict[tuple[str, str], Permission] = {
    (method, path): permission
    for permission, calls in _CALLS.items()
    for method, _, path in (call.partition(" ") for call in calls)
}

# How one comes in; strangers may call these.
PUBLIC = frozenset(
    {
        ("GET", "/admin/login"),
        ("POST", "/admin/login"),
        ("POST", "/admin/invitations/accept"),
        ("GET", "/admin/oidc/start"),
        ("GET", "/admin/oidc/callback"),
    }
)


def needed(method: str, path_template: str) -> Permission | None:
    """What a call needs; None for one that nobody may make."""
    return CALLS.get((method, path_template))


def permissions_of(roles: Iterable[Role]) -> frozenset[Permission]:
    """All that the roles allow together."""
    return frozenset[Permission]().union(*(ROLES[role] for role in roles))


def token_permissions(
    scope: frozenset[Permission], owner: frozenset[Permission]
) -> frozenset[Permission]:
    """What a token may do: its scope, within what its owner may do at this moment."""
    return ((scope & owner) | ALWAYS_A_TOKENS) - NEVER_A_TOKENS


def may_give(own: frozenset[Permission], roles: Iterable[Role]) -> bool:
    """Whether who holds `own` may make somebody that, or change somebody who is.

    Nobody hands out more than they have: a token for users alone makes no admin.
    """
    return permissions_of(roles) <= own
