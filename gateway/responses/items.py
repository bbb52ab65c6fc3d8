"""Input items: read from a request, told back as the API writes them, and put into turns.

Neighbouring messages, thoughts and calls of the assistant are one turn, as one answer was. Items
of tools that we do not run, and references, are refused by name. Raises RefusedError alone.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from core.errors import Code, RefusedError, refuse
from gateway.conversation import Role, Turn
from gateway.fields import MESSAGES_MAX, PARTS_MAX, Fields, bad, missing
from gateway.images import Image, image_at, written
from gateway.items import CallItem, Item, ItemRole, MessageItem, ReasoningItem, ResultItem
from gateway.openai.chat_request import read_detail
from gateway.openai.generation import refuse_unknown
from gateway.responses.reasoning import item_fields, read_item
from gateway.thinking import Thought
from gateway.toolbox import ToolCall, Unanswered, checked_id, checked_name, checked_object

CALLS_MAX = 128  # of one answer
_ROLES: dict[str, tuple[ItemRole, Role]] = {
    "system": ("system", "system"),
    "developer": ("developer", "system"),
    "user": ("user", "user"),
    "assistant": ("assistant", "assistant"),
}
_STATUSES = ("completed", "incomplete", "in_progress")


def read_items(fields: Fields) -> tuple[Item, ...]:
    """Take `input`: a string is what the user says."""
    content = fields.text_or_objects("input", count_max=MESSAGES_MAX)
    if isinstance(content, str):
        if not content:
            raise bad(fields.at("input"), "must not be empty")
        return (MessageItem(role="user", parts=(content,)),)
    return tuple(map(_item, content))


def turns_of(instructions: str | None, items: Sequence[Item]) -> tuple[Turn, ...]:
    """The conversation that they are. Each call has its result right after its turn."""
    turns: list[Turn] = []
    if instructions:
        turns.append(Turn(role="system", content=instructions))
    unanswered = Unanswered()
    joins = False  # whether more of the assistant's belongs to the last turn
    for item in items:
        if _is_silent(item):
            continue
        said = _is_of_assistant(item)
        joins = joins and said
        if not joins and not isinstance(item, ResultItem):
            unanswered.settled("input")
        turn = _turn(item, unanswered)
        if joins:
            turns[-1] = _joined(turns[-1], turn)
        else:
            turns.append(turn)
        joins = said
    unanswered.settled("input")
    return tuple(turns)


def item_json(item: Item, *, shown: bool = True, sealed: bool = True) -> dict[str, Any]:
    """As the API tells it. Of a thought only what is to be `shown`, or told `sealed`."""
    match item:
        case ReasoningItem():
            return {
                "id": item.id,
                "type": "reasoning",
                "status": status_of(whole=item.whole),
                **item_fields(item, shown=shown, sealed=sealed),
            }
        case MessageItem():
            assistant = item.role == "assistant"
            kind = "output_text" if assistant else "input_text"
            more: dict[str, Any] = {"annotations": [], "logprobs": []} if assistant else {}
            return {
                "id": item.id,
                "type": "message",
                "status": status_of(whole=item.whole),
                "role": item.role,
                "content": [_part_json(part, kind, more) for part in item.parts],
            }
        case CallItem():
            return {
                "id": item.id,
                "type": "function_call",
                "status": status_of(whole=item.whole),
                "call_id": item.call_id,
                "name": item.name,
                "arguments": item.arguments,
            }
        case _:
            return {
                "id": item.id,
                "type": "function_call_output",
                "status": "completed",
                "call_id": item.call_id,
                "output": item.output
                if isinstance(item.output, str)
                else [_part_json(part, "input_text", {}) for part in item.output],
            }


def _part_json(part: str | Image, kind: str, more: dict[str, Any]) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": kind, "text": part, **more}
    told = {"image_url": part.address, "file_id": None, "detail": part.detail}
    return {"type": "input_image", **told}


def named(items: Sequence[Item], response_id: str) -> tuple[Item, ...]:
    """The same with ids for those that have none: a function of the response."""
    core = response_id.removeprefix("resp_")
    return tuple(
        item if item.id else msgspec.structs.replace(item, id=f"item_{core}_{number}")
        for number, item in enumerate(items)
    )


def status_of(*, whole: bool) -> str:
    """Of an item that is over."""
    return "completed" if whole else "incomplete"


def _item(fields: Fields) -> Item:
    kind = fields.text("type") or "message"  # the easy form of a message leaves it out
    match kind:
        case "message":
            item = _message(fields)
        case "reasoning":
            item = read_item(fields, _id(fields), whole=_whole(fields))
        case "function_call":
            item = _call(fields)
        case "function_call_output":
            item = _result(fields)
        case _:
            raise _not_served(fields, f"items of the type '{kind[:64]}'")
    refuse_unknown(fields)
    return item


def _message(fields: Fields) -> Item:
    role = fields.required_text("role")
    if role not in _ROLES:
        raise bad(fields.at("role"), f"must be one of {', '.join(_ROLES)}")
    fields.neutral("phase", ("final_answer", "commentary"))
    content = fields.text_or_objects("content", count_max=PARTS_MAX)
    images = role == "user"
    parts: tuple[str | Image, ...] = (
        (content,)
        if isinstance(content, str)
        else tuple(_part(part, images=images) for part in content)
    )
    if not any(parts):
        raise bad(fields.at("content"), "must not be empty")
    return MessageItem(id=_id(fields), role=_ROLES[role][0], parts=parts, whole=_whole(fields))


def _part(fields: Fields, *, images: bool) -> str | Image:
    kind = fields.required_text("type")
    if kind == "input_image" and images:
        return _image(fields)
    if kind not in {"input_text", "output_text", "text"}:
        raise _not_served(fields, f"parts of the type '{kind[:64]}'")
    fields.neutral("annotations", ([],))
    fields.take("logprobs")  # an answer of ours, sent back as it came
    fields.neutral("prompt_cache_breakpoint")
    text = fields.text("text")
    if text is None:
        raise missing(fields.at("text"))
    refuse_unknown(fields)
    return text


def _image(fields: Fields) -> Image:
    fields.neutral("prompt_cache_breakpoint")
    fields.neutral("file_id")
    detail, path = read_detail(fields), fields.at("image_url")
    url = fields.required_text("image_url")
    refuse_unknown(fields)
    return image_at(path, url, detail, path)


def _call(fields: Fields) -> Item:
    fields.neutral("caller", ({"type": "direct"},))
    fields.neutral("namespace")
    fields.neutral("async", (False,))
    path = fields.at("arguments")
    arguments = fields.text("arguments")
    if arguments is None:
        raise missing(path)
    name = checked_name(fields.at("name"), fields.required_text("name"))
    call_id = checked_id(fields.at("call_id"), fields.required_text("call_id"))
    _arguments(path, arguments)
    return CallItem(
        id=_id(fields), call_id=call_id, name=name, arguments=arguments, whole=_whole(fields)
    )


def _result(fields: Fields) -> Item:
    fields.neutral("caller", ({"type": "direct"},))
    fields.neutral("namespace")
    fields.text("name")  # the call knows it
    call_id = checked_id(fields.at("call_id"), fields.required_text("call_id"))
    if fields.says_nothing("output", ("", [])):
        output: str | tuple[str | Image, ...] = ""
    else:
        content = fields.text_or_objects("output", count_max=PARTS_MAX)
        output = content if isinstance(content, str) else _output(content)
    _whole(fields)
    return ResultItem(id=_id(fields), call_id=call_id, output=output)


def _output(content: Iterable[Fields]) -> str | tuple[str | Image, ...]:
    parts = tuple(_part(part, images=True) for part in content)
    said = written(parts)
    return parts if said.images else said.text


def _id(fields: Fields) -> str:
    given = fields.text("id")
    return "" if given is None else checked_id(fields.at("id"), given)


def _whole(fields: Fields) -> bool:
    return fields.choice("status", *_STATUSES) in {None, "completed"}


def _is_of_assistant(item: Item) -> bool:
    return isinstance(item, CallItem | ReasoningItem) or (
        isinstance(item, MessageItem) and item.role == "assistant"
    )


def _is_silent(item: Item) -> bool:
    """Whether it is a thought that was not told: nothing of it is left to be taken back."""
    return isinstance(item, ReasoningItem) and not (item.text or item.signature or item.redacted)


def _turn(item: Item, unanswered: Unanswered) -> Turn:
    match item:
        case MessageItem():
            role = _ROLES[item.role][1]
            said = written(item.parts)
            return Turn(role=role, content=said.text, images=tuple(said.images))
        case ReasoningItem():
            thought = Thought(text=item.text, signature=item.signature, redacted=item.redacted)
            return Turn(role="assistant", content="", thoughts=(thought,))
        case CallItem():
            arguments = _arguments("input", item.arguments)
            call = ToolCall(id=item.call_id, name=item.name, arguments=arguments)
            unanswered.called(call, "input")
            return Turn(role="assistant", content="", calls=(call,))
        case _:
            tool = unanswered.answered(item.call_id, "input")
            said = written([item.output] if isinstance(item.output, str) else item.output)
            return Turn(
                role="tool",
                content=said.text,
                images=tuple(said.images),
                call_id=item.call_id,
                tool=tool,
            )


def _joined(turn: Turn, more: Turn) -> Turn:
    if len(turn.calls) + len(more.calls) > CALLS_MAX:
        raise bad("input", f"an answer has over {CALLS_MAX} calls")
    texts = [text for text in (turn.content, more.content) if text]
    at, calls = len(turn.content), len(turn.calls)
    later = (msgspec.structs.replace(each, at=at, calls=calls) for each in more.thoughts)
    return msgspec.structs.replace(
        turn,
        content="\n".join(texts),
        calls=turn.calls + more.calls,
        thoughts=(*turn.thoughts, *later),
    )


def _arguments(path: str, text: str) -> dict[str, Any]:
    try:
        # A call without arguments is told as nothing by some clients.
        value: object = msgspec.json.decode(text) if text else {}
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError) as error:
        raise bad(path, f"is not JSON: {error}") from error
    return checked_object(path, value)


def _not_served(fields: Fields, what: str) -> RefusedError:
    path = fields.at("type")
    return refuse(Code.UNSUPPORTED, f"{path}: {what} are not supported here", param=path)
