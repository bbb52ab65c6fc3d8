"""When an exact repeat may be answered from memory, and what makes two requests the same: pure.

A tenant's operator opts in, and each request besides (`x-headworks-cache`). The name of an answer
is a keyed hash of its tenant and of everything that the engine is told or that its answer is read
with, so that nothing that changes an answer can be forgotten: what does not is listed here, and
all the rest counts. Only an answer that the same request would get again is one: drawn greedily,
or with the caller's own seed.
"""

import hashlib
import hmac
from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

from core.errors import Code, refuse
from core.protocol import Choice, Generate, Sampling, Usage
from gateway.conversation import Conversation

HEADER = b"x-headworks-cache"
TTL_HEADER = b"x-headworks-cache-ttl-s"
TTL_S_MAX = 86_400
DIGITS_MAX = 6

Wish: TypeAlias = Literal["off", "on", "refresh"]
Charge: TypeAlias = Literal["free", "cached_input"]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What one request's headers say. `ttl_s` 0 leaves it to the tenant's policy."""

    wish: Wish = "off"
    ttl_s: int = 0


OFF = Asked()

# Of a conversation, what changes no token of its answer. Its prompt is in the message, as tokens;
# images, which are no tokens of ours, are beside it.
_TOLD_OTHERWISE = {
    "turns": (),
    "prompt": "",
    "cache_breaks": (),
    "stream": False,
    "include_usage": False,
    "service_class": "standard",
    "user": None,
    "cache_key": None,
    "ask": None,
    "deadline_s": None,
    "metadata": (),
}

_WISHES: dict[bytes, Wish] = {b"off": "off", b"on": "on", b"refresh": "refresh"}

_encode = msgspec.msgpack.Encoder(order="sorted").encode


def asked_of(headers: Iterable[tuple[bytes, bytes]]) -> Asked:
    """Raises RefusedError for a header that says nothing we know."""
    said = dict(headers)
    wish = _WISHES.get(said.get(HEADER, b"off"))
    if wish is None:
        raise _bad(HEADER, "must be 'on', 'off' or 'refresh'")
    ttl = said.get(TTL_HEADER)
    if ttl is None:
        return Asked(wish=wish)
    if not ttl.isdigit() or len(ttl) > DIGITS_MAX or not 0 < int(ttl) <= TTL_S_MAX:
        raise _bad(TTL_HEADER, f"must be from 1 to {TTL_S_MAX} seconds")
    return Asked(wish=wish, ttl_s=int(ttl))


def repeatable(conversation: Conversation, sampling: Sampling) -> bool:
    """Whether the same request would get the same answer again."""
    return sampling.temperature == 0 or conversation.seed is not None


def engine_message(
    *,
    version: str,
    prompt_ids: tuple[int, ...],
    choices: int,
    sampling: Sampling,
    salt: bytes,
) -> Generate:
    """What an engine would be told, but for what differs from one telling to the next."""
    if sampling.temperature == 0:
        sampling = msgspec.structs.replace(sampling, seed=0)  # drawn, and of no effect
    return Generate(
        request_id="",
        attempt=0,
        version=version,
        prompt_ids=prompt_ids,
        choices=tuple(Choice(index=index) for index in range(choices)),
        sampling=sampling,
        tenant_salt=salt,
    )


def name_of(secret: bytes, tenant_id: str, conversation: Conversation, message: Generate) -> bytes:
    """32 bytes. Nobody without the secret can tell whose it is, or of what."""
    read_with = msgspec.structs.replace(conversation, **_TOLD_OTHERWISE)
    return hmac.digest(
        secret, _encode((tenant_id, read_with, tuple(conversation.images), message)), hashlib.sha256
    )


def charged(charge: Charge, prompt_tokens: int) -> Usage | None:
    """What a repeat is metered as: nothing, or all of its prompt as read from a cache."""
    if charge == "free":
        return None
    return Usage(prompt_tokens=prompt_tokens, cached_tokens=prompt_tokens)


def _bad(header: bytes, why: str) -> Exception:
    name = header.decode()
    return refuse(Code.BAD_REQUEST, f"{name} {why}", param=name)
