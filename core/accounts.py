"""Tenants' balances and the entries they are the fold of: written to, and never changed.

Invariant: an account's entries are numbered without a gap, and each tells the balances after it.
"""

from enum import StrEnum

import msgspec

from core.grants import Limit


class EntryKind(StrEnum):
    """Why an account changed."""

    RESERVE = "reserve"
    TOP_UP = "top_up"
    SETTLE = "settle"  # frees the reservation and posts a bill, up to what was reserved
    RELEASE = "release"  # frees it for nothing
    EXPIRE = "expire"  # frees it for nothing, on the sweeper's word
    OVERAGE = "overage"  # the part of a bill over its reservation, where there is no limit
    CORRECTION = "correction"  # a witness or the gateway changed a request already ended
    CREDIT = "credit"  # from here on by an operator, with a reason
    REFUND = "refund"
    ADJUSTMENT = "adjustment"
    REPRICE = "reprice"


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's balances in micro-units. `entries` numbers the last entry; 0 is none yet."""

    tenant_id: str
    hard_cap_micro: int | None  # on all that is ever posted and reserved
    prepaid: bool = False  # whether the credit is a limit too
    credit_micro: int = 0
    posted_micro: int = 0
    reserved_micro: int = 0
    entries: int = 0


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One change of one account, and its balances afterwards."""

    tenant_id: str
    seq: int  # from 1, without a gap
    request_id: str  # "" where it is about no request
    kind: EntryKind
    reserved_delta_micro: int
    posted_delta_micro: int
    credit_delta_micro: int = 0
    reserved_micro: int
    posted_micro: int
    credit_micro: int = 0
    adjustment_id: str = ""  # this and the next two: of an operator's
    reason: str = ""
    author: str = ""


class Accounts:
    """Every tenant's, and every entry in the order it was written."""

    def __init__(self) -> None:
        self.by_tenant: dict[str, Account] = {}
        self.entries: list[Entry] = []

    def open(self, tenant_id: str, hard_cap_micro: int | None) -> None:
        """Opening an account that is open changes nothing."""
        self.by_tenant.setdefault(
            tenant_id, Account(tenant_id=tenant_id, hard_cap_micro=hard_cap_micro)
        )

    def set_terms(self, tenant_id: str, *, hard_cap_micro: int | None, prepaid: bool) -> None:
        """New limits, and nothing else."""
        self.by_tenant[tenant_id] = msgspec.structs.replace(
            self.by_tenant[tenant_id], hard_cap_micro=hard_cap_micro, prepaid=prepaid
        )

    def write(
        self,
        tenant_id: str,
        kind: EntryKind,
        *,
        request_id: str,
        posted_micro: int,
        reason: str,
        reserved: int = 0,
        credit: int = 0,
        adjustment_id: str = "",
        author: str = "",
    ) -> Account:
        """Add an entry of these changes; returns the account with them."""
        account = self.by_tenant[tenant_id]
        account = msgspec.structs.replace(
            account,
            reserved_micro=account.reserved_micro + reserved,
            posted_micro=account.posted_micro + posted_micro,
            credit_micro=account.credit_micro + credit,
            entries=account.entries + 1,
        )
        self.by_tenant[tenant_id] = account
        self.entries.append(
            Entry(
                tenant_id=tenant_id,
                seq=account.entries,
                request_id=request_id,
                kind=kind,
                reserved_delta_micro=reserved,
                posted_delta_micro=posted_micro,
                credit_delta_micro=credit,
                reserved_micro=account.reserved_micro,
                posted_micro=account.posted_micro,
                credit_micro=account.credit_micro,
                adjustment_id=adjustment_id,
                reason=reason,
                author=author,
            )
        )
        return account


def account_limits(account: Account) -> list[Limit]:
    """The account's own, caps aside: its credit if it is prepaid, and its lifetime cap."""
    credit = account.credit_micro if account.prepaid else None
    return [
        Limit(
            name=name,
            cap_micro=cap,
            posted_micro=account.posted_micro,
            reserved_micro=account.reserved_micro,
        )
        for name, cap in (("credit", credit), ("account.total", account.hard_cap_micro))
        if cap is not None
    ]
