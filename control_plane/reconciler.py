"""The reconciler: records that tell of the same requests and money, compared for ever.

A round follows each feed from where any reconciler left it, looks at what is small as a whole,
and comes back to what is open: a usage row that lacks a word of its witnesses is recounted by
the ledger, whose entry is the correction; everything else is for a person. A difference is told
once, with an alarm line and a metric. All work is in short slices, a backlog is worked off over
many rounds, and a slice that fails is done again.
"""

import logging
import time
from collections import Counter
from collections.abc import Collection, Sequence

from control_plane.services import Services
from core.reconcile import (
    ACCOUNT_KINDS,
    LOOKED_FOR,
    OVERDUE_KINDS,
    REQUEST_KINDS,
    STATE_KINDS,
    WINDOW_MS_MIN,
    Found,
    Kind,
    judge,
    next_window_ms,
)
from store import differences, reconcile
from store.differences import Told, Written
from store.postgres import Connection
from store.reconcile import Feed, Graces, Look, Slice

# At most half of the time between rounds, so that a backlog leaves Postgres to others.
DUTY = 0.5
LINES_MAX = 20  # of one kind, from one slice; the rest are counted in one more
ACCOUNTS_MAX = 50  # whose entries are verified in one slice,
ENTRIES_MAX = 4_000  # so many of each
REVISIT_MAX = 100  # in one slice: their accounts may be locked by it

_log = logging.getLogger(__name__)


class Reconciler:
    """One for each control plane; any number may run. `round` is one look."""

    def __init__(self, services: Services) -> None:
        settings = services.settings
        self.every_ms = settings.reconcile_every_ms
        self._services = services
        self._settings = settings
        self._graces = Graces(
            grace_ms=settings.reconcile_grace_ms, overdue_ms=settings.reconcile_overdue_ms
        )
        self._listens = False
        self._windows_ms = {Feed.WORDS: WINDOW_MS_MIN, Feed.OVERDUE: WINDOW_MS_MIN}

    async def round(self) -> None:
        """Raises StoreAwayError; what was committed stays, and the next round goes on from it."""
        until_s = time.monotonic() + DUTY * self.every_ms / 1000
        await self._listen()
        feeds = [Feed.WORDS, Feed.OVERDUE] if self._listens else [Feed.WORDS]
        while feeds := [feed for feed in feeds if await self._words(feed)]:
            if time.monotonic() >= until_s:
                break
        await self._names(Feed.REQUESTS)
        await self._names(Feed.ACCOUNTS)
        while await self._entries() and time.monotonic() < until_s:
            pass
        await self._states()
        while await self._revisit() and time.monotonic() < until_s:
            pass
        await self._measure()

    async def _listen(self) -> None:
        """After a pause of all control planes nothing is overdue until it has had its time."""
        async with self._services.postgres.transaction() as conn:
            self._listens = await reconcile.listen(conn, overdue_ms=self._graces.overdue_ms)

    # Slices: each is one transaction, and says whether there is more.

    async def _words(self, feed: Feed) -> bool:
        settings, limit = self._settings, self._settings.reconcile_slice
        lag_ms = (
            settings.reconcile_grace_ms if feed is Feed.WORDS else settings.reconcile_overdue_ms
        )
        window_ms, self._windows_ms[feed] = self._windows_ms[feed], WINDOW_MS_MIN
        async with self._services.postgres.transaction() as conn:
            if not await reconcile.take_turn(conn):
                return False
            done = await reconcile.next_words(
                conn, feed, window_ms=window_ms, lag_ms=lag_ms, limit=limit
            )
            written = await self._look(conn, feed, done)
        self._windows_ms[feed] = next_window_ms(
            done.span_ms, rows=len(done.subjects), rows_max=limit
        )
        self._tell(written)
        return done.more

    async def _names(self, feed: Feed) -> bool:
        async with self._services.postgres.transaction() as conn:
            if not await reconcile.take_turn(conn):
                return False
            done = await reconcile.next_names(conn, feed, limit=self._settings.reconcile_slice)
            written = await self._look(conn, feed, done)
        self._tell(written)
        return done.more

    async def _look(self, conn: Connection, feed: Feed, done: Slice) -> Written:
        if feed is Feed.ACCOUNTS:
            look = await reconcile.look_at_accounts(conn, done.subjects)
            written = await self._write(conn, ACCOUNT_KINDS, look)
        else:
            look = await reconcile.look_at_requests(conn, done.subjects, self._graces)
            written = await self._write(conn, LOOKED_FOR, look)
        await reconcile.move(conn, feed, done)
        return written

    async def _entries(self) -> bool:
        async with self._services.postgres.transaction() as conn:
            if not await reconcile.take_turn(conn):
                return False
            tenants = await reconcile.unverified(conn, limit=ACCOUNTS_MAX)
            found, more = await reconcile.verify_entries(conn, tenants, lines=ENTRIES_MAX)
            look = Look(found=found, judged=frozenset(item.subject for item in found))
            written = await self._write(conn, (Kind.CHAIN,), look)
        self._tell(written)
        return more or len(tenants) == ACCOUNTS_MAX

    async def _states(self) -> None:
        settings = self._settings
        async with self._services.postgres.transaction() as conn:
            if not await reconcile.take_turn(conn):
                return
            found = await reconcile.look_at_states(conn, request_ms_max=settings.request_ms_max)
            subjects = {item.subject for item in found}
            known = await differences.known(conn, STATE_KINDS, subjects, all_open=True)
            written = await differences.write(
                conn, judge(found, known), patience_ms=settings.spool_patience_ms
            )
            await differences.forget(conn, kept_ms=settings.difference_kept_ms)
        self._tell(written)

    async def _revisit(self) -> bool:
        """Look again at what is open; have recounted what can be."""
        async with self._services.postgres.transaction() as conn:
            if not await reconcile.take_turn(conn):
                return False
            open_ones = await differences.to_revisit(
                conn,
                REQUEST_KINDS | ACCOUNT_KINDS,
                pause_ms=self._settings.reconcile_revisit_ms,
                limit=REVISIT_MAX,
            )
            tenants = {item.subject for item in open_ones if item.kind in ACCOUNT_KINDS}
            requests = {item.subject for item in open_ones if item.kind in REQUEST_KINDS}
            look = await reconcile.look_at_accounts(conn, tenants)
            written = [await self._write(conn, ACCOUNT_KINDS, look)]
            look, corrected = await self._recounted(conn, requests)
            written.append(await self._write(conn, REQUEST_KINDS, look, corrected))
        for part in written:
            self._tell(part)
        return len(open_ones) == REVISIT_MAX

    async def _recounted(
        self, conn: Connection, request_ids: Collection[str]
    ) -> tuple[Look, frozenset[str]]:
        """What differs after all that can be has been recounted; and what that was."""
        look = await reconcile.look_at_requests(conn, request_ids, self._graces)
        uncounted = {item.subject for item in look.found if item.kind is Kind.UNCOUNTED}
        if not uncounted:
            return look, frozenset()
        wrong = await reconcile.misposted(conn, uncounted)
        right = frozenset(uncounted - wrong.keys())
        if right:
            await reconcile.recount(conn, right)
        look = await reconcile.look_at_requests(conn, request_ids, self._graces)
        found = [
            *look.found,
            *(
                Found(kind=Kind.MISPOSTED, subject=request_id, detail=reason)
                for request_id, reason in wrong.items()
            ),
        ]
        return Look(found=found, judged=look.judged), right

    async def _write(
        self,
        conn: Connection,
        kinds: Collection[Kind],
        look: Look,
        corrected: frozenset[str] = frozenset(),
    ) -> Written:
        kinds = frozenset(kinds) - (frozenset() if self._listens else OVERDUE_KINDS)
        known = await differences.known(conn, kinds, look.judged) if look.judged else []
        return await differences.write(
            conn,
            judge([item for item in look.found if item.kind in kinds], known),
            patience_ms=self._settings.spool_patience_ms,
            corrected=corrected,
        )

    # What others see.

    async def _measure(self) -> None:
        metrics = self._services.metrics
        async with self._services.postgres.connection() as conn:
            for kind, count in (await differences.open_by_kind(conn)).items():
                metrics.open_differences.labels(kind).set(count)
            for feed, lag_ms in (await reconcile.lags_ms(conn)).items():
                metrics.reconciler_lag.labels(feed).set(lag_ms / 1000)

    def _tell(self, written: Written) -> None:
        metrics = self._services.metrics
        for item in written.raised:
            metrics.differences.labels(item.kind).inc()
        metrics.corrections.inc(len(written.corrected))
        _say(logging.ERROR, "records differ", written.raised)
        _say(logging.WARNING, "a difference was corrected by a recount", written.corrected)
        _say(logging.INFO, "a difference is over", written.gone)


def _say(level: int, message: str, told: Sequence[Told]) -> None:
    """A line for each, and one for those of a kind that are too many."""
    said: Counter[Kind] = Counter()
    for item in told:
        said[item.kind] += 1
        if said[item.kind] <= LINES_MAX:
            facts = {"kind": item.kind, "subject": item.subject, "detail": item.detail}
            _log.log(level, message, extra={"facts": facts})
    for kind, count in said.items():
        if count > LINES_MAX:
            rest = {"kind": kind, "further": count - LINES_MAX}
            _log.log(level, message, extra={"facts": rest})
