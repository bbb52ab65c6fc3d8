"""A worker process: serves streams, journals what it produced, reports to the control plane.

`worker.server`, `attempts` and `control_link` in virtual time, around the engine that is
real. Invariant: an attempt's totals are journalled before a frame that speaks of them leaves.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol, TypeVar

import msgspec

from core import fleet
from core.fleet import (
    Beat,
    BeatReply,
    Capacity,
    JournalReply,
    Register,
    Registered,
    ReplicaState,
)
from core.protocol import Failed, Finished, Frame, Generate, Load, Nack, Started, Tokens, Usage
from simulator.clock import Clock
from simulator.engine import BlockPoolType, Engine, EngineWatch, StepTimes
from simulator.journal import SYNC_INTERVAL_MS, Disk, Journal, Key
from simulator.network import Network, Stream
from simulator.tasks import Process, Promise, sleep
from worker.admission import SchedulerConfig
from worker.events import Event

R = TypeVar("R")

BEAT_INTERVAL_MS = 1_000
JOURNAL_INTERVAL_MS = 250
LOAD_INTERVAL_MS = 100
WARM_MS = 300
CALL_MS = 2_000
VERSION = "version-1"
POOL = "smol@local"


class Registry(Protocol):
    """The control plane, as workers know it."""

    def register(self, message: Register) -> Registered | None:
        """None: not now."""

    def beat(self, message: Beat) -> BeatReply | None:
        """None: not now."""

    def journal(self, message: fleet.Journal) -> JournalReply | None:
        """None: not now."""


class WorkerParts(msgspec.Struct, frozen=True, kw_only=True):
    """What every life of every worker is made with."""

    clock: Clock
    network: Network
    registry: Registry
    registry_process: Process
    config: SchedulerConfig
    told_kv_blocks: int  # what it registers; more than it has makes it decline and preempt
    pool_type: BlockPoolType
    times: StepTimes
    dice: Random
    watch: EngineWatch


class _Attempt:
    """One attempt's way from the engine to its stream."""

    def __init__(self, worker: "Worker", key: Key, stream: Stream) -> None:
        self.stream = stream
        self._worker = worker
        self._key = key
        self._usage = Usage()
        self._told_load_ms = 0

    def on_peer_gone(self) -> None:
        """Nobody listens: end it, for its tokens would be metered for nothing."""
        self._worker.engine.abort(self._key)

    def emit(self, events: Sequence[Event]) -> None:
        """Journal, then send; a load report at most so often, and before the last word."""
        frames: list[Frame] = [self._journalled(event) for event in events]
        ended = isinstance(frames[-1], Finished | Failed)
        now_ms = self._worker.clock.now_ms
        if ended:
            self._worker.forget(self._key)
        if ended or now_ms - self._told_load_ms >= LOAD_INTERVAL_MS:
            frames.insert(-1 if ended else len(frames), self._worker.load())
            self._told_load_ms = now_ms
        self.stream.send(frames, last=ended)

    def _journalled(self, event: Event) -> Event:
        journal, now_ms = self._worker.journal, self._worker.clock.now_ms
        match event:
            case Started():
                self._usage = Usage(
                    prompt_tokens=event.prompt_tokens, cached_tokens=event.cached_tokens
                )
                journal.append(self._key, self._usage, at_ms=now_ms)
            case Tokens() if event.ids:
                produced = self._usage.output_tokens + len(event.ids)
                self._usage = msgspec.structs.replace(self._usage, output_tokens=produced)
                journal.append(self._key, self._usage, at_ms=now_ms)
            case Finished():
                seq = journal.append(
                    self._key, event.usage, at_ms=now_ms, cause=event.cause, timings=event.timings
                )
                return msgspec.structs.replace(event, journal_seq=seq)
            case Failed():
                usage = event.usage if event.usage != Usage() else self._usage
                journal.append(self._key, usage, at_ms=now_ms, cause="failed")
                return msgspec.structs.replace(event, usage=usage)
            case _:
                pass
        return event


class Worker(Process):
    """One life of one replica. `disk` is its machine's."""

    def __init__(self, parts: WorkerParts, replica: str, boot_id: str, disk: Disk) -> None:
        super().__init__(parts.clock, replica)
        self.boot_id = boot_id
        self.state = ReplicaState.WARMING
        self.disk = disk
        self._left_behind = disk.left_behind(parts.clock.now_ms)
        self.journal: Journal = disk.open(boot_id)
        self.engine = Engine(
            parts.clock,
            parts.config,
            name=replica,
            boot_id=boot_id,
            pool_type=parts.pool_type,
            times=parts.times,
            dice=parts.dice,
            watch=parts.watch,
        )
        self._parts = parts
        self._attempts: dict[Key, _Attempt] = {}
        self._beat_seq = 0
        self._load_seq = 0
        self._placed_seq = 0
        self.spawn(self._live())
        self.spawn(self._deliver_for_ever())
        self.spawn(self._sync_for_ever())

    def generate(self, request: Generate, stream: Stream) -> None:
        """`POST /generate`."""
        refused = self._open(request, stream)
        if refused is not None:
            stream.send([refused, self.load()], last=True)

    def abort(self, key: Key) -> bool:
        """`POST /abort`."""
        return self.engine.abort(key)

    def load(self) -> Load:
        """The next report; its sequence number rises."""
        self._load_seq += 1
        scheduler = self.engine.scheduler
        return Load(
            boot_id=self.boot_id,
            seq=self._load_seq,
            kv_blocks_total=scheduler.pool.num_blocks,
            kv_blocks_free=self.engine.free_blocks,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            placed_seq=self._placed_seq,
        )

    def drain(self) -> bool:
        """Take nothing new from now on; false when it took nothing yet."""
        takes = self.state is ReplicaState.READY
        if takes:
            self.state = ReplicaState.DRAINING
        return takes

    def forget(self, key: Key) -> None:
        """The attempt has ended."""
        self._attempts.pop(key, None)

    def kill(self) -> None:
        """The kernel closes its connections."""
        self._die(clients_notice=True)

    def lose_power(self) -> set[Key]:
        """Nobody closes anything, and the journal's tail is gone. Returns whose."""
        self._die(clients_notice=False)
        return self.journal.lose_power()

    @property
    def told_everything(self) -> bool:
        """Whether no journal of this machine holds a word that was not taken."""
        return not self._left_behind and self.journal.unacked == 0

    def _die(self, *, clients_notice: bool) -> None:
        super().kill()
        self.engine.halt()
        for attempt in self._attempts.values():
            attempt.stream.break_off(server_notices=False, client_notices=clients_notice)

    def _open(self, request: Generate, stream: Stream) -> Nack | None:
        key = (request.request_id, request.attempt)
        if self.state is not ReplicaState.READY:
            return Nack(reason="draining")
        if request.version != VERSION:
            return Nack(reason="wrong_version")
        if key in self._attempts:
            return Nack(reason="duplicate")
        attempt = _Attempt(self, key, stream)
        refused = self.engine.submit(request, attempt.emit)
        if refused is None:
            self._attempts[key] = attempt
            stream.listener = attempt
            self._placed_seq = max(self._placed_seq, request.placement)
        return refused

    async def _live(self) -> None:
        await self._register()
        await sleep(self.clock, WARM_MS, f"{self.name} warm")
        self.state = ReplicaState.READY
        while True:
            await self._beat()
            await sleep(self.clock, BEAT_INTERVAL_MS, f"{self.name} beat")

    async def _register(self) -> None:
        config = self._parts.config
        message = Register(
            replica_id=self.name,
            boot_id=self.boot_id,
            url=self.name,
            deployment="smol",
            region="local",
            version=VERSION,
            state=self.state,
            capacity=Capacity(
                kv_blocks=self._parts.told_kv_blocks,
                block_tokens=config.block_tokens,
                context_tokens=config.context_tokens,
                sequences=config.max_sequences,
            ),
        )
        while await self._call("register", lambda: self._parts.registry.register(message)) is None:
            await sleep(self.clock, JOURNAL_INTERVAL_MS, f"{self.name} register again")

    async def _beat(self) -> None:
        self._beat_seq += 1
        load = self.load()
        beat = Beat(
            replica_id=self.name,
            boot_id=self.boot_id,
            seq=self._beat_seq,
            state=self.state,
            kv_blocks_free=load.kv_blocks_free,
            running=load.running,
            waiting=load.waiting,
            steps=self.engine.steps,
        )
        reply = await self._call("beat", lambda: self._parts.registry.beat(beat))
        if reply is not None and not reply.known:
            await self._register()

    async def _deliver_for_ever(self) -> None:
        while True:
            await sleep(self.clock, JOURNAL_INTERVAL_MS, f"{self.name} journal")
            await self._deliver_left_behind()
            entries = self.journal.batch()
            if entries and await self._send(self.boot_id, entries):
                self.journal.acknowledge(entries)

    async def _deliver_left_behind(self) -> None:
        for left in list(self._left_behind):
            if left.entries and not await self._send(left.boot_id, left.entries):
                return
            self._left_behind.remove(left)
            self.disk.remove(left.boot_id)

    async def _send(self, boot_id: str, entries: tuple[fleet.JournalEntry, ...]) -> bool:
        message = fleet.Journal(replica_id=self.name, boot_id=boot_id, entries=entries)
        reply = await self._call("journal", lambda: self._parts.registry.journal(message))
        return reply is not None

    async def _sync_for_ever(self) -> None:
        while True:
            await sleep(self.clock, SYNC_INTERVAL_MS, f"{self.name} sync")
            self.journal.sync()

    def _call(self, name: str, handle: Callable[[], R]) -> Promise[R | None]:
        return self._parts.network.call(
            self, self._parts.registry_process, name, handle, timeout_ms=CALL_MS
        )
