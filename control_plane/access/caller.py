"""Who makes a call, by whatever they showed, and what that lets them do."""

from typing import Literal

import msgspec

from control_plane.access.roles import EVERYTHING, Permission, Role, permissions_of

BREAK_GLASS = "admin"  # the actor of the token that the settings hold; no email reads like it

CredentialKind = Literal["admin-token", "session", "token"]


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """`actor` is what the audit log names. `credential_id` is a session's or a token's id.

    `csrf` is what a page must say beside the session's cookie; None for what is no session.
    """

    actor: str
    kind: CredentialKind
    permissions: frozenset[Permission]
    user_id: str | None = None
    credential_id: str | None = None
    csrf: str | None = None

    def may(self, permission: Permission) -> bool:
        """Whether it is among theirs."""
        return permission in self.permissions


ADMIN = Caller(actor=BREAK_GLASS, kind="admin-token", permissions=EVERYTHING)


def user_permissions(roles: tuple[str, ...]) -> frozenset[Permission]:
    """Of a user with these stored roles."""
    return permissions_of(Role(role) for role in roles)


def token_scope(permissions: tuple[str, ...]) -> frozenset[Permission]:
    """As stored. A permission that this release does not know is none."""
    known = {permission.value for permission in Permission}
    return frozenset(Permission(text) for text in permissions if text in known)
