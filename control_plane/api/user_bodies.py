"""A user as the API shows one: never the hash, only whether there is a password."""

import msgspec

from store.users import Source, User


class UserBody(msgspec.Struct, frozen=True, kw_only=True):
    """`invited`: an invitation waits to be taken.

    `failures` in a row at signing in; before `locked_until_ms` no further try is let in.
    """

    id: str
    email: str
    name: str
    roles: tuple[str, ...]
    source: Source
    disabled: bool
    has_password: bool
    invited: bool
    failures: int
    locked_until_ms: int
    created_ms: int
    signed_in_ms: int | None
    version: int


def user_body(user: User) -> UserBody:
    """As the API shows it."""
    shown = {
        name: getattr(user, name) for name in UserBody.__struct_fields__ if name != "has_password"
    }
    return UserBody(**shown, has_password=user.password is not None)
