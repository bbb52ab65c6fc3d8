"""A provider on a real socket that answers with recordings, or as a test says."""

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

from tests.support.provider_world import Recording, recording
from tests.support.raw_server import LAST_CHUNK, RawServer, chunk, read_request, reset

Said = tuple[int, str, bytes, bool]  # status, content type, body, whether it is cut off


def plain(name: str) -> Said:
    """A recording's answer."""
    recorded: Recording = recording(name)
    kind = recorded.headers["content-type"]
    return recorded.status, kind, recorded.body.encode(), recorded.cut


def refusal(status: int, **error: Any) -> Said:
    return status, "application/json", json.dumps({"error": error}).encode(), False


class ProviderServer(RawServer):
    """`answer` says what comes next; `hold` keeps streams open after what was said."""

    def __init__(self, answer: Callable[[dict[str, Any]], Said], *, seed: int = 1) -> None:
        super().__init__(self._answer)
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[bytes] = []
        self.holds = False
        self.left = 0  # connections that the gateway closed while an answer was held
        self._random = random.Random(seed)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head, body = await read_request(reader)
            self.heads.append(head)
            self.bodies.append(json.loads(body))
            status, kind, said, cut = self.answer(self.bodies[-1])
            lines = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked"
            writer.write(lines.encode() + b"\r\n\r\n")
            await self._in_pieces(writer, said)
            if cut:
                reset(writer)
                return
            if self.holds:
                await reader.read(1)
                self.left += 1
                return
            writer.write(LAST_CHUNK)
            await writer.drain()

    async def _in_pieces(self, writer: asyncio.StreamWriter, said: bytes) -> None:
        while said:
            size = self._random.randint(1, 400)
            writer.write(chunk(said[:size]))
            await writer.drain()
            said = said[size:]
            await asyncio.sleep(0)
