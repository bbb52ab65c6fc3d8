"""The items of the Responses API that a conversation is made of, as they are kept.

What a caller sent and what a model answered are the same four kinds: messages, what was thought,
calls of tools and results of calls. Nothing here knows how an item is written on the wire.
"""

from typing import Literal

import msgspec

from gateway.images import Image

ItemRole = Literal["system", "developer", "user", "assistant"]


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    """What somebody said, in parts; a user's may be images. An assistant's may be cut short."""

    id: str = ""  # none yet: named when it is kept
    role: ItemRole
    parts: tuple[str | Image, ...]
    whole: bool = True


class CallItem(msgspec.Struct, frozen=True, kw_only=True, tag="call"):
    """A call of a function. `arguments` are JSON, unless the answer was cut off in them."""

    id: str = ""
    call_id: str
    name: str
    arguments: str
    whole: bool = True


class ResultItem(msgspec.Struct, frozen=True, kw_only=True, tag="result"):
    """What the call `call_id` came to: a text, or parts where some are images."""

    id: str = ""
    call_id: str
    output: str | tuple[str | Image, ...]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag="reasoning"):
    """What was thought before what follows: its text and signature, or what is sealed."""

    id: str = ""
    text: str = ""
    signature: str = ""
    redacted: str = ""
    whole: bool = True


Item = MessageItem | ReasoningItem | CallItem | ResultItem


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What a Responses request asks beyond a generation.

    `shown` are the fields that its answer repeats, ready for JSON.
    """

    items: tuple[Item, ...]
    instructions: str | None
    previous_id: str | None
    keep: bool
    again: bool = False  # an answer of before is told again: what was deleted stays so
    shorten: bool  # drop the oldest turns of a prompt that does not fit
    shown: dict[str, object]
    shows_thoughts: bool = False  # as a summary
    seals_thoughts: bool = False  # so that a caller who keeps its conversation itself has them
