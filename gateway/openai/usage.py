"""Usage as OpenAI tells it: cached and written tokens within the prompt, reasoning within the rest.

    prompt_tokens      fresh + cached_tokens + cache_write_tokens
    completion_tokens  shown + reasoning_tokens

Which cache took what is told in `cache_write_tokens_details`; without it, the one that keeps
tokens for 5 minutes did. Cache writes are left out where there are none.
"""

from copy import deepcopy
from typing import Any

from core.protocol import Usage
from gateway.bill import Bill, bill_json
from gateway.fields import Fields, bad


def from_usage(usage: Usage, bill: Bill | None = None) -> dict[str, Any]:
    """The `usage` of an answer."""
    prompt: dict[str, Any] = {"cached_tokens": usage.cached_tokens}
    if usage.cache_write_tokens:
        prompt["cache_write_tokens"] = usage.cache_write_tokens
        prompt["cache_write_tokens_details"] = {
            "ttl_5m_tokens": usage.cache_write_5m_tokens,
            "ttl_1h_tokens": usage.cache_write_1h_tokens,
        }
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": prompt,
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        **bill_json(bill),
    }


def to_usage(body: object) -> Usage:
    """What a `usage` says. Raises RefusedError, naming the field that cannot be true."""
    fields = Fields(deepcopy(body), "usage", index="[{}]")
    prompt, output = (
        fields.required_count("prompt_tokens"),
        fields.required_count("completion_tokens"),
    )
    total = fields.count("total_tokens")
    if total not in {None, prompt + output}:
        raise bad(fields.at("total_tokens"), f"{prompt} and {output} are not {total}")
    cached, write_5m, write_1h = _prompt_parts(fields.nested("prompt_tokens_details"))
    if cached + write_5m + write_1h > prompt:
        raise bad(fields.at("prompt_tokens_details"), f"its parts are over {prompt} tokens")
    reasoning = _reasoning(fields.nested("completion_tokens_details"))
    if reasoning > output:
        raise bad(fields.at("completion_tokens_details"), f"its parts are over {output} tokens")
    return Usage(
        prompt_tokens=prompt,
        cached_tokens=cached,
        cache_write_5m_tokens=write_5m,
        cache_write_1h_tokens=write_1h,
        output_tokens=output,
        reasoning_tokens=reasoning,
    )


def _prompt_parts(details: Fields | None) -> tuple[int, int, int]:
    """Cached, written for 5 minutes, written for an hour."""
    if details is None:
        return 0, 0, 0
    cached = details.count("cached_tokens") or 0
    written = details.count("cache_write_tokens")
    by_cache = details.nested("cache_write_tokens_details")
    if by_cache is None:
        return cached, written or 0, 0
    write_5m = by_cache.count("ttl_5m_tokens") or 0
    write_1h = by_cache.count("ttl_1h_tokens") or 0
    if written not in {None, write_5m + write_1h}:
        raise bad(details.at("cache_write_tokens"), f"{write_5m} and {write_1h} are not {written}")
    return cached, write_5m, write_1h


def _reasoning(details: Fields | None) -> int:
    return 0 if details is None else details.count("reasoning_tokens") or 0
