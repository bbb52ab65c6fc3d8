"""A replica as far as `GET /load` goes: a test writes its word, and may make it fall silent."""

import json
from asyncio import StreamReader, StreamWriter
from typing import Any, Self

from core import internal_token
from tests.support.raw_server import RawServer, read_request


class LoadServer:
    """`load` is what it answers; `status` and `garbage` are how it misbehaves."""

    def __init__(self, secret: str, boot_id: str = "boot_1") -> None:
        self._secret = secret.encode()
        self._raw = RawServer(self._answer)
        self.load: dict[str, Any] = {
            "boot_id": boot_id,
            "seq": 1,
            "kv_blocks_total": 64,
            "kv_blocks_free": 64,
            "running": 0,
            "waiting": 0,
            "placed_seq": 0,
            "state": "ready",
            "integrity": True,
            "journal_unacked": 0,
        }
        self.status = 200
        self.garbage = b""
        self.silent = False
        self.asked = 0

    @property
    def url(self) -> str:
        return self._raw.url

    async def __aenter__(self) -> Self:
        await self._raw.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._raw.__aexit__(*exc)

    async def _answer(self, reader: StreamReader, writer: StreamWriter) -> None:
        while True:
            head, _ = await read_request(reader)
            self.asked += 1
            if self.silent:
                await reader.read()  # until the caller gives up
                return
            status = self.status if self._authorised(head) else 401
            body = self.garbage or json.dumps(self.load).encode()
            writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(body)))
            writer.write(body)

    def _authorised(self, head: bytes) -> bool:
        assert head.startswith(b"GET /load ")
        token = head.partition(b"uthorization: Bearer ")[2].partition(b"\r\n")[0].decode()
        return internal_token.verify(self._secret, token, audience="worker", now_ms=0) is not None
