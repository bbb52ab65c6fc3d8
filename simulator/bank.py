"""Postgres as the ledger uses it: the real `core.ledger.Book`, leases, and the sweeper's rule.

Each method is one transaction. The Book forgets nothing when the service is away; only who
was heard from counts anew. Invariant: time here is the database's own.
"""

from core.ledger import Book, Expire
from core.metering import LedgerRefused, Reserve, Reserved, Settle, Settled, TopUp, Witness
from core.money import EndCause, Price
from simulator.clock import Clock
from simulator.tasks import Process

BookType = type[Book]

GRACE_MS = 5_000  # for a journal, after the lease
CONTACT_GAP_MS = 2_000  # between sweeps; after a longer one, contact starts anew

PRICE = Price(
    id="price_1",
    input_micro=1_500_000,
    cached_input_micro=300_000,
    output_micro=6_333_333,
    request_micro=3,
)


class Bank(Process):
    """The service."""

    def __init__(self, clock: Clock, book_type: BookType, lease_ms: int) -> None:
        super().__init__(clock, "postgres")
        self.book = book_type([PRICE])
        self.touched = True  # since an invariant last looked
        self.refused_words = 0
        self._lease_ms = lease_ms
        self._started_ms = clock.now_ms
        self._seen_ms: dict[str, int] = {}  # gateway: its lease was last asserted
        self._opened_ms: dict[str, int] = {}  # request: when it was reserved
        self._contact_since_ms: int | None = None
        self._contact_last_ms = 0

    def restart(self) -> None:
        """Come back with everything that was committed."""
        self.alive = True
        self._started_ms = self.clock.now_ms

    def reserve(self, asked: Reserve) -> Reserved | LedgerRefused:
        """See `Book.reserve`."""
        self.touched = True
        self._opened_ms.setdefault(asked.request_id, self.clock.now_ms)
        return self.book.reserve(asked)

    def top_up(self, more: TopUp) -> Reserved | LedgerRefused:
        """See `Book.top_up`."""
        self.touched = True
        return self.book.top_up(more)

    def settle(self, word: Settle) -> Settled | LedgerRefused:
        """See `Book.settle`."""
        self.touched = True
        answer = self.book.settle(word)
        if isinstance(answer, LedgerRefused):
            self.refused_words += 1
        return answer

    def reconcile(self, witness: Witness) -> bool:
        """See `Book.reconcile`."""
        self.touched = True
        self.book.reconcile(witness)
        return True

    def assert_lease(self, gateway: str) -> bool:
        """This incarnation is alive."""
        self._seen_ms[gateway] = self.clock.now_ms
        return True

    def sweep(self) -> list[EndCause]:
        """End what silent gateways left open, as `store.leases` does."""
        self.touched = True
        now_ms = self.clock.now_ms
        contact_ms = self._contact(now_ms)
        causes: list[EndCause] = []
        for request_id, row in list(self.book.rows.items()):
            if row.cause is not None:
                continue
            seen_ms = self._seen_ms.get(row.asked.gateway_id, self._opened_ms[request_id])
            silent_ms = now_ms - max(seen_ms, contact_ms)
            if silent_ms <= self._lease_ms:
                continue
            if silent_ms > self._lease_ms + GRACE_MS or self._journal_is_final(request_id):
                ended = self.book.expire(Expire(request_id=request_id, ended_ms=now_ms))
                assert isinstance(ended, Settled)
                causes.append(ended.cause)
        return causes

    def _contact(self, now_ms: int) -> int:
        """Since when the sweeper has heard all that gateways could say."""
        since_ms = self._contact_since_ms
        if since_ms is not None and now_ms - self._contact_last_ms > CONTACT_GAP_MS:
            since_ms = None
        if since_ms is None or since_ms < self._started_ms:
            since_ms = now_ms
        self._contact_since_ms, self._contact_last_ms = since_ms, now_ms
        return since_ms

    def _journal_is_final(self, request_id: str) -> bool:
        return any(
            heard.final
            for (request, _, source), heard in self.book.heard.items()
            if request == request_id and source == "journal"
        )
