"""Usage as Anthropic tells it: cached and written tokens beside `input_tokens`, not within them.

    the prompt     input_tokens + cache_read_input_tokens + cache_creation_input_tokens
    output_tokens  shown + thinking_tokens

Which cache took what is told in `cache_creation`; without it, the one that keeps tokens for 5
minutes did. It and `output_tokens_details` are left out where they would say nothing.
"""

from copy import deepcopy
from typing import Any

from core.protocol import Usage
from gateway.bill import Bill, bill_json
from gateway.fields import Fields, bad


def from_usage(usage: Usage, bill: Bill | None = None) -> dict[str, Any]:
    """The `usage` of a message."""
    fields: dict[str, Any] = {
        "input_tokens": usage.fresh_tokens,
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
    }
    if usage.cache_write_tokens:
        fields["cache_creation"] = {
            "ephemeral_5m_input_tokens": usage.cache_write_5m_tokens,
            "ephemeral_1h_input_tokens": usage.cache_write_1h_tokens,
        }
    if usage.reasoning_tokens:
        fields["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return {**fields, **bill_json(bill)}


def to_usage(body: object) -> Usage:
    """What a `usage` says. Raises RefusedError, naming the field that cannot be true."""
    fields = Fields(deepcopy(body), "usage", index=".{}")
    fresh, output = fields.required_count("input_tokens"), fields.required_count("output_tokens")
    cached = fields.count("cache_read_input_tokens") or 0
    write_5m, write_1h = _written(fields)
    details = fields.nested("output_tokens_details")
    thinking = 0 if details is None else details.count("thinking_tokens") or 0
    if thinking > output:
        raise bad(fields.at("output_tokens_details"), f"its parts are over {output} tokens")
    return Usage(
        prompt_tokens=fresh + cached + write_5m + write_1h,
        cached_tokens=cached,
        cache_write_5m_tokens=write_5m,
        cache_write_1h_tokens=write_1h,
        output_tokens=output,
        reasoning_tokens=thinking,
    )


def _written(fields: Fields) -> tuple[int, int]:
    """For 5 minutes, for an hour."""
    written = fields.count("cache_creation_input_tokens")
    by_cache = fields.nested("cache_creation")
    if by_cache is None:
        return written or 0, 0
    write_5m = by_cache.count("ephemeral_5m_input_tokens") or 0
    write_1h = by_cache.count("ephemeral_1h_input_tokens") or 0
    if written not in {None, write_5m + write_1h}:
        problem = f"{write_5m} and {write_1h} are not {written}"
        raise bad(fields.at("cache_creation_input_tokens"), problem)
    return write_5m, write_1h
