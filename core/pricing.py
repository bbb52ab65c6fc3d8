"""Which price a request is charged at: the narrowest that is in force, of immutable versions.

    its tenant's book before the list    the tenant's tier before any    its class before any

A version is in force from its own moment on. Of those that have begun and fit equally well
the latest counts, so one that is still to come hides nothing.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from itertools import product

import msgspec

from core.money import Price

LIST = "list"  # the book of everybody's prices
ANY = ""  # as a version's tier or class: whatever the request's is

# What a tenant that is not billed is charged for a model without a price.
UNPRICED = Price(id="unpriced", currency="", input_micro=0, cached_input_micro=0, output_micro=0)


class ListedPrice(msgspec.Struct, frozen=True, kw_only=True):
    """A price version, what it is for, and the Unix millisecond it starts at."""

    book: str = LIST
    model: str
    tier: str = ANY
    service_class: str = ANY
    effective_ms: int
    price: Price


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What of a tenant decides its prices."""

    book: str = LIST
    tier: str = "standard"
    billed: bool = True


class PriceTable:
    """Versions indexed by what they are for: one look-up is on the way of every request."""

    def __init__(self, prices: Iterable[ListedPrice]) -> None:
        by_scope: defaultdict[tuple[str, ...], list[ListedPrice]] = defaultdict(list)
        for listed in prices:
            scope = (listed.book, listed.model, listed.tier, listed.service_class)
            by_scope[scope].append(listed)
        self._versions = {
            scope: sorted(versions, key=_start) for scope, versions in by_scope.items()
        }

    def resolve(self, terms: Terms, model: str, *, service_class: str, at_ms: int) -> Price | None:
        """The price in force at `at_ms` for a tenant of these terms. None: there is none."""
        scopes = product((terms.book, LIST), (terms.tier, ANY), (service_class, ANY))
        for book, tier, group in scopes:
            versions = self._versions.get((book, model, tier, group), ())
            begun = bisect_right(versions, at_ms, key=_start)
            if begun:
                return versions[begun - 1].price
        return None

    def charged(self, terms: Terms, model: str, *, service_class: str, at_ms: int) -> Price | None:
        """What the tenant pays. None: it is to be billed, and so may not use the model."""
        price = self.resolve(terms, model, service_class=service_class, at_ms=at_ms)
        return UNPRICED if price is None and not terms.billed else price


def _start(listed: ListedPrice) -> int:
    return listed.effective_ms
