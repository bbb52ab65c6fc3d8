"""The content of a message: text, calls of tools, their results, and where it is to be cached.

Raises RefusedError alone, naming the block at fault.
"""

from collections.abc import Callable

import msgspec

from core.errors import Code, refuse
from gateway.conversation import CacheBreak, CacheTTL
from gateway.fields import PARTS_MAX, Fields, bad, missing
from gateway.toolbox import ToolCall, checked_id, checked_name, checked_object

CACHE_BREAKS_MAX = 4


class CacheBreaks:
    """The marks of one request, in the order of its prompt: tools, system, messages."""

    def __init__(self) -> None:
        self.found: list[CacheBreak] = []

    def read(self, fields: Fields) -> CacheTTL | None:
        """Take a block's `cache_control`."""
        control = fields.nested("cache_control")
        if control is None:
            return None
        if control.choice("type", "ephemeral") is None:
            raise missing(control.at("type"))
        ttl: CacheTTL = "1h" if control.choice("ttl", "5m", "1h") == "1h" else "5m"
        refuse_unknown(control)
        return ttl

    def add(self, fields: Fields, place: CacheBreak) -> None:
        """The mark of a block that ends at this place."""
        path = fields.at("cache_control")
        if len(self.found) == CACHE_BREAKS_MAX:
            raise bad(path, f"at most {CACHE_BREAKS_MAX} blocks may have one")
        if place.ttl == "1h" and any(before.ttl == "5m" for before in self.found):
            raise bad(path, "a ttl of '1h' must not come after one of '5m'")
        self.found.append(place)


class Result(msgspec.Struct, frozen=True):
    """Of the call `call_id`."""

    call_id: str
    content: str


class Block(msgspec.Struct, frozen=True):
    """One block of any kind; `path` is what names it: its text, its id, the id it answers.

    `ttl` is how long the prompt up to it is to be cached, if it is.
    """

    fields: Fields
    path: str
    value: str | ToolCall | Result
    ttl: CacheTTL | None


def read_blocks(fields: Fields, name: str, breaks: CacheBreaks, *kinds: str) -> list[Block]:
    """A string, or blocks of text and of these other kinds."""
    content = fields.text_or_objects(name, count_max=PARTS_MAX)
    if isinstance(content, str):
        path = fields.at(name)
        return [Block(fields, path, said(path, content), None)]
    return [_block(each, breaks, kinds) for each in content]


def said(path: str, text: str) -> str:
    """Text that says something."""
    if not text.strip():
        raise bad(path, "must hold more than white space")
    return text


def refuse_unknown(fields: Fields) -> None:
    """Refuse what nobody took."""
    name = fields.first_left()
    if name is not None:
        raise bad(fields.at(name), "Extra inputs are not permitted")


def _block(fields: Fields, breaks: CacheBreaks, kinds: tuple[str, ...]) -> Block:
    kind = fields.required_text("type")
    if kind != "text" and kind not in kinds:
        path = fields.at("type")
        allowed = " and ".join(("text", *kinds))
        raise refuse(
            Code.UNSUPPORTED, f"{path}: only {allowed} blocks are supported here", param=path
        )
    named, read = _READERS[kind]
    block = Block(fields, fields.at(named), read(fields), breaks.read(fields))
    refuse_unknown(fields)
    return block


def _text(fields: Fields) -> str:
    text = said(fields.at("text"), fields.required_text("text"))
    fields.neutral("citations", ([],))
    return text


def _call(fields: Fields) -> ToolCall:
    arguments = fields.take("input")
    if arguments is None:
        raise missing(fields.at("input"))
    fields.neutral("caller", ({"type": "direct"},))
    return ToolCall(
        id=checked_id(fields.at("id"), fields.required_text("id")),
        name=checked_name(fields.at("name"), fields.required_text("name")),
        arguments=checked_object(fields.at("input"), arguments),
    )


def _result(fields: Fields) -> Result:
    call_id = fields.required_text("tool_use_id")
    failed = fields.boolean("is_error") or False
    content = _result_text(fields)
    if failed:  # no published template has a place for it
        content = f"Error: {content}" if content else "Error"
    return Result(call_id, content)


def _result_text(fields: Fields) -> str:
    if fields.says_nothing("content", ("", [])):
        return ""
    content = fields.text_or_objects("content", count_max=PARTS_MAX)
    return content if isinstance(content, str) else "\n".join(map(_part, content))


def _part(fields: Fields) -> str:
    kind = fields.required_text("type")
    if kind != "text":
        path = fields.at("type")
        raise refuse(Code.UNSUPPORTED, f"{path}: only text blocks are supported here", param=path)
    text = fields.text("text") or ""
    fields.neutral("cache_control")
    fields.neutral("citations", ([],))
    refuse_unknown(fields)
    return text


_READERS: dict[str, tuple[str, Callable[[Fields], str | ToolCall | Result]]] = {
    "text": ("text", _text),
    "tool_use": ("id", _call),
    "tool_result": ("tool_use_id", _result),
}
