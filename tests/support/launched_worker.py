"""A worker without an engine, as a process of its own: what a launcher starts in quick tests.

It registers, beats, drains and ends as the real one does, and answers as `ScriptedWorker`.
`SCRIPT_TOKENS` and `SCRIPT_GAP_S` say what it answers with, `SCRIPT_RECLAIM_MS` how long it has
after SIGTERM, and `SCRIPT_MODE` what is wrong with it:

    dies     ends at once, with 7
    mute     lives, and never registers
    stuck    says that it has work, and makes no step
"""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import httpx
import msgspec

from core import internal_token
from core.fleet import Beat, BeatReply, Capacity, Register, ReplicaState
from tests.support.scripted_worker import ScriptedWorker, answers
from worker.ending import Ending

BEAT_S = 0.1


def now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class LaunchedWorker(ScriptedWorker):
    """`life` returns when it has drained."""

    def __init__(self, environ: dict[str, str]) -> None:
        self.own = {name.removeprefix("HEADWORKS_"): value for name, value in environ.items()}
        super().__init__(self.own["INTERNAL_SECRET"].encode(), self.own["REPLICA_ID"])
        self._port = int(self.own["WORKER_PORT"])
        self.mode = environ.get("SCRIPT_MODE", "")
        self.default = answers(
            int(environ.get("SCRIPT_TOKENS", "5")), gap_s=float(environ.get("SCRIPT_GAP_S", "0"))
        )
        self.reclaim_ms = int(environ.get("SCRIPT_RECLAIM_MS", "20000"))
        self.ending = Ending()
        self.state = ReplicaState.READY
        self._seq = 0
        self._client = httpx.AsyncClient(base_url=self.own["CONTROL_PLANE_URL"], timeout=5)

    def reclaim(self) -> None:
        self.ending.ask("its machine is taken back", within_ms=self.reclaim_ms, now_ms=now_ms())

    async def life(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.reclaim)
        await self.start()
        while self.mode == "mute" and not self.ending.asked:  # noqa: ASYNC110 - until it is ended
            await asyncio.sleep(BEAT_S)
        await self._until_heard(self.register)
        while not self.ending.asked:
            await self._until_heard(self.beat)
            await asyncio.sleep(BEAT_S)
        self.state = ReplicaState.DRAINING
        while self.runs and self.ending.left_ms(now_ms()):
            await self._until_heard(self.beat)
            await asyncio.sleep(BEAT_S)
        self.state = ReplicaState.STOPPED
        await self._until_heard(self.beat)
        await self.stop()

    async def _until_heard(self, say) -> None:
        while True:
            try:
                return await say()
            except httpx.TransportError:
                await asyncio.sleep(BEAT_S)

    async def register(self) -> None:
        await self._post(
            "/fleet/register",
            Register(
                replica_id=self.replica_id,
                boot_id=self.boot_id,
                url=self.url,
                deployment=self.own["DEPLOYMENT"],
                region=self.own["REGION"],
                version=self.own["MODEL_VERSION"],
                state=self.state,
                capacity=Capacity(kv_blocks=1000, block_tokens=16, context_tokens=512, sequences=9),
                age_ms=100,
            ),
        )

    async def beat(self) -> None:
        self._seq += 1
        reason, drain_ms = self.ending.told(now_ms())
        beat = Beat(
            replica_id=self.replica_id,
            boot_id=self.boot_id,
            seq=self._seq,
            state=self.state,
            kv_blocks_free=1000,
            running=len(self.runs) + (self.mode == "stuck"),
            waiting=0,
            steps=0 if self.mode == "stuck" else self._seq,
            drain_reason=reason,
            drain_ms=drain_ms,
        )
        content = await self._post("/fleet/beat", beat)
        reply = msgspec.json.decode(content, type=BeatReply)
        if not reply.known:
            await self.register()
        if reply.drain and self.mode != "stuck":
            within_ms = 1000 if reply.drain_ms is None else reply.drain_ms
            self.ending.ask(
                "the fleet drains it", within_ms=within_ms, now_ms=now_ms(), by_fleet=True
            )

    async def _post(self, path: str, message: msgspec.Struct) -> bytes:
        token = internal_token.sign(
            self.secret,
            audience="control-plane",
            subject=self.replica_id,
            expires_ms=time.time_ns() // 1_000_000 + 60_000,
        )
        answer = await self._client.post(
            path,
            content=msgspec.json.encode(message),
            headers={"authorization": f"Bearer {token}", "content-type": "application/json"},
        )
        if answer.status_code == 409:
            sys.exit(3)
        answer.raise_for_status()
        return answer.content

    async def _abort(self, path: str, writer: asyncio.StreamWriter) -> None:
        if path != "/load":
            await super()._abort(path, writer)
            return
        told = msgspec.to_builtins(self.load())
        body = msgspec.json.encode({**told, "integrity": True, "journal_unacked": 0})
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()


if __name__ == "__main__":
    if os.environ.get("SCRIPT_MODE") == "dies":
        sys.exit(7)
    Path(os.environ["HEADWORKS_JOURNAL_DIR"]).mkdir(parents=True, exist_ok=True)
    asyncio.run(LaunchedWorker(dict(os.environ)).life())
