"""Whether this control plane leads: the one that decides about rollouts and capacity.

Any number of control planes stand by. A lease lasts `LEASE_MS` by Postgres's clock and is
renewed four times in it; whoever finds it over takes it. What this process believes runs on
its own monotonic clock and ends early rather than late; what it writes, the fence decides.

    leads ── renewed ──► leads
      ├── killed, frozen, cut off ─ lease over ─► another leads; our transactions are refused
      └── shuts down ─ released ────────────────► another leads at once
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

from control_plane.metrics import Metrics
from core.ids import ENTROPY_BYTES
from store import leader
from store.leader import NotLeaderError, Term
from store.postgres import Connection, Postgres, PostgresConfig, StoreAwayError

ROLE = "decisions"
LEASE_MS = 3000
TRIES_IN_LEASE = 4
# A leader that freezes within a transaction holds others up for so long, after its lease at
# the latest: together less than ten seconds.
TRANSACTION_MS = 4000

_log = logging.getLogger(__name__)
_round: ContextVar[Term | None] = ContextVar("round", default=None)


@asynccontextmanager
async def open_leadership(
    database_url: str, application_name: str, metrics: Metrics
) -> AsyncIterator["Leadership"]:
    """Standing by, on a connection of its own: a renewal must not wait for a full pool."""
    postgres = await Postgres.open(
        PostgresConfig(
            database_url=database_url,
            application_name=application_name,
            connections_max=1,
            acquire_timeout_s=1.0,
            connect_timeout_s=1,
            statement_timeout_ms=2000,
            transaction_timeout_s=3.0,
        )
    )
    leadership = Leadership(postgres, metrics, holder=f"cp_{secrets.token_hex(ENTROPY_BYTES)}")
    leadership.start()
    try:
        yield leadership
    finally:
        await leadership.close()
        await postgres.close()


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class Leadership:
    """Renews in the background. `start` once, `close` once."""

    def __init__(
        self,
        postgres: Postgres,
        metrics: Metrics,
        *,
        holder: str,
        lease_ms: int = LEASE_MS,
        clock_ms: Callable[[], int] = _monotonic_ms,
    ) -> None:
        self.holder = holder
        self._postgres = postgres
        self._metrics = metrics
        self._lease_ms = lease_ms
        self._every_s = lease_ms / TRIES_IN_LEASE / 1000
        self._clock_ms = clock_ms
        self._term: Term | None = None
        self._until_ms = 0  # by our own clock
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def held(self) -> bool:
        """Whether we believe to lead. Good for deciding whether to try, for nothing else."""
        return self._term is not None and self._clock_ms() < self._until_ms

    @property
    def epoch(self) -> int:
        """Of the term that we lead in, 0 in none. What was learnt in another may be stale."""
        return self._term.epoch if self._term is not None and self.held else 0

    @contextmanager
    def within_term(self) -> Iterator[None]:
        """What is fenced in this block belongs to the term of now, and not to a later one."""
        token = _round.set(self._led())
        try:
            yield
        finally:
            _round.reset(token)

    async def fence(self, conn: Connection) -> None:
        """First in every transaction of a leader's job.

        Raises:
            NotLeaderError: The term in which the round began is over, or there was none.
        """
        await leader.fence(conn, _round.get() or self._led(), transaction_ms=TRANSACTION_MS)

    def start(self) -> None:
        """Stand by, and lead when nobody does."""
        assert self._task is None, "started twice"
        self._task = asyncio.create_task(self._for_ever(), name="leadership")

    async def close(self) -> None:
        """Stop, and hand over at once. The leader's jobs have ended before."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        term, self._term = self._term, None
        if term is None:
            return
        try:
            async with self._postgres.transaction() as conn:
                await leader.release(conn, term)
        except StoreAwayError:
            return  # the lease ends by itself

    async def step(self) -> None:
        """Renew, or take what is free. Raises StoreAwayError."""
        asked_ms = self._clock_ms()
        async with self._postgres.transaction() as conn:
            term = self._term
            if term is not None and not await leader.renew(conn, term, lease_ms=self._lease_ms):
                term = None
            if term is None:
                term = await leader.take(
                    conn, role=ROLE, holder=self.holder, lease_ms=self._lease_ms
                )
        # From before we asked: the lease began later.
        self._until_ms = asked_ms + self._lease_ms
        self._note(term)

    def _led(self) -> Term:
        if self._term is None or not self.held:
            raise NotLeaderError(f"{self.holder} does not lead")
        return self._term

    def _note(self, term: Term | None) -> None:
        before, self._term = self._term, term
        facts = {"holder": self.holder}
        if before is not None and term != before:
            _log.warning("leads no more", extra={"facts": {**facts, "epoch": before.epoch}})
        if term is not None and term != before:
            _log.info("leads", extra={"facts": {**facts, "epoch": term.epoch}})
        self._metrics.leads.set(int(self.held))

    async def _for_ever(self) -> None:
        # Not `while True`: a cancellation may be lost in Python 3.11 (see `background`).
        while not self._closing:
            try:
                await self.step()
            except StoreAwayError as error:
                self._metrics.leads.set(int(self.held))
                _log.info("cannot renew: %s", error)
            except Exception:  # noqa: BLE001 - this loop's end would leave this process unable ever to lead
                _log.exception("cannot renew")
            if not self._closing:
                await asyncio.sleep(self._every_s)
