"""What the operator may ask of a running worker: to sleep, to wake, to serve another version.

    POST /sleep    {"level": 1 or 2}
    POST /wake
    POST /version  {"version": hash or name, "deployment": name, or "" for the version's own}
    POST /drain    {"within_ms": until what still runs is ended, "reason": text}

A drain is answered at once, with 202: it is how a machine that is taken back says so. The others
are answered when done. A peer that leaves meanwhile changes nothing. Refused: 400 for what is no
such message, 404 for an unknown version, 409 for the wrong moment, 503 where it failed.
"""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Literal, Protocol

import msgspec

from core.protocol import ProtocolError

DRAIN_MS_MAX = 86_400_000


class ChangeError(Exception):
    """A change that was refused, or failed; the message says what holds now."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class SleepRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /sleep`."""

    level: Literal[1, 2] = 1


class VersionRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /version`."""

    version: str
    deployment: str = ""


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /drain`; null is the worker's own `drain_timeout_s`."""

    within_ms: Annotated[int, msgspec.Meta(ge=0, le=DRAIN_MS_MAX)] | None = None
    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] = "the worker was told to"


# Why, and within how many milliseconds; answers how many are left by the earliest deadline.
Drain = Callable[[str, int | None], int]


def decode_drain(body: bytes) -> DrainRequest:
    """Raises ProtocolError."""
    try:
        return msgspec.json.decode(body or b"{}", type=DrainRequest)
    except msgspec.MsgspecError as error:
        raise ProtocolError(str(error)) from error


class Changes(Protocol):
    """Each raises ChangeError."""

    async def sleep(self, level: int) -> None:
        """Give memory back and take no work."""

    async def wake(self) -> None:
        """Take it again; nothing where it does not sleep."""

    async def change_version(self, version: str, deployment: str) -> None:
        """Serve another version, as another boot."""


async def ask(changes: Changes | None, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    """The answer's status and body."""
    if changes is None:
        return 409, {"error": "this worker cannot change"}
    try:
        match path:
            case "sleep":
                change = changes.sleep(msgspec.json.decode(body or b"{}", type=SleepRequest).level)
            case "wake":
                change = changes.wake()
            case _:
                asked = msgspec.json.decode(body, type=VersionRequest)
                change = changes.change_version(asked.version, asked.deployment)
    except msgspec.MsgspecError as error:
        return 400, {"error": str(error)}
    try:
        # Half a change is none: it goes on without whoever asked.
        await asyncio.shield(asyncio.ensure_future(change))
    except ChangeError as error:
        return error.status, {"error": str(error)}
    return 200, {}
