"""Where every open request stands at one moment, and what workers' journals have said for good.

Read from outside: the journals' files, Postgres, Valkey, the spools. Journals are read on as
they grow, so that what a worker's later life deletes has been read before.
"""

from collections import Counter, defaultdict
from pathlib import Path

import msgspec
import psycopg
import redis

from core.fleet import JournalEntry
from core.protocol import Usage
from store.keys import pool_keys
from tests.support.gateway_world import POOL
from tests.support.kill_stack import WORKERS, Stack
from worker.journal import decode_records

TICKETS = pool_keys(POOL)[2]
HEAD_BYTES = 8

Attempt = tuple[str, int]

# In the order of a request's life. A request counts in the furthest that it has come to.
STEPS = (
    "none",  # nothing is open
    "asked",  # a client has sent it, and nothing is known of it
    "reserved",  # money is held, no replica asked for
    "armed",  # in the queue, or granted a replica that it has not heard of
    "placed",  # a replica is chosen, and the engine has not begun
    "prefill",  # the engine has begun, no token yet
    "streaming",
    "ended, not settled",  # the engine's last word is in its journal
    "settled, not acked",  # and the worker's journal is still to be taken
    "spooled",  # words on a gateway's disk, for when Postgres is back
)
STARTING = "victim is starting"


class Journals:
    """`newest` is the truth about every attempt that any worker of this chapter began."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._read: dict[Path, int] = {}
        self.newest: dict[Attempt, JournalEntry] = {}

    def read_on(self) -> None:
        for worker in WORKERS:
            for path in self._stack.journal(worker).glob("*.journal"):
                self._read_file(path)

    def by_request(self) -> dict[str, list[Usage]]:
        """The totals of every attempt of each request."""
        found: dict[str, list[Usage]] = defaultdict(list)
        for (request_id, _), entry in self.newest.items():
            found[request_id].append(entry.usage)
        return found

    def _read_file(self, path: Path) -> None:
        start = self._read.get(path, 0)
        try:
            with path.open("rb") as file:
                file.seek(start)
                data = file.read()
        except FileNotFoundError:
            return  # delivered, and read when its worker was killed
        records, size = _whole_records(data)
        entries = list(decode_records(data[:size]))
        assert len(entries) == records, f"{path} is damaged"
        for entry in entries:
            self.newest[entry.request_id, entry.attempt] = entry
        self._read[path] = start + size


def _whole_records(data: bytes) -> tuple[int, int]:
    """How many there are, and their bytes: the last record may be torn by a kill."""
    count = at = 0
    while at + HEAD_BYTES <= len(data):
        after = at + HEAD_BYTES + int.from_bytes(data[at : at + 4], "big")
        if after > len(data):
            break
        count, at = count + 1, after
    return count, at


class Steps:
    """Takes snapshots, each in a few milliseconds."""

    def __init__(self, stack: Stack, journals: Journals) -> None:
        self._stack = stack
        self._journals = journals
        self._valkey = redis.Redis.from_url(stack.valkey.embedded.url)
        self._postgres: psycopg.Connection | None = None
        self._told: set[Attempt] = set()

    def close(self) -> None:
        self._valkey.close()
        if self._postgres is not None:
            self._postgres.close()

    def now(self, sent: int) -> Counter[str]:
        """How many requests stand at each step, of `sent` that clients wait for."""
        self._journals.read_on()
        newest = self._journals.newest
        held, told = self._held_and_told()
        steps = dict.fromkeys(held, "reserved")
        for request_id, state in self._tickets().items():
            if request_id in held:  # the others' gateways are dead, and their leases not yet over
                steps[request_id] = "placed" if state == "placed" else "armed"
        for (request_id, attempt), entry in sorted(newest.items()):
            if request_id in held:
                steps[request_id] = _begun(entry)
            elif (request_id, attempt) not in told:
                steps[request_id] = "settled, not acked" if entry.final else "streaming"
        found = Counter(steps.values())
        waiting = sent - sum(n for step, n in found.items() if step != "settled, not acked")
        found["asked"] = max(0, waiting)
        found["spooled"] = sum(1 for _ in self._stack.spool.glob("*/*.spool"))
        return +found or Counter(none=1)

    def _held_and_told(self) -> tuple[set[str], set[Attempt]]:
        """Open reservations, and attempts whose journals Postgres has: while away, has had."""
        try:
            if self._postgres is None:
                self._postgres = psycopg.connect(self._stack.database_url, autocommit=True)
            held = self._postgres.execute("SELECT request_id FROM reservations").fetchall()
            told = self._postgres.execute(
                "SELECT request_id, attempt FROM witnesses WHERE source = 'journal' AND final"
            ).fetchall()
        except psycopg.OperationalError:
            self._postgres = None
            return set(), self._told
        self._told = {(request_id, attempt) for request_id, attempt in told}
        return {request_id for (request_id,) in held}, self._told

    def _tickets(self) -> dict[str, str]:
        """The pool's tickets and their states."""
        return {
            ticket.decode(): msgspec.msgpack.decode(value)["state"]
            for ticket, value in self._valkey.hgetall(TICKETS).items()
        }


def _begun(entry: JournalEntry) -> str:
    if entry.final:
        return "ended, not settled"
    return "streaming" if entry.usage.output_tokens else "prefill"
