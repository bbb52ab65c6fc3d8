"""Who is calling: an API key becomes a tenant, from a cache that knows its own age.

A key that cannot be one is refused without a look-up. Cached rows are confirmed or replaced
by each `poll`; with Postgres away they serve at most `stale_s`, and a key not cached gets
503. Invariant: a revoked key is refused from the first poll after its revocation on.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from core.errors import Code, RefusedError, refuse
from core.tenancy import KeyRecord, Tenant, key_digest, well_formed

Headers = Iterable[tuple[bytes, bytes]]

_INVALID = refuse(Code.INVALID_KEY, "The API key provided is unknown or revoked.").refusal


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """A caller whose key is good."""

    key: KeyRecord
    tenant: Tenant

    @property
    def hard_capped(self) -> bool:
        """Whether anything it spends is under a hard limit: the account's, or this key's."""
        return self.tenant.hard_capped or self.key.hard_capped


class TenancyChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Rows changed since a cursor, as they are now, and the next cursor."""

    keys: tuple[KeyRecord, ...]
    tenants: tuple[Tenant, ...]
    cursor: int


class KeySource(Protocol):
    """Where keys are kept. Either method raises SourceAwayError when it cannot be reached."""

    async def key_by_digest(self, digest: bytes) -> tuple[KeyRecord, Tenant] | None:
        """The key and its tenant, revoked and disabled ones included."""

    async def changes(self, cursor: int | None) -> TenancyChanges:
        """What changed after `cursor`; None asks only where the present is."""


class SourceAwayError(Exception):
    """Postgres cannot be reached within its bound."""


class AuthLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the cache."""

    entries_max: int = 10_000
    unknown_s: float = 2.0  # how long a key stays unknown
    stale_s: float = 900.0  # how long rows serve without being confirmed
    lookups_max: int = 256  # look-ups under way; further ones get 503


class _Entry(msgspec.Struct):
    identity: Identity | None
    read_s: float


class Authenticator:
    """The cache of keys and tenants. `clock_s` is monotonic."""

    def __init__(
        self,
        *,
        source: KeySource,
        pepper: bytes,
        limits: AuthLimits,
        clock_s: Callable[[], float],
    ) -> None:
        self._source = source
        self._pepper = pepper
        self._limits = limits
        self._clock_s = clock_s
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._lookups: dict[bytes, asyncio.Task[Identity | None]] = {}
        self._cursor: int | None = None
        self._confirmed_s = float("-inf")
        self._changed: dict[str, int] = {}  # versions polled while a look-up was under way

    async def authenticate(self, headers: Headers) -> Identity:
        """Raises RefusedError: 401 for a bad key, 403 for a disabled tenant, 503 if unsure."""
        digest = key_digest(self._pepper, _key_text(headers))
        entry = self._entries.get(digest)
        if entry is None or not self._fresh(entry):
            return _allowed(await self._look_up(digest))
        self._entries.move_to_end(digest)
        return _allowed(entry.identity)

    async def again(self, headers: Headers) -> Identity:
        """As `authenticate`, from Postgres: what was cached turned out to be stale."""
        digest = key_digest(self._pepper, _key_text(headers))
        self._entries.pop(digest, None)
        return _allowed(await self._look_up(digest))

    async def poll(self) -> None:
        """Replace what changed and confirm the rest. Raises SourceAwayError."""
        began_s = self._clock_s()
        changes = await self._source.changes(self._cursor)
        self._cursor = changes.cursor
        self._confirmed_s = began_s
        if changes.keys or changes.tenants:
            self._replace(changes)

    @property
    def confirmed_ago_s(self) -> float:
        """Age of the last poll that succeeded."""
        return self._clock_s() - self._confirmed_s

    def _fresh(self, entry: _Entry) -> bool:
        now_s = self._clock_s()
        if entry.identity is None:
            return now_s - entry.read_s < self._limits.unknown_s
        # Until the first poll a row's own age counts; after it, the last confirmation.
        return now_s - max(entry.read_s, self._confirmed_s) < self._limits.stale_s

    async def _look_up(self, digest: bytes) -> Identity | None:
        lookup = self._lookups.get(digest)
        if lookup is None:
            if len(self._lookups) >= self._limits.lookups_max:
                raise refuse(Code.UNAVAILABLE, "Too many unknown API keys are being looked up.")
            lookup = asyncio.create_task(self._read(digest))
            self._lookups[digest] = lookup
            lookup.add_done_callback(lambda _: self._looked_up(digest))
        try:
            # Shielded: callers share it, and one that leaves must not take it from the others.
            return await asyncio.shield(lookup)
        except SourceAwayError as error:
            raise refuse(
                Code.UNAVAILABLE, "API keys cannot be checked at the moment. Please retry."
            ) from error

    def _looked_up(self, digest: bytes) -> None:
        del self._lookups[digest]
        if not self._lookups:
            self._changed.clear()

    async def _read(self, digest: bytes) -> Identity | None:
        # As old as the question: the answer may be long on its way.
        asked_s = self._clock_s()
        found = await self._source.key_by_digest(digest)
        identity = Identity(key=found[0], tenant=found[1]) if found is not None else None
        if self._is_current(identity):
            self._keep(digest, _Entry(identity, asked_s))
        return identity

    def _is_current(self, identity: Identity | None) -> bool:
        """Whether no change polled during the look-up is newer than what it read."""
        if identity is None:
            return not self._changed  # one of those may be this key, being made
        key, tenant = identity.key, identity.tenant
        return (
            self._changed.get(key.id, 0) <= key.version
            and self._changed.get(tenant.id, 0) <= tenant.version
        )

    def _keep(self, digest: bytes, entry: _Entry) -> None:
        self._entries[digest] = entry
        self._entries.move_to_end(digest)
        while len(self._entries) > self._limits.entries_max:
            self._entries.popitem(last=False)

    def _replace(self, changes: TenancyChanges) -> None:
        keys = {key.id: key for key in changes.keys}
        tenants = {tenant.id: tenant for tenant in changes.tenants}
        if self._lookups:
            self._changed |= {key.id: key.version for key in changes.keys}
            self._changed |= {tenant.id: tenant.version for tenant in changes.tenants}
        for digest, entry in list(self._entries.items()):
            if entry.identity is None:
                del self._entries[digest]  # it may be one of the new ones
                continue
            key, tenant = entry.identity.key, entry.identity.tenant
            entry.identity = Identity(
                key=keys.get(key.id, key), tenant=tenants.get(tenant.id, tenant)
            )


def _key_text(headers: Headers) -> str:
    """The first well-formed key of `Authorization: Bearer` and `x-api-key`."""
    offered = list(_offered(headers))
    for text in offered:
        if well_formed(text):
            return text
    if offered:
        raise refuse(Code.INVALID_KEY, "The API key provided is not a valid key.")
    raise refuse(
        Code.INVALID_KEY,
        "No API key was provided: send it as `Authorization: Bearer <key>` or `x-api-key: <key>`.",
    )


def _offered(headers: Headers) -> Iterable[str]:
    for name, value in headers:
        text = value.decode("latin-1").strip()
        if name == b"authorization":
            scheme, _, credential = text.partition(" ")
            if scheme.lower() == "bearer" and credential:
                yield credential.strip()
        elif name == b"x-api-key" and text:
            yield text


def _allowed(identity: Identity | None) -> Identity:
    if identity is None or identity.key.revoked:
        raise RefusedError(_INVALID)
    if identity.tenant.disabled:
        raise refuse(Code.FORBIDDEN, "This account is disabled.")
    return identity
