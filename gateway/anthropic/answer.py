"""Whole answers, for callers that do not stream, and the parts that streams share with them."""

from typing import Any

import msgspec

from gateway.anthropic.usage import from_usage
from gateway.conversation import Answer, Conversation, Finish

_STOP_REASONS: dict[Finish, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "filtered": "refusal",
}


def message_json(answer: Answer, conversation: Conversation, *, request_id: str) -> bytes:
    """The body of a `message`. An empty answer has no content block, as in a stream."""
    (choice,) = answer.choices
    content = [{"type": "text", "text": choice.text, "citations": None}] if choice.text else []
    return msgspec.json.encode(
        {
            **message_fields(conversation, request_id),
            "content": content,
            **stop_fields(choice.finish, choice.stop),
            "usage": from_usage(answer.usage),
        }
    )


def count_tokens_json(tokens: int) -> bytes:
    """The body of `count_tokens`."""
    return msgspec.json.encode({"input_tokens": tokens})


def message_fields(conversation: Conversation, request_id: str) -> dict[str, Any]:
    """What names a message: `req_x` answers as `msg_x`."""
    return {
        "id": "msg_" + request_id.removeprefix("req_"),
        "type": "message",
        "role": "assistant",
        "model": conversation.model,
    }


def stop_fields(finish: Finish, stop: str | None) -> dict[str, Any]:
    """Why it stopped, and at which of the caller's stop sequences."""
    reason = _STOP_REASONS[finish] if stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stop}
