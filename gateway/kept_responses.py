"""Responses kept for their tenants: to be read again, and to be continued from.

They are sealed with the first key of the ring, where there is one. On connections of their own:
however often they are read, the gateway's own look-ups have theirs. With Postgres away nothing
is kept, and the answer says so; what is asked for then is 503, never another tenant's or none.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import msgspec

from core.errors import Code, RefusedError, refuse
from core.secrets import NONCE_BYTES, CannotOpenError, KeyRing, Sealed
from gateway.images import Image
from gateway.items import CallItem, Item, MessageItem, ReasoningItem
from store.postgres import Connection, Postgres, StoreAwayError
from store.responses import (
    KeptResponse,
    NewResponse,
    delete_response,
    keep_response,
    response_by_id,
    response_chain,
)

_log = logging.getLogger(__name__)

Result = TypeVar("Result")
NAMES = "previous_response_id"


class KeepingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of what is kept, and of waiting for it."""

    kept_s: int
    bytes_max: int = 8 * 1024 * 1024  # of one response with its input, and of a conversation
    inline_bytes: int = 64 * 1024  # up to here a thread costs more than it saves
    count_max: int = 1_000  # responses of one conversation
    write_s: float = 2.0  # for which a finished answer may wait
    waiting_max: int = 64  # reads and writes at a time; further ones get 503, or are not kept


class KeptBody(msgspec.Struct, frozen=True, kw_only=True):
    """What a row holds: the response as it was told, and the items of both sides."""

    response: msgspec.Raw
    input: tuple[Item, ...]
    output: tuple[Item, ...]


class KeptResponses:
    """`new_nonce` is random bytes, so many."""

    def __init__(
        self,
        postgres: Postgres,
        ring: KeyRing,
        limits: KeepingLimits,
        new_nonce: Callable[[int], bytes],
    ) -> None:
        self._postgres = postgres
        self._ring = ring
        self._limits = limits
        self._new_nonce = new_nonce
        self._waiting = 0

    async def keep(
        self, tenant_id: str, response_id: str, previous_id: str | None, body: KeptBody
    ) -> bool:
        """Whether it can be asked for from now on. Never raises: the answer is there, and paid."""
        size = len(bytes(body.response)) + _size(body.input) + _size(body.output)
        if size > self._limits.bytes_max or self._waiting >= self._limits.waiting_max:
            return False

        async def write(conn: Connection) -> bool:
            return await keep_response(conn, new)

        try:
            async with asyncio.timeout(self._limits.write_s):
                new = await self._worked(
                    size, lambda: self._new(tenant_id, response_id, previous_id, body)
                )
                return await self._bounded(self._write(write))
        except Exception as error:  # noqa: BLE001 - whatever it is, the answer is still told
            facts = {"response": response_id, "error": repr(error)}
            _log.warning("a response could not be kept", extra={"facts": facts})
            return False

    async def holds(self, tenant_id: str, response_id: str) -> bool:
        """Whether it can be asked for; no, where that cannot be told. Never raises."""
        try:
            await self.find(tenant_id, response_id)
        except RefusedError:
            return False
        return True

    async def items(self, tenant_id: str, response_id: str) -> tuple[Item, ...]:
        """All that was said up to this response, it included. Raises RefusedError."""
        limits = self._limits

        async def read(conn: Connection) -> list[KeptResponse]:
            return await response_chain(
                conn,
                tenant_id,
                response_id,
                count_max=limits.count_max,
                bytes_max=limits.bytes_max,
            )

        rows = await self._asked(self._read(read))
        if not rows:
            raise _none(response_id, NAMES)
        self._check(rows[-1])
        bodies = await self._worked(
            rows[-1].so_far, lambda: [self._body(row) for row in reversed(rows)]
        )
        return tuple(item for body in bodies for item in (*body.input, *body.output))

    async def find(self, tenant_id: str, response_id: str) -> KeptBody:
        """Raises RefusedError."""

        async def read(conn: Connection) -> KeptResponse | None:
            return await response_by_id(conn, tenant_id, response_id)

        row = await self._asked(self._read(read))
        if row is None:
            raise _none(response_id, "response_id")
        return await self._worked(row.bytes, lambda: self._body(row))

    async def delete(self, tenant_id: str, response_id: str) -> None:
        """Raises RefusedError."""

        async def delete(conn: Connection) -> bool:
            return await delete_response(conn, tenant_id, response_id)

        if not await self._asked(self._write(delete)):
            raise _none(response_id, "response_id")

    def _check(self, oldest: KeptResponse) -> None:
        """Whether the conversation is all there."""
        if oldest.so_far > self._limits.bytes_max:
            message = f"{NAMES}: the conversation is larger than {self._limits.bytes_max} bytes"
            raise refuse(Code.CONTEXT_LENGTH, message, param=NAMES)
        if oldest.previous_id is None:
            return
        if oldest.place >= self._limits.count_max:
            message = f"{NAMES}: the conversation has over {self._limits.count_max} responses"
            raise refuse(Code.CONTEXT_LENGTH, message, param=NAMES)
        raise _none(oldest.previous_id, NAMES)  # deleted, or past its time

    def _new(
        self, tenant_id: str, response_id: str, previous_id: str | None, body: KeptBody
    ) -> NewResponse:
        encoded = msgspec.json.encode(body)
        key_id, nonce, stored = "", b"", encoded
        if self._ring.sealing_id is not None:
            sealed = self._ring.seal(
                encoded.decode(),
                context=_context(tenant_id, response_id),
                nonce=self._new_nonce(NONCE_BYTES),
            )
            key_id, nonce, stored = sealed.key_id, sealed.nonce, sealed.sealed
        return NewResponse(
            id=response_id,
            tenant_id=tenant_id,
            previous_id=previous_id,
            kept_s=self._limits.kept_s,
            key_id=key_id,
            nonce=nonce,
            body=stored,
            bytes=len(encoded),
        )

    def _body(self, row: KeptResponse) -> KeptBody:
        text: str | bytes = row.body
        if row.key_id:
            sealed = Sealed(key_id=row.key_id, nonce=row.nonce, sealed=row.body)
            try:
                text = self._ring.open(sealed, context=_context(row.tenant_id, row.id))
            except CannotOpenError as error:
                _log.error("a kept response cannot be opened", extra={"facts": {"id": row.id}})
                raise _none(row.id, NAMES) from error
        return msgspec.json.decode(text, type=KeptBody)

    # Waiting.

    async def _worked(self, size: int, work: Callable[[], Result]) -> Result:
        """What takes long by its size is done where no token waits for it."""
        if size <= self._limits.inline_bytes:
            return work()
        return await asyncio.to_thread(work)

    async def _asked(self, work: Awaitable[Result]) -> Result:
        if self._waiting >= self._limits.waiting_max:
            raise refuse(Code.OVERLOADED, "Too many responses are being read. Please retry.")
        try:
            return await self._bounded(work)
        except StoreAwayError as error:
            message = "Kept responses cannot be read at the moment. Please retry."
            raise refuse(Code.UNAVAILABLE, message) from error

    async def _bounded(self, work: Awaitable[Result]) -> Result:
        self._waiting += 1
        try:
            return await work
        finally:
            self._waiting -= 1

    async def _read(self, work: Callable[[Connection], Awaitable[Result]]) -> Result:
        async with self._postgres.connection() as conn:
            return await work(conn)

    async def _write(self, work: Callable[[Connection], Awaitable[Result]]) -> Result:
        async with self._postgres.transaction() as conn:
            return await work(conn)


def _context(tenant_id: str, response_id: str) -> bytes:
    """What a sealed body is bound to: moved to another row, it does not open."""
    return f"response {tenant_id} {response_id}".encode()


def _size(items: tuple[Item, ...]) -> int:
    """In characters, about."""
    return sum(map(_item_size, items))


def _item_size(item: Item) -> int:
    match item:
        case MessageItem():
            return _parts_size(item.parts)
        case CallItem():
            return len(item.arguments)
        case ReasoningItem():
            return len(item.text) + len(item.signature) + len(item.redacted)
        case _:
            return _parts_size((item.output,) if isinstance(item.output, str) else item.output)


def _parts_size(parts: Iterable[str | Image]) -> int:
    return sum(len(p.address) if isinstance(p, Image) else len(p) for p in parts)


def _none(response_id: str, param: str) -> RefusedError:
    message = f"{param}: there is no response '{response_id[:64]}', or it is no longer kept"
    return refuse(Code.NOT_FOUND, message, param=param)
