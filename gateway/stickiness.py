"""Which conversation a request belongs to, so that it stays with its target: pure.

Tried in order: the caller's header, its `prompt_cache_key`, and else what a conversation
always begins with: its system prompt and its first user message. A follow-up by previous
response id carries the turns before it, so it begins as they did. What is kept anywhere is an
HMAC under the tenant's own salt: no text, and no two tenants' alike.
"""

import hashlib
import hmac
from collections.abc import Iterator

import msgspec

from gateway.conversation import Conversation

DIGEST_BYTES = 16
DRAW_BYTES = 8
TEXT_BEGINS = 1_024  # characters, or tokens, of a prompt that has no turns


class ConversationKey(msgspec.Struct, frozen=True):
    """`name` tells a binding's place, `draw` is where it lies among all draws."""

    name: str
    draw: int


def conversation_key(
    conversation: Conversation, *, salt: bytes, route: str, header: str | None = None
) -> ConversationKey:
    """Of this conversation, under one public name."""
    digest = hmac.new(salt, digestmod=hashlib.sha256)
    for part in (b"conversation", route.encode(), *_parts(conversation, header)):
        digest.update(len(part).to_bytes(8, "big") + part)
    found = digest.digest()
    return ConversationKey(found[:DIGEST_BYTES].hex(), int.from_bytes(found[-DRAW_BYTES:], "big"))


def has_begun(conversation: Conversation) -> bool:
    """Whether it has an answer already."""
    return any(turn.role == "assistant" for turn in conversation.turns)


def _parts(conversation: Conversation, header: str | None) -> Iterator[bytes]:
    if header:
        yield from (b"header", header.encode())
    elif conversation.cache_key:
        yield from (b"cache key", conversation.cache_key.encode())
    elif conversation.turns:
        yield b"turns"
        for turn in conversation.turns:
            yield turn.role.encode()
            yield turn.content.encode()
            for image in turn.images:
                yield from (b"image", image.address.encode())
            if turn.role == "user":
                return
    else:
        yield from (b"text", repr(conversation.prompt[:TEXT_BEGINS]).encode())
