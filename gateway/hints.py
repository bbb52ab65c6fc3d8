"""What a caller's headers say of where its request belongs: pure.

x-headworks-conversation: <name>          requests of one name stay with one target
x-headworks-tags: team=search, env=prod   that conditions of a route may ask for
"""

from collections.abc import Iterable, Mapping

import msgspec

from core.errors import Code, RefusedError, refuse

CONVERSATION = b"x-headworks-conversation"
TAGS = b"x-headworks-tags"
TAGS_MAX = 16
TEXT_MAX = 256


class Hints(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing, for most callers."""

    conversation: str | None = None
    tags: Mapping[str, str] = {}


NO_HINTS = Hints()


def hints_of(
    headers: Iterable[tuple[bytes, bytes]], metadata: Mapping[str, str] | None = None
) -> Hints:
    """The body's `metadata` are tags too; a header's come before them. Raises RefusedError."""
    conversation, tags = None, dict(metadata or {})
    for name, value in headers:
        if name == CONVERSATION:
            conversation = _text(name, value)
        elif name == TAGS:
            tags |= _tags(_text(name, value, longest=TAGS_MAX * 2 * TEXT_MAX))
    if conversation is None and not tags:
        return NO_HINTS
    return Hints(conversation=conversation, tags=tags)


def _tags(text: str) -> dict[str, str]:
    tags: dict[str, str] = {}
    for part in text.split(","):
        tag, equals, value = map(str.strip, part.partition("="))
        if not (tag and equals) or max(len(tag), len(value)) > TEXT_MAX or tag in tags:
            raise _refused(TAGS, "a list of different names, each with `=` and a value")
        tags[tag] = value
    if len(tags) > TAGS_MAX:
        raise _refused(TAGS, f"a list of at most {TAGS_MAX} tags")
    return tags


def _text(name: bytes, value: bytes, *, longest: int = TEXT_MAX) -> str:
    text = value.decode("latin-1").strip()
    if not text or len(text) > longest or not text.isprintable():
        raise _refused(name, f"a text of 1 to {longest} printable characters")
    return text


def _refused(name: bytes, expected: str) -> RefusedError:
    header = name.decode()
    return refuse(Code.BAD_REQUEST, f"{header} is not {expected}.", param=header)
