"""Outside providers: servers that are not ours and speak one of our two dialects.

What the control plane stores and gateways work with. The key is sealed (`core.secrets`) and
opened by the gateway that sends it; nothing else about a provider is secret.
"""

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from core.secrets import Sealed

ProviderDialect = Literal["openai", "anthropic"]
Told = Literal["told", "drained", "estimated"]

COUNT_MAX = 1_000_000
MS_MAX = 3_600_000
URL_CHARS_MAX = 512
ANTHROPIC_VERSION = "2023-06-01"

_URL = re.compile(r"[!-~]+")

Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
Milliseconds = Annotated[int, msgspec.Meta(ge=1, le=MS_MAX)]


class ProviderSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a provider is to be treated. Limits are the fleet's; 0 is none.

    `cut_usage` is for a stream that ends early on our side: `estimate` hangs up, which ends the
    provider's work as well, and counts what came; `drain` reads on for at most `drain_ms`, to
    hear what the provider will charge.
    """

    concurrency: Count = 0
    requests_per_min: Count = 0
    failures: Annotated[int, msgspec.Meta(ge=1, le=COUNT_MAX)] = 5  # in a row open the breaker
    cooldown_ms: Milliseconds = 5_000  # of the first time, doubling
    cooldown_max_ms: Milliseconds = 120_000
    connect_ms: Milliseconds = 5_000
    idle_ms: Milliseconds = 60_000  # without a byte, before and within the answer
    cut_usage: Literal["estimate", "drain"] = "estimate"
    drain_ms: Milliseconds = 5_000
    stream: bool = True  # false: it is asked for whole answers only
    # Whether it takes what its dialect's published types leave out: what vLLM adds to OpenAI's
    # chat request; in Anthropic's, temperature, top_p and top_k.
    extensions: bool = False
    # What bounds an answer in OpenAI's dialect: older servers know only `max_tokens`.
    output_limit: Literal["max_completion_tokens", "max_tokens"] = "max_completion_tokens"
    # A server in a network of one's own that fetches what callers name can be led to what is
    # there: `data` keeps addresses from it.
    images: Literal["any", "data", "none"] = "any"


class ProviderView(msgspec.Struct, frozen=True, kw_only=True):
    """One provider. `version` rises with every change; `key` is None for one that needs none."""

    name: str
    dialect: ProviderDialect
    base_url: str = ""  # without the dialect's path: https://api.openai.com/v1
    key: Sealed | None = None
    settings: ProviderSettings = ProviderSettings()
    version: int = 0


def base_url_fault(url: str, *, allow_http: bool) -> str | None:
    """Why this cannot be a provider's address; None when it can. A slash at its end is none."""
    if len(url) > URL_CHARS_MAX or not _URL.fullmatch(url):
        return f"must be at most {URL_CHARS_MAX} printable characters of ASCII, without spaces"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        return f"is no URL: {error}"
    faults = (
        (
            parts.scheme != "https" and not (parts.scheme == "http" and allow_http),
            "must begin with https://, or with http:// where 'allow_http' is true",
        ),
        ("@" in parts.netloc, "must not hold credentials: 'key' is for them"),
        ("?" in url or "#" in url, "must end with its path"),
        (not host or port == 0, "must name a host"),
    )
    return next((why for is_fault, why in faults if is_fault), None)


def key_context(name: str, dialect: ProviderDialect, base_url: str) -> bytes:
    """What a sealed key belongs to: it opens for this provider at this address alone.

    Who can only write to the database can so not have a key sent to a server of their own.
    """
    return msgspec.json.encode(["provider", name, dialect, base_url])


def provider_replica(name: str, told: Told) -> str:
    """What stands for a replica in a settled row: who did it, and who says how much it was.

    `told` by the provider with its answer, `drained` from it after the answer was cut, or
    `estimated` by the gateway from what it had read.

    >>> provider_replica("acme", "estimated")
    'provider:acme:estimated'
    """
    return f"provider:{name}:{told}"
