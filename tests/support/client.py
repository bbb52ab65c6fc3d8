"""A tenant on a raw socket: reads a stream byte by byte, and can leave at any moment."""

import asyncio
import json
from urllib.parse import urlsplit

import msgspec

HEAD_END = b"\r\n\r\n"


class Reply(msgspec.Struct):
    """What came before the end, or before we left."""

    status: int = 0
    headers: dict[str, str] = {}
    body: bytes = b""
    left: bool = False  # we closed the connection ourselves
    cut: bool = False  # the server closed it before the body's end


async def ask(url, path, key, body, *, leave_after_s=None, anthropic=False) -> Reply:
    """POST and read to the end, or close the socket `leave_after_s` after sending."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    reply = Reply()
    try:
        writer.write(_request(path, parts.netloc, key, body, anthropic=anthropic))
        await writer.drain()
        await asyncio.wait_for(_read(reader, reply), leave_after_s)
    except TimeoutError:
        reply.left = True
    except (ConnectionError, asyncio.IncompleteReadError):
        reply.cut = True
    finally:
        writer.close()
    return reply


def _request(path, host, key, body, *, anthropic) -> bytes:
    payload = json.dumps(body).encode()
    auth = (
        f"x-api-key: {key}\r\nanthropic-version: 2023-06-01"
        if anthropic
        else (f"authorization: Bearer {key}")
    )
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\n{auth}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n"
        "connection: close\r\n\r\n"
    )
    return head.encode() + payload


async def _read(reader, reply) -> None:
    head = await reader.readuntil(HEAD_END)
    status, *lines = head.decode().split("\r\n")
    reply.status = int(status.split()[1])
    reply.headers = {
        name.lower(): value for line in lines if line for name, value in [line.split(": ", 1)]
    }
    if reply.headers.get("transfer-encoding") == "chunked":
        await _read_chunks(reader, reply)
    else:
        reply.body = await reader.readexactly(int(reply.headers["content-length"]))


async def _read_chunks(reader, reply) -> None:
    while True:
        size = int((await reader.readuntil(b"\r\n")).strip(), 16)
        chunk = await reader.readexactly(size + 2)
        reply.body += chunk[:-2]
        if size == 0:
            return
