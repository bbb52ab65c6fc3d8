"""What an answer came to, and how each dialect's callers are told: in `usage` and in headers.

The dialects have no place for it: ours is the object `headworks` within `usage`, and headers of
our own. It is what the ledger will post, as far as the gateway's own word goes.
"""

from typing import Any

import msgspec

from core.protocol import Usage


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """In micro-units of a currency."""

    micro: int
    currency: str


def bill_json(bill: Bill | None) -> dict[str, Any]:
    """A field of `usage`; none where nobody knows."""
    if bill is None:
        return {}
    return {"headworks": {"cost_micro": bill.micro, "currency": bill.currency}}


def usage_headers(usage: Usage, bill: Bill | None) -> dict[str, str]:
    """Of a whole answer; a stream's headers are gone before there is any of it."""
    headers = {
        "x-headworks-prompt-tokens": str(usage.prompt_tokens),
        "x-headworks-cached-tokens": str(usage.cached_tokens),
        "x-headworks-output-tokens": str(usage.output_tokens),
    }
    if bill is not None:
        headers["x-headworks-cost-micro"] = str(bill.micro)
        headers["x-headworks-currency"] = bill.currency
    return headers
