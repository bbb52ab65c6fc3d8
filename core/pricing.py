"""Which price a request is charged at: the narrowest that is in force, of immutable versions.

    its tenant's book before the list    the tenant's tier before any    its class before any

A version is in force from its own moment on. Of those that have begun and fit equally well
the latest counts, so one that is still to come hides nothing.
"""

from collections.abc import Iterable

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


def resolve(
    prices: Iterable[ListedPrice],
    *,
    book: str,
    model: str,
    tier: str,
    service_class: str,
    at_ms: int,
) -> Price | None:
    """The price in force at `at_ms`. None: the model has none for these terms."""
    fitting = [
        listed
        for listed in prices
        if listed.model == model
        and listed.book in (book, LIST)
        and listed.tier in (tier, ANY)
        and listed.service_class in (service_class, ANY)
        and listed.effective_ms <= at_ms
    ]
    best = max(
        fitting,
        key=lambda listed: (
            listed.book == book,
            listed.tier == tier,
            listed.service_class == service_class,
            listed.effective_ms,
        ),
        default=None,
    )
    return None if best is None else best.price
