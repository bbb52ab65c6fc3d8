"""What the operator may ask of a running worker: to sleep, to wake, to serve another version.

    POST /sleep    {"level": 1 or 2}
    POST /wake
    POST /version  {"version": hash or name, "deployment": name, or "" for the version's own}

Answered when it is done. A peer that leaves meanwhile changes nothing. Refused: 400 for what is
no such message, 404 for an unknown version, 409 for the wrong moment, 503 where it failed.
"""

import asyncio
from typing import Any, Literal, Protocol

import msgspec


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
