"""Whole answers, for callers that do not stream, and the parts that streams share with them."""

from typing import Any

import msgspec

from core.protocol import ServiceClass
from gateway.anthropic.usage import from_usage
from gateway.conversation import Answer, AnswerChoice, Conversation, Finish, told_between
from gateway.thinking import Thought
from gateway.tools.ids import call_id

_STOP_REASONS: dict[Finish, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "filtered": "refusal",
    "tool_calls": "tool_use",
}
CALL_PREFIX = "toolu_"
_TIERS: dict[ServiceClass, str] = {
    "standard": "standard",
    "interactive": "priority",
    "batch": "batch",
}


def message_json(answer: Answer, conversation: Conversation, *, request_id: str) -> bytes:
    """The body of a `message`. An empty answer has no content block, as in a stream."""
    (choice,) = answer.choices
    return msgspec.json.encode(
        {
            **message_fields(conversation, request_id),
            "content": _content(choice, request_id),
            **stop_fields(choice.finish, choice.stop),
            "usage": {**from_usage(answer.usage, answer.bill), **served_tier(conversation)},
        }
    )


def count_tokens_json(tokens: int) -> bytes:
    """The body of `count_tokens`."""
    return msgspec.json.encode({"input_tokens": tokens})


def served_tier(conversation: Conversation) -> dict[str, str]:
    """The tier it was served as, within the usage of a message."""
    return {"service_tier": _TIERS[conversation.service_class]}


def message_fields(conversation: Conversation, request_id: str) -> dict[str, Any]:
    """What names a message: `req_x` answers as `msg_x`."""
    return {
        "id": "msg_" + request_id.removeprefix("req_"),
        "type": "message",
        "role": "assistant",
        "model": conversation.model,
    }


def call_fields(name: str, request_id: str, *, call: int) -> dict[str, Any]:
    """A `tool_use` block, all but its input."""
    named = call_id(CALL_PREFIX, request_id, choice=0, call=call)
    return {"type": "tool_use", "id": named, "name": name}


def thought_fields(thought: Thought) -> dict[str, Any]:
    """A whole block of it. Who thought without signing is told as such."""
    if thought.redacted:
        return {"type": "redacted_thinking", "data": thought.redacted}
    return {"type": "thinking", "thinking": thought.text, "signature": thought.signature}


def stop_fields(finish: Finish, stop: str | None) -> dict[str, Any]:
    """Why it stopped, and at which of the caller's stop sequences."""
    reason = _STOP_REASONS[finish] if stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stop}


def _content(choice: AnswerChoice, request_id: str) -> list[dict[str, Any]]:
    """Texts, thoughts and calls, in the order in which they were told."""
    blocks: list[dict[str, Any]] = []
    start = 0
    for told in told_between(choice):
        blocks += _text(choice.text[start : told.at])
        start = told.at
        if isinstance(told, Thought):
            blocks.append(thought_fields(told))
            continue
        number = sum(block["type"] == "tool_use" for block in blocks)
        named = call_fields(told.name, request_id, call=number)
        blocks.append({**named, "input": _input(told.arguments)})
    return blocks + _text(choice.text[start:])


def _text(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "citations": None}] if text else []


def _input(arguments: str) -> object:
    # What was cut off, or is a provider's mistake, is no object; so its name, as in the API's guide
    # to streaming of tools.
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, RecursionError):
        value = None
    return msgspec.Raw(arguments.encode()) if type(value) is dict else {"INVALID_JSON": arguments}
