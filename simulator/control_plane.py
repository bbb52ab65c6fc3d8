"""The control plane: knows the fleet, takes workers' journals, sweeps for dead gateways.

Its own memory is Postgres: away together, and it may be away alone. Invariant: a journal is
acknowledged only when every entry in it is in the ledger.
"""

from random import Random

import msgspec

from core import fleet
from core.fleet import (
    Beat,
    BeatReply,
    JournalEntry,
    JournalReply,
    Register,
    Registered,
    ReplicaState,
)
from core.metering import Witness
from core.tickets import ReplicaView
from simulator.bank import Bank
from simulator.clock import Clock
from simulator.network import Network
from simulator.tasks import Process, sleep
from simulator.worker import BEAT_INTERVAL_MS, VERSION

SWEEP_INTERVAL_MS = 1_000
REPLICA_LOST_MS = 5_000
CALL_MS = 1_000


class _Replica(msgspec.Struct):
    """A row of the registry."""

    message: Register
    state: ReplicaState
    seen_ms: int
    beat_seq: int = 0


class ControlPlane(Process):
    """The service and its background jobs."""

    def __init__(self, clock: Clock, network: Network, bank: Bank, dice: Random) -> None:
        super().__init__(clock, "control plane")
        self._network = network
        self._bank = bank
        self._dice = dice
        self._replicas: dict[str, _Replica] = {}  # in Postgres
        self._boots: set[str] = set()
        self.restart()

    def restart(self) -> None:
        """Begin again; what it knows is in Postgres."""
        self.alive = True
        self.spawn(self._sweep_for_ever())

    def register(self, message: Register) -> Registered | None:
        """A replica's new life. An older life than the present one is not taken back."""
        if not self._bank.alive:
            return None
        current = self._replicas.get(message.replica_id)
        is_current = current is not None and current.message.boot_id == message.boot_id
        if is_current or message.boot_id not in self._boots:
            self._boots.add(message.boot_id)
            seq = current.beat_seq if is_current and current is not None else 0
            self._replicas[message.replica_id] = _Replica(
                message, message.state, self.clock.now_ms, seq
            )
        return Registered(beat_interval_ms=BEAT_INTERVAL_MS, journal_acked=0)

    def beat(self, message: Beat) -> BeatReply | None:
        """Stale ones prove nothing."""
        if not self._bank.alive:
            return None
        replica = self._replicas.get(message.replica_id)
        if replica is None or replica.message.boot_id != message.boot_id:
            return BeatReply(known=message.boot_id in self._boots)
        if message.seq > replica.beat_seq:
            replica.beat_seq = message.seq
            replica.state, replica.seen_ms = message.state, self.clock.now_ms
        return BeatReply(known=True)

    def journal(self, message: fleet.Journal) -> JournalReply | None:
        """Reconcile every entry, or as many as could be before something broke."""
        entries = message.entries
        if self._network.happens(self._network.weather.loss):
            entries = entries[: self._dice.randrange(len(entries) + 1)]
        if not self._bank.alive:
            return None
        for entry in entries:
            self._bank.reconcile(_witness(message.replica_id, entry))
        if len(entries) < len(message.entries):
            return None
        return JournalReply(acked=entries[-1].seq)

    def views(self) -> tuple[ReplicaView, ...]:
        """What gateways read of the fleet, straight from Postgres."""
        return tuple(
            ReplicaView(
                replica=name,
                boot_id=replica.message.boot_id,
                url=replica.message.url,
                version=VERSION,
                ready=replica.state is ReplicaState.READY,
                kv_blocks=replica.message.capacity.kv_blocks,
                sequences=replica.message.capacity.sequences,
                block_tokens=replica.message.capacity.block_tokens,
            )
            for name, replica in sorted(self._replicas.items())
        )

    async def _sweep_for_ever(self) -> None:
        while True:
            await sleep(self.clock, SWEEP_INTERVAL_MS, "control plane sweep")
            await self._network.call(
                self, self._bank, "sweep", self._bank.sweep, timeout_ms=CALL_MS
            )
            self._give_up_silent()

    def _give_up_silent(self) -> None:
        if not self._bank.alive:
            return
        for replica in self._replicas.values():
            if self.clock.now_ms - replica.seen_ms > REPLICA_LOST_MS:
                replica.state = ReplicaState.LOST


def _witness(replica_id: str, entry: JournalEntry) -> Witness:
    return Witness(
        request_id=entry.request_id,
        attempt=entry.attempt,
        source="journal",
        usage=entry.usage,
        final=entry.final,
        cause=entry.cause,
        replica_id=replica_id,
        at_ms=entry.at_ms,
    )
