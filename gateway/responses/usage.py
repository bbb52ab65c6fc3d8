"""Usage as the Responses API tells it: cached and written tokens within the input."""

from typing import Any

from core.protocol import Usage
from gateway.bill import Bill, bill_json


def from_usage(usage: Usage, bill: Bill | None) -> dict[str, Any]:
    """The `usage` of a response."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
        },
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        **bill_json(bill),
    }
