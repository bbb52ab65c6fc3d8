"""What must hold of the ledger's books after every word, and once all is at rest."""

from core.accounts import Account
from core.ledger import Book
from core.money import EndCause, billable, billed_micro
from core.requests import Row


class BankRules:
    """Follows the entries as they come, so that a check costs what is new."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._seen = 0
        self._reserved: dict[str, int] = {}
        self._posted: dict[str, int] = {}
        self._causes: dict[str, EndCause] = {}

    def problems(self) -> list[str]:
        """Balances are the fold of the entries, caps hold, and an end stays as it is."""
        self._fold()
        found = self._end_problems()
        for account in self._book.accounts.values():
            found += self._account_problems(account)
        return found

    def rest_problems(self) -> list[str]:
        """Nothing is reserved, and every bill is the policy applied, cut only by a hard cap."""
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
        cap = account.hard_cap_micro
        if cap is not None and account.posted_micro + account.reserved_micro > cap:
            found.append(f"{tenant}: {account.posted_micro} + {account.reserved_micro} over {cap}")
        return found

    def _bill(self, row: Row, cause: EndCause) -> int:
        usage = billable(
            cause,
            row.metered,
            accepted_tokens=row.accepted_tokens,
            max_tokens=row.asked.max_tokens * row.asked.choices,
        )
        bill = billed_micro(cause, self._book.prices[row.asked.price_id], usage)
        is_capped = self._book.accounts[row.asked.tenant_id].hard_cap_micro is not None
        if not is_capped or row.bill_limit_micro is None:
            return bill
        return min(bill, row.bill_limit_micro, row.reserved_micro)
