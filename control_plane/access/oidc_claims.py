"""What an identity provider's word about somebody is worth here: who they are, which roles.

The word's signature, issuer, audience and age were checked before. An email counts only where
the provider says that it has verified it: anybody may write any address into their profile.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from control_plane.access.roles import Role

ROLES_MAX = 200  # pairs in the setting


class OidcRules(msgspec.Struct, frozen=True, kw_only=True):
    """Who gets in: `domains` empty is any; `roles` is what groups make of their members.

    Somebody new with no role of a group's stays outside.
    """

    domains: frozenset[str] = frozenset()
    groups_claim: str = "groups"
    roles: tuple[tuple[str, Role], ...] = ()


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody as their provider knows them, with the roles that their groups have here."""

    subject: str
    email: str
    name: str
    roles: tuple[Role, ...]


class ClaimsRefused(msgspec.Struct, frozen=True):
    """Why they do not get in, as a sentence."""

    reason: str


def read_roles(text: str) -> tuple[tuple[str, Role], ...]:
    """`sre=operator,finance=billing`. Raises ValueError."""
    pairs = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        group, equals, role = (part.strip() for part in entry.rpartition("="))
        if not equals or not group:
            raise ValueError(f"{entry!r} is not GROUP=ROLE")
        if role not in set(Role):
            raise ValueError(f"there is no role {role!r}")
        pairs.append((group, Role(role)))
    if len(pairs) > ROLES_MAX:
        raise ValueError(f"more than {ROLES_MAX} groups")
    return tuple(pairs)


def read_domains(text: str) -> frozenset[str]:
    """`example.com,example.org`."""
    return frozenset(part.strip().lower() for part in text.split(",") if part.strip())


def identity(claims: Mapping[str, Any], rules: OidcRules) -> Identity | ClaimsRefused:
    """Who this is. Their subject and email are told apart: the first never changes."""
    subject, email = claims.get("sub"), claims.get("email")
    if not isinstance(subject, str) or not subject:
        return ClaimsRefused("the identity provider named no subject")
    if not isinstance(email, str) or email.count("@") != 1 or not email.isprintable():
        return ClaimsRefused("the identity provider named no email address")
    if claims.get("email_verified") is not True:
        return ClaimsRefused("the identity provider has not verified the email address")
    email = email.lower()
    if rules.domains and email.partition("@")[2] not in rules.domains:
        return ClaimsRefused("addresses of this domain are not let in")
    name = claims.get("name")
    return Identity(
        subject=subject,
        email=email,
        name=name if isinstance(name, str) and name.strip() else email,
        roles=_roles(claims.get(rules.groups_claim), rules),
    )


def _roles(groups: object, rules: OidcRules) -> tuple[Role, ...]:
    """In the order of `Role`; some providers write a single group without a list."""
    theirs = {groups} if isinstance(groups, str) else set(_texts(groups))
    given = {role for group, role in rules.roles if group in theirs}
    return tuple(role for role in Role if role in given)


def _texts(groups: object) -> list[str]:
    return [g for g in groups if isinstance(g, str)] if isinstance(groups, list) else []
