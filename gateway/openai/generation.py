"""The part of a request that chat and legacy completions share: what to generate and how.

A seed may be any signed 64-bit integer; a negative one counts from the top, so that -1 and 1
draw differently. What else there is to drawing is `draws`.
"""

from core.errors import Code, refuse
from core.protocol import ServiceClass
from gateway.conversation import SEED_MODULUS, Dialect
from gateway.fields import (
    MODEL_CHARS_MAX,
    SHORT_TEXT_CHARS_MAX,
    STOP_CHARS_MAX,
    Fields,
    bad,
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
    "priority": "interactive",
}


class Generation(Draws):
    """Fields of a `Conversation`, as both requests fill them."""

    model: str
    temperature: float | None
    top_p: float | None
    seed: int | None
    stop: tuple[str, ...]
    n: int
    stream: bool
    include_usage: bool
    service_class: ServiceClass
    user: str | None


def read_generation(fields: Fields) -> Generation:
    """Take the shared fields. Raises RefusedError."""
    stream = fields.boolean("stream") or False
    return Generation(
        model=fields.required_text("model", chars_max=MODEL_CHARS_MAX),
        temperature=fields.number("temperature", 0, 2),
        top_p=_top_p(fields),
        seed=_seed(fields),
        stop=fields.string_or_strings("stop", count_max=STOPS_MAX, chars_max=STOP_CHARS_MAX),
        n=fields.integer("n", 1, CHOICES_MAX) or 1,
        stream=stream,
        include_usage=_include_usage(fields, stream=stream),
        service_class=SERVICE_CLASSES[fields.choice("service_tier", *SERVICE_CLASSES) or "auto"],
        user=fields.text("user", chars_max=SHORT_TEXT_CHARS_MAX),
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


def _top_p(fields: Fields) -> float | None:
    top_p = fields.number("top_p", 0, 1)
    if top_p == 0:
        raise bad("top_p", "must be above 0")
    return top_p


def _seed(fields: Fields) -> int | None:
    seed = fields.integer("seed", -SEED_MODULUS, SEED_MODULUS - 1)
    return None if seed is None else seed % SEED_MODULUS


def _include_usage(fields: Fields, *, stream: bool) -> bool:
    options = fields.nested("stream_options")
    if options is None:
        return False
    if not stream:
        raise bad("stream_options", "is only allowed when 'stream' is true")
    include_usage = options.boolean("include_usage") or False
    options.neutral("include_obfuscation", (False,))
    refuse_unknown(options)
    return include_usage
