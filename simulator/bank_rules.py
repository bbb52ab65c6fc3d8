"""What must hold of the ledger's books after every word, and once all is at rest."""

from core.ledger import Account, Book, EntryKind, Row
from core.money import EndCause, billed_micro


class BankRules:
    """Follows the entries as they come, so that a check costs what is new."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._seen = 0
        self._reserved: dict[str, int] = {}
        self._posted: dict[str, int] = {}
        self._beyond: dict[str, int] = {}  # posted beyond any reservation
        self._causes: dict[str, EndCause] = {}

    def problems(self) -> list[str]:
        """Balances are the fold of the entries, caps hold, and an end stays as it is."""
        self._fold()
        found = self._end_problems()
        for account in self._book.accounts.values():
            found += self._account_problems(account)
        return found

    def rest_problems(self) -> list[str]:
        """Nothing is reserved, and every bill is the policy applied to what was metered."""
        found = [
            f"{account.tenant_id} still has {account.reserved_micro} reserved"
            for account in self._book.accounts.values()
            if account.reserved_micro
        ]
        for request_id, row in self._book.rows.items():
            if row.cause is not None and row.billed_micro != self._bill(row, row.cause):
                found.append(f"{request_id} was billed {row.billed_micro}")
        return found

    def _fold(self) -> None:
        for entry in self._book.entries[self._seen :]:
            tenant = entry.tenant_id
            self._reserved[tenant] = self._reserved.get(tenant, 0) + entry.reserved_delta_micro
            self._posted[tenant] = self._posted.get(tenant, 0) + entry.posted_delta_micro
            if entry.kind in {EntryKind.OVERAGE, EntryKind.CORRECTION}:
                beyond = self._beyond.get(tenant, 0) + max(0, entry.posted_delta_micro)
                self._beyond[tenant] = beyond
        self._seen = len(self._book.entries)

    def _end_problems(self) -> list[str]:
        found: list[str] = []
        for request_id, row in self._book.rows.items():
            if row.cause is None or row.provisional:
                continue
            before = self._causes.setdefault(request_id, row.cause)
            if before is not row.cause:
                found.append(f"{request_id} ended twice: {before}, {row.cause}")
        return found

    def _account_problems(self, account: Account) -> list[str]:
        tenant = account.tenant_id
        rows = [row for row in self._book.rows.values() if row.asked.tenant_id == tenant]
        held = sum(row.reserved_micro for row in rows if row.cause is None)
        billed = sum(row.billed_micro for row in rows)
        found: list[str] = []
        if not account.reserved_micro == self._reserved.get(tenant, 0) == held:
            found.append(f"{tenant}: {account.reserved_micro} reserved, open requests hold {held}")
        if not account.posted_micro == self._posted.get(tenant, 0) == billed:
            found.append(f"{tenant}: {account.posted_micro} posted, bills are {billed}")
        cap, beyond = account.hard_cap_micro, self._beyond.get(tenant, 0)
        if cap is not None and account.posted_micro + account.reserved_micro > cap + beyond:
            found.append(f"{tenant}: {account.posted_micro} + {account.reserved_micro} over {cap}")
        return found

    def _bill(self, row: Row, cause: EndCause) -> int:
        return billed_micro(cause, self._book.prices[row.asked.price_id], row.metered)
