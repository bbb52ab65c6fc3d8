"""The gate before signing in: who failed too often waits, on any number of control planes.

An attempt is counted as failed before the password is looked at, in a transaction of its own,
and forgiven when it was right. A thousand at once get no more tries than one after the other.
"""

import ipaddress
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from control_plane.access.credentials import slot
from control_plane.access.lockout import Attempts, Patience, begun, forgiven, wait_ms
from core.errors import Code, Refusal, RefusedError
from store import attempts
from store.attempts import AttemptRow
from store.postgres import Connection, Postgres

# What strangers write (emails that are nobody's, addresses) shares so many places: the table
# grows no further, and as nobody can aim at a place, few ever share one by chance.
SLOTS = 65_536
_V6_PREFIX = 64  # what one customer of a network has to itself


class Attempt(msgspec.Struct, frozen=True):
    """One that was let in: the names under which it is counted as failed."""

    names: tuple[str, ...]
    locked_ms: int  # what the next one of them would wait


class Gate:
    """Counts by user and by address, each with its own patience."""

    def __init__(
        self, postgres: Postgres, *, pepper: bytes, user: Patience, address: Patience
    ) -> None:
        self._postgres = postgres
        self._pepper = pepper
        self._user = user
        self._address = address

    def names(self, *, user_id: str | None, email: str, address: str) -> tuple[str, ...]:
        """What an attempt counts under. An unknown email waits as a known one would."""
        where = self._slot("address", network(address))
        who = f"user:{user_id}" if user_id is not None else self._slot("nobody", email)
        return (where, who)

    def address_name(self, address: str) -> tuple[str, ...]:
        """Of an attempt that names nobody."""
        return (self._slot("address", network(address)),)

    async def enter(self, names: tuple[str, ...]) -> Attempt:
        """Raises RefusedError: 429 with the wait."""
        async with self._postgres.transaction() as conn:
            rows = await attempts.attempts_for_change(conn, names)
            wait = max(wait_ms(_known(row), now_ms=row.now_ms) for row in rows)
            if wait:
                raise _locked(wait)
            locked = 0
            for row in rows:
                after = begun(_known(row), self._patience(row.name), now_ms=row.now_ms)
                await _write(conn, row.name, after)
                locked = max(locked, wait_ms(after, now_ms=row.now_ms))
        return Attempt(names, locked)

    async def forgive(self, conn: Connection, attempt: Attempt) -> None:
        """It was right: a user's failures are over, an address keeps those of others."""
        for row in await attempts.attempts_for_change(conn, attempt.names):
            is_user = row.name.startswith("user:")
            await _write(conn, row.name, Attempts() if is_user else forgiven(_known(row)))

    async def withdraw(self, attempt: Attempt) -> None:
        """Nothing was learnt from it: as though it had not begun."""
        async with self._postgres.transaction() as conn:
            for row in await attempts.attempts_for_change(conn, attempt.names):
                await _write(conn, row.name, forgiven(_known(row)))

    @asynccontextmanager
    async def excused(self, attempt: Attempt) -> AsyncIterator[None]:
        """Around what is refused for another reason than a wrong password: too many hashes."""
        try:
            yield
        except RefusedError:
            await self.withdraw(attempt)
            raise

    async def forget_user(self, conn: Connection, user_id: str) -> None:
        """Nobody waits for failures from before an operator's reset."""
        for row in await attempts.attempts_for_change(conn, (f"user:{user_id}",)):
            await _write(conn, row.name, Attempts())

    def _slot(self, kind: str, name: str) -> str:
        return f"{kind}:{slot(self._pepper, name, slots=SLOTS)}"

    def _patience(self, name: str) -> Patience:
        return self._address if name.startswith("address:") else self._user


def network(address: str) -> str:
    """An address, or the part of one that its owner cannot change at will."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address  # a local socket has none
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ip.ipv4_mapped or ipaddress.ip_network((ip, _V6_PREFIX), strict=False))
    return str(ip)


def _known(row: AttemptRow) -> Attempts:
    return Attempts(failures=row.failures, last_ms=row.last_ms, until_ms=row.until_ms)


async def _write(conn: Connection, name: str, now: Attempts) -> None:
    fields = msgspec.structs.asdict(now)
    await attempts.write_attempts(conn, name, **fields)


def _locked(wait: int) -> RefusedError:
    seconds = -(-wait // 1000)
    message = f"too many failed attempts to sign in: try again in {seconds} s"
    return RefusedError(Refusal(code=Code.RATE_LIMITED, message=message, retry_after_ms=wait))
