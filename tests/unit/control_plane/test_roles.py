"""What roles may do, and that nobody hands out more than they have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.access.caller import ADMIN, token_scope, user_permissions
from control_plane.access.roles import (
    CALLS,
    EVERYTHING,
    NEVER_A_TOKENS,
    ROLES,
    Permission,
    Role,
    may_give,
    needed,
    permissions_of,
    token_permissions,
)

some_permissions = st.frozensets(st.sampled_from(Permission))
some_roles = st.frozensets(st.sampled_from(Role))


def test_a_call_that_the_table_does_not_name_needs_what_nobody_has():
    assert needed("GET", "/admin/tenants") is Permission.READ
    assert needed("PUT", "/admin/tenants") is None
    assert needed("GET", "/admin/tenants/ten_1") is None
    assert needed("get", "/admin/tenants") is None


def test_every_permission_is_an_admins_and_some_calls():
    assert ROLES[Role.ADMIN] == EVERYTHING == ADMIN.permissions == frozenset(Permission)
    assert set(CALLS.values()) == set(Permission)


@pytest.mark.parametrize(
    ("role", "may_not"),
    [
        (Role.VIEWER, {p for p in Permission if p.endswith("write")} | {Permission.AUDIT_READ}),
        (Role.OPERATOR, {Permission.MONEY_WRITE, Permission.USERS_READ, Permission.USERS_WRITE}),
        (Role.BILLING, {Permission.FLEET_WRITE, Permission.TENANTS_WRITE, Permission.USERS_WRITE}),
    ],
)
def test_what_a_role_must_not_do(role, may_not):
    assert not ROLES[role] & may_not


def test_no_call_that_changes_something_is_for_who_only_looks():
    looking = {Permission.IDENTIFY, Permission.READ, Permission.MONEY_READ}
    looking |= {Permission.AUDIT_READ, Permission.USERS_READ}
    assert all(method == "GET" for (method, _), p in CALLS.items() if p in looking)


@given(some_roles, some_roles)
def test_roles_add_up(some, others):
    assert permissions_of(some | others) == permissions_of(some) | permissions_of(others)
    assert user_permissions(tuple(some)) == permissions_of(some)


@given(some_permissions, some_permissions)
def test_a_token_does_no_more_than_its_scope_and_its_owner(scope, owner):
    has = token_permissions(scope, owner)
    assert has - {Permission.IDENTIFY} <= scope & owner
    assert not has & NEVER_A_TOKENS
    assert Permission.IDENTIFY in has


@given(some_roles, some_roles)
def test_nobody_gives_more_than_they_have(own, given_roles):
    if may_give(permissions_of(own), given_roles):
        assert permissions_of(own | given_roles) == permissions_of(own)
    else:
        assert permissions_of(own | given_roles) != permissions_of(own)


def test_a_scope_of_a_newer_release_is_read_without_what_is_unknown():
    assert token_scope(("read", "moon.write")) == {Permission.READ}
    assert ADMIN.may(Permission.USERS_WRITE)
