"""The content of a message: text, images, thoughts, calls of tools, their results; what is cached.

Raises RefusedError alone, naming the block at fault.
"""

from collections.abc import Callable

import msgspec

from core.errors import Code, refuse
from gateway.anthropic.thinking import read_redacted, read_thought
from gateway.conversation import CacheBreak, CacheTTL
from gateway.fields import PARTS_MAX, Fields, bad, missing
from gateway.images import MEDIA_TYPES, Image, Written, image_at, image_of, written
from gateway.thinking import Thought
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
    content: Written


Value = str | Image | Thought | ToolCall | Result


class Block(msgspec.Struct, frozen=True):
    """One block of any kind; `path` names it: its text, its source, its id, the id it answers.

    `ttl` is how long the prompt up to it is to be cached, if it is.
    """

    fields: Fields
    path: str
    value: Value
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
    parts = _result_parts(fields)
    if failed:  # no published template has a place for it
        said = bool(parts) and isinstance(parts[0], str)
        parts = [f"Error: {parts[0]}", *parts[1:]] if said else ["Error", *parts]
    return Result(call_id, written(parts))


def _result_parts(fields: Fields) -> list[str | Image]:
    if fields.says_nothing("content", ("", [])):
        return []
    content = fields.text_or_objects("content", count_max=PARTS_MAX)
    return [content] if isinstance(content, str) else list(map(_part, content))


def _part(fields: Fields) -> str | Image:
    kind = fields.required_text("type")
    if kind not in {"text", "image"}:
        path = fields.at("type")
        message = f"{path}: only text and image blocks are supported here"
        raise refuse(Code.UNSUPPORTED, message, param=path)
    fields.neutral("cache_control")
    piece: str | Image
    if kind == "image":
        piece = _image(fields)
    else:
        piece = fields.text("text") or ""
        fields.neutral("citations", ([],))
    refuse_unknown(fields)
    return piece


def _image(fields: Fields) -> Image:
    fields.neutral("transformations", ({},))
    source = fields.nested("source")
    param = fields.at("source")
    if source is None:
        raise missing(param)
    kind, path = source.required_text("type"), source.at("type")
    match kind:
        case "base64":
            media_type = source.choice("media_type", *MEDIA_TYPES)
            if media_type is None:
                raise missing(source.at("media_type"))
            data = source.required_text("data")
            image = image_of(
                source.at("media_type"), source.at("data"), media_type, data, param=param
            )
        case "url":
            image = image_at(source.at("url"), source.required_text("url"), "auto", param)
            if image.data:
                raise bad(source.at("url"), "must be an https URL; a source of 'base64' holds data")
        case _:
            message = f"{path}: only 'base64' and 'url' are supported here"
            raise refuse(Code.UNSUPPORTED, message, param=path)
    refuse_unknown(source)
    return image


_READERS: dict[str, tuple[str, Callable[[Fields], Value]]] = {
    "text": ("text", _text),
    "image": ("source", _image),
    "thinking": ("thinking", read_thought),
    "redacted_thinking": ("data", read_redacted),
    "tool_use": ("id", _call),
    "tool_result": ("tool_use_id", _result),
}
