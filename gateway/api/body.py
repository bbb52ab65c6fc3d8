"""Reading a request's body under its bounds of size and time."""

import asyncio

from core.errors import Code, refuse
from gateway.api.responder import Receive, Scope

# Read and dropped after a body proved too large, so that a client that writes before it reads
# still hears why: a connection closed under its hands would tell it nothing.
DRAINED_BYTES_MAX = 64 * 1024 * 1024
DRAIN_S = 5.0
OVERDUE = refuse(Code.TIMEOUT, "The request's body did not arrive by the request's deadline.")


class ClientLeftError(Exception):
    """There is nobody to answer."""


async def read_body(
    scope: Scope,
    receive: Receive,
    *,
    bytes_max: int,
    within_s: float,
    patience_s: float | None = None,
) -> bytes:
    """`within_s` is our bound, `patience_s` what the caller said of the whole request.

    Raises RefusedError for a body too large or too slow, ClientLeftError.
    """
    too_large = refuse(Code.TOO_LARGE, f"The request's body is larger than {bytes_max} bytes.")
    headers = dict(scope["headers"])
    if _declared(headers) > bytes_max:
        if b"expect" not in headers:  # who asks first has not sent it
            await _drain(receive)
        raise too_large
    try:
        async with asyncio.timeout(within_s if patience_s is None else min(within_s, patience_s)):
            body = await _read(receive, bytes_max)
    except TimeoutError:
        if patience_s is not None and patience_s < within_s:
            raise OVERDUE from None
        raise refuse(Code.BAD_REQUEST, "The request's body did not arrive in time.") from None
    if body is None:
        await _drain(receive)
        raise too_large
    return body


def _declared(headers: dict[bytes, bytes]) -> int:
    text = headers.get(b"content-length", b"0")
    if not text.isdigit():
        raise refuse(Code.BAD_REQUEST, "Content-Length is not a number.")
    return int(text)


async def _read(receive: Receive, bytes_max: int) -> bytes | None:
    """None for one that is too large."""
    body, more = await _next(receive)
    if not more:
        return body if len(body) <= bytes_max else None  # the usual case, without a copy
    pieces = bytearray(body)
    while more:
        body, more = await _next(receive)
        pieces += body
        if len(pieces) > bytes_max:
            return None
    return bytes(pieces)


async def _drain(receive: Receive) -> None:
    drained, more = 0, True
    try:
        async with asyncio.timeout(DRAIN_S):
            while more and drained < DRAINED_BYTES_MAX:
                body, more = await _next(receive)
                drained += len(body)
    except TimeoutError:
        return


async def _next(receive: Receive) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientLeftError
    return message.get("body", b""), message.get("more_body", False)
