"""The part of a request that chat and legacy completions share: what to generate and how.

A seed may be any signed 64-bit integer; a negative one counts from the top, so that -1 and 1
draw differently. What else there is to drawing is `draws`.
"""

from typing import TypedDict

from core.errors import Code, refuse
from core.protocol import ServiceClass
from gateway.conversation import SEED_MODULUS, Dialect
from gateway.fields import (
    MODEL_CHARS_MAX,
    SHORT_TEXT_CHARS_MAX,
    STOP_CHARS_MAX,
    Fields,
    bad,
    read_timeout,
)
from gateway.openai.draws import Draws, read_draws

DIALECT: Dialect = "openai"
INDEX = "[{}]"  # messages[0].content
CHOICES_MAX = 8
STOPS_MAX = 4

SERVICE_CLASSES: dict[str, ServiceClass] = {
    "auto": "standard",
    "default": "standard",
    "flex": "batch",
    "fast": "interactive",
    "priority": "interactive",
}
TIERS = tuple(SERVICE_CLASSES)
# What an answer says it was served as.
SERVED_TIERS: dict[ServiceClass, str] = {
    "standard": "default",
    "batch": "flex",
    "interactive": "priority",
}
METADATA_MAX = 16
METADATA_KEY_CHARS_MAX = 64
METADATA_VALUE_CHARS_MAX = 512


class UsageWanted(TypedDict):
    """What a stream is to tell of its usage."""

    include_usage: bool
    running_usage: bool


class Generation(Draws, UsageWanted):
    """Fields of a `Conversation`, as both requests fill them."""

    model: str
    temperature: float | None
    top_p: float | None
    seed: int | None
    stop: tuple[str, ...]
    n: int
    stream: bool
    service_class: ServiceClass
    tier_asked: bool
    metadata: tuple[tuple[str, str], ...]
    user: str | None
    deadline_s: float | None


def read_generation(fields: Fields) -> Generation:
    """Take the shared fields. Raises RefusedError."""
    stream = fields.boolean("stream") or False
    tier = fields.choice("service_tier", *TIERS)
    return Generation(
        model=fields.required_text("model", chars_max=MODEL_CHARS_MAX),
        temperature=fields.number("temperature", 0, 2),
        top_p=read_top_p(fields),
        seed=_seed(fields),
        stop=fields.string_or_strings("stop", count_max=STOPS_MAX, chars_max=STOP_CHARS_MAX),
        n=fields.integer("n", 1, CHOICES_MAX) or 1,
        stream=stream,
        **_usage_wanted(fields, stream=stream),
        service_class=SERVICE_CLASSES[tier or "auto"],
        tier_asked=tier is not None,
        metadata=tuple(read_metadata(fields).items()),
        user=fields.text("user", chars_max=SHORT_TEXT_CHARS_MAX),
        deadline_s=read_timeout(fields),
        **read_draws(fields, stream=stream),
    )


def refuse_unknown(fields: Fields) -> None:
    """Refuse what nobody took: a misspelt parameter must not be silently without effect."""
    name = fields.first_left()
    if name is not None:
        path = fields.at(name)
        raise refuse(
            Code.BAD_REQUEST, f"Unrecognized request argument supplied: {path}", param=path
        )


def read_metadata(fields: Fields) -> dict[str, str]:
    """Take `metadata`: names and texts of the caller's own. Raises RefusedError."""
    value, path = fields.take("metadata"), fields.at("metadata")
    if value is None:
        return {}
    metadata = Fields(value, path, index=INDEX)
    assert isinstance(value, dict)
    if len(value) > METADATA_MAX:
        raise bad(path, f"must have at most {METADATA_MAX} keys, got {len(value)}")
    if any(len(key) > METADATA_KEY_CHARS_MAX for key in value):
        raise bad(path, f"its keys must be at most {METADATA_KEY_CHARS_MAX} characters")
    return {key: _metadata_value(metadata, key) for key in list(value)}


def _metadata_value(metadata: Fields, key: str) -> str:
    value = metadata.text(key, chars_max=METADATA_VALUE_CHARS_MAX)
    if value is None:
        raise bad(metadata.at(key), "must be a string")
    return value


def read_top_p(fields: Fields) -> float | None:
    """Take it. Raises RefusedError."""
    top_p = fields.number("top_p", 0, 1)
    if top_p == 0:
        raise bad("top_p", "must be above 0")
    return top_p


def _seed(fields: Fields) -> int | None:
    seed = fields.integer("seed", -SEED_MODULUS, SEED_MODULUS - 1)
    return None if seed is None else seed % SEED_MODULUS


def _usage_wanted(fields: Fields, *, stream: bool) -> UsageWanted:
    options = fields.nested("stream_options")
    if options is None:
        return UsageWanted(include_usage=False, running_usage=False)
    if not stream:
        raise bad("stream_options", "is only allowed when 'stream' is true")
    include_usage = options.boolean("include_usage") or False
    running = options.boolean("continuous_usage_stats") or False  # vLLM's; load generators ask
    options.neutral("include_obfuscation", (False,))
    refuse_unknown(options)
    return UsageWanted(include_usage=include_usage, running_usage=include_usage and running)
