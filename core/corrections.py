"""An operator's words about money: credits, refunds, adjustments and reprices of ended requests.

Each has an id, a reason and an author, and one entry. Invariants: no refund takes a request below
nothing, and none of them takes posted + reserved over a hard limit.
"""

from collections.abc import Mapping

from core.accounts import Account, Accounts, EntryKind, account_limits
from core.grants import granted_micro
from core.metering import Adjust, Adjusted, AdjustmentKind, LedgerRefused
from core.money import EndCause, Price
from core.requests import Requests, Row, due_micro
from core.spending import Spending


class Corrections:
    """All that were made, over the parts of one book."""

    def __init__(
        self,
        prices: Mapping[str, Price],
        accounts: Accounts,
        spending: Spending,
        requests: Requests,
    ) -> None:
        self._prices = prices
        self._accounts = accounts
        self._spending = spending
        self._requests = requests
        self._made: dict[str, tuple[Adjust, Adjusted]] = {}

    def adjust(self, word: Adjust) -> Adjusted | LedgerRefused:
        """Refused in this order: id_reused, no_account, then by its kind.

        A credit: too_much, where it would leave less than a prepaid account has used. A refund:
        no_request (unknown or still open), too_much. An adjustment: hard_cap. A reprice:
        no_request, no_price, hard_cap.
        """
        before = self._made.get(word.id)
        if before is not None:
            return before[1] if before[0] == word else LedgerRefused(reason="id_reused")
        account = self._accounts.by_tenant.get(word.tenant_id)
        if account is None:
            return LedgerRefused(reason="no_account")
        delta = self._adjustable(account, word)
        if isinstance(delta, LedgerRefused):
            return delta
        answer = self._enter(word, delta)
        self._made[word.id] = (word, answer)
        return answer

    def _adjustable(self, account: Account, word: Adjust) -> int | LedgerRefused:
        """What it changes, which is done already to the request it is about."""
        if word.kind is AdjustmentKind.CREDIT:
            return _credit(account, word.amount_micro)
        if word.kind is AdjustmentKind.ADJUSTMENT:
            return _adjustment(account, word.amount_micro)
        return self._correct_bill(account, word)

    def _enter(self, word: Adjust, delta: int) -> Adjusted:
        is_credit = word.kind is AdjustmentKind.CREDIT
        account = self._accounts.write(
            word.tenant_id,
            EntryKind(word.kind.value),
            request_id=word.request_id,
            credit=delta if is_credit else 0,
            posted_micro=0 if is_credit else delta,
            adjustment_id=word.id,
            reason=word.reason,
            author=word.author,
        )
        return Adjusted(
            entry=account.entries,
            delta_micro=delta,
            posted_micro=account.posted_micro,
            credit_micro=account.credit_micro,
        )

    def _correct_bill(self, account: Account, word: Adjust) -> int | LedgerRefused:
        row = self._requests.find(word.request_id, word.tenant_id)
        if row is None or row.cause is None:
            return LedgerRefused(reason="no_request")
        delta = (
            _refund(row, word.amount_micro)
            if word.kind is AdjustmentKind.REFUND
            else self._reprice(account, row, row.cause, word.price_id)
        )
        if isinstance(delta, LedgerRefused):
            return delta
        self._requests.keep(row, adjusted_micro=row.adjusted_micro + delta)
        self._spending.count(row, reserved=0, posted_micro=delta)
        return delta

    def _reprice(
        self, account: Account, row: Row, cause: EndCause, price_id: str
    ) -> int | LedgerRefused:
        price = self._prices.get(price_id)
        if price is None:
            return LedgerRefused(reason="no_price")
        delta = due_micro(row, cause, price) - row.net_micro
        limits = self._spending.limits(account, row)
        return granted_micro(limits, delta, delta) if delta > 0 else delta


def _credit(account: Account, amount: int) -> int | LedgerRefused:
    used = account.posted_micro + account.reserved_micro
    if account.prepaid and amount < 0 and account.credit_micro + amount < used:
        return LedgerRefused(
            reason="too_much",
            limit="credit",
            reserved_micro=account.reserved_micro,
            posted_micro=account.posted_micro,
            hard_cap_micro=account.credit_micro,
            fits_micro=max(0, account.credit_micro - used),
        )
    return amount


def _adjustment(account: Account, amount: int) -> int | LedgerRefused:
    return granted_micro(account_limits(account), amount, amount) if amount > 0 else amount


def _refund(row: Row, amount: int) -> int | LedgerRefused:
    if amount > row.net_micro:
        return LedgerRefused(reason="too_much", fits_micro=max(0, row.net_micro))
    return -amount
