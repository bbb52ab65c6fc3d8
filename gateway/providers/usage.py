"""Usage as providers tell it, made into ours whatever they count where.

    OpenAI      prompt_tokens holds the cached, completion_tokens the reasoning
    Anthropic   input_tokens holds neither the cached nor the written: they stand beside it

Servers that speak a dialect do not all add up as its owner does: some leave reasoning out of
`completion_tokens` and in `total_tokens`, some tell parts larger than their wholes. What is
told is never dropped for that: parts are cut to their wholes, so that the sum can be billed.
"""

from typing import TypeVar

import msgspec

from core.protocol import Usage

UNTOLD = msgspec.Raw(b"null")
Told = TypeVar("Told", bound=msgspec.Struct)

_MOST = 2**53 - 1


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class OpenAIUsage(msgspec.Struct):
    """The `usage` of a chat answer. Unknown fields are passed over."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None
    prompt_cache_hit_tokens: int | None = None  # DeepSeek's name for cached tokens


class _CacheCreation(msgspec.Struct):
    ephemeral_5m_input_tokens: int | None = None
    ephemeral_1h_input_tokens: int | None = None


class _OutputDetails(msgspec.Struct):
    thinking_tokens: int | None = None


class AnthropicUsage(msgspec.Struct):
    """The `usage` of a message. In a stream later ones say only what has changed."""

    input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_creation: _CacheCreation | None = None
    output_tokens: int | None = None
    output_tokens_details: _OutputDetails | None = None


def read_openai(raw: msgspec.Raw) -> Usage | None:
    """What it comes to; None where nothing is told, or nothing that we can read."""
    told = _read(raw, OpenAIUsage)
    return None if told is None else from_openai(told)


def read_anthropic(raw: msgspec.Raw) -> AnthropicUsage:
    """As far as it can be read: what cannot is as if it were not told."""
    return _read(raw, AnthropicUsage) or AnthropicUsage()


def from_openai(told: OpenAIUsage) -> Usage:
    """What it comes to."""
    prompt, output = _count(told.prompt_tokens), _count(told.completion_tokens)
    details = told.completion_tokens_details or _CompletionDetails()
    reasoning = _count(details.reasoning_tokens)
    if told.total_tokens is not None:
        # Tokens in the total alone were produced and not shown.
        output = max(output, _count(told.total_tokens) - prompt)
    if reasoning > output:
        output += reasoning
    parts = told.prompt_tokens_details or _PromptDetails()
    hits = parts.cached_tokens if parts.cached_tokens is not None else told.prompt_cache_hit_tokens
    cached = min(_count(hits), prompt)
    return Usage(
        prompt_tokens=prompt,
        cached_tokens=cached,
        cache_write_5m_tokens=min(_count(parts.cache_write_tokens), prompt - cached),
        output_tokens=output,
        reasoning_tokens=reasoning,
    )


def from_anthropic(told: AnthropicUsage) -> Usage:
    """What it comes to."""
    cached = _count(told.cache_read_input_tokens)
    by_cache = told.cache_creation or _CacheCreation()
    write_1h = _count(by_cache.ephemeral_1h_input_tokens)
    write_5m = _count(by_cache.ephemeral_5m_input_tokens)
    # What is not told by cache went to the one that everybody has.
    write_5m = max(write_5m, _count(told.cache_creation_input_tokens) - write_1h)
    output = _count(told.output_tokens)
    details = told.output_tokens_details or _OutputDetails()
    return Usage(
        prompt_tokens=_count(told.input_tokens) + cached + write_5m + write_1h,
        cached_tokens=cached,
        cache_write_5m_tokens=write_5m,
        cache_write_1h_tokens=write_1h,
        output_tokens=output,
        reasoning_tokens=min(_count(details.thinking_tokens), output),
    )


def later(before: AnthropicUsage, told: AnthropicUsage) -> AnthropicUsage:
    """`before`, with what has been told since."""
    news = {
        field: value
        for field in before.__struct_fields__
        if (value := getattr(told, field)) is not None
    }
    return msgspec.structs.replace(before, **news)


def _read(raw: msgspec.Raw, kind: type[Told]) -> Told | None:
    try:
        # Some write counts as 7.0 or "7": an answer is not broken for that.
        return msgspec.json.decode(raw, type=kind | None, strict=False)
    except (msgspec.MsgspecError, RecursionError):
        return None


def _count(told: int | None) -> int:
    return min(max(told or 0, 0), _MOST)
