"""What providers of either dialect answer who think first.

There are no public recordings of Anthropic's own API. So these are built here, and held to the
types that its SDK publishes; OpenAI's, which have no reasoning text, with the field that vLLM and
DeepSeek add to them.
"""

import json
from typing import Any

from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from tests.support.provider_server import Said

THOUGHT, SIGNATURE, SEALED, SAID = "Let me think.", "c2lnbmVk", "c2VhbGVk", "Paris."
CALL = {"type": "tool_use", "id": "toolu_their_own", "name": "look", "input": {"at": "Bern"}}
PROMPT_TOKENS, OUTPUT_TOKENS, REASONING_TOKENS = 34, 20, 12

_STREAM: Any = TypeAdapter(RawMessageStreamEvent)
_WHOLE: Any = TypeAdapter(Message)
_CHUNK: Any = TypeAdapter(ChatCompletionChunk)
_CHAT: Any = TypeAdapter(ChatCompletion)

_USAGE = {
    "input_tokens": PROMPT_TOKENS,
    "output_tokens": OUTPUT_TOKENS,
    "output_tokens_details": {"thinking_tokens": REASONING_TOKENS},
}
_CHAT_USAGE = {
    "prompt_tokens": PROMPT_TOKENS,
    "completion_tokens": OUTPUT_TOKENS,
    "total_tokens": PROMPT_TOKENS + OUTPUT_TOKENS,
    "completion_tokens_details": {"reasoning_tokens": REASONING_TOKENS},
}


def thinking(body: dict[str, Any], *, calls: bool = False) -> Said:
    """The answer to a request of either dialect, whole or streamed as it asks."""
    stream = bool(body.get("stream"))
    if "max_tokens" in body:
        return _events(_message_events(calls)) if stream else _json(_message(calls))
    return _events(_chunks(), end="data: [DONE]\n\n") if stream else _json(_chat())


def _blocks(*, calls: bool) -> list[dict[str, Any]]:
    last = CALL if calls else {"type": "text", "text": SAID}
    return [
        {"type": "thinking", "thinking": THOUGHT, "signature": SIGNATURE},
        {"type": "redacted_thinking", "data": SEALED},
        last,
    ]


def _message(calls: bool) -> dict[str, Any]:  # noqa: FBT001 - of this module alone
    body = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "up",
        "content": _blocks(calls=calls),
        "stop_reason": "tool_use" if calls else "end_turn",
        "stop_sequence": None,
        "usage": _USAGE,
    }
    _WHOLE.validate_python(body)
    return body


def _message_events(calls: bool) -> list[dict[str, Any]]:  # noqa: FBT001 - of this module alone
    start = _message(calls) | {"content": [], "stop_reason": None}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": start}]
    for index, block in enumerate(_blocks(calls=calls)):
        begun, deltas = _in_pieces(block)
        at = {"index": index}
        events.append({"type": "content_block_start", **at, "content_block": begun})
        events += [{"type": "content_block_delta", **at, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", **at})
    delta = {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}
    events.append({"type": "message_delta", "delta": delta, "usage": _USAGE})
    events.append({"type": "message_stop"})
    for event in events:
        _STREAM.validate_python(event)
    return events


def _in_pieces(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    match block["type"]:
        case "thinking":
            words = block["thinking"].partition(" ")
            deltas = [{"type": "thinking_delta", "thinking": word} for word in words]
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
            return block | {"thinking": "", "signature": ""}, deltas
        case "text":
            return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case "tool_use":
            text = json.dumps(block["input"])
            return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": text}]
        case _:
            return block, []


def _chat() -> dict[str, Any]:
    message = {"role": "assistant", "reasoning_content": THOUGHT, "content": SAID}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    body = {
        "id": "c1",
        "object": "chat.completion",
        "created": 1,
        "model": "up",
        "choices": [choice],
        "usage": _CHAT_USAGE,
    }
    _CHAT.validate_python(body)
    return body


def _chunks() -> list[dict[str, Any]]:
    words = [{"reasoning_content": word} for word in THOUGHT.partition(" ")]
    deltas: list[dict[str, Any]] = [{"role": "assistant"}, *words, {"content": SAID}, {}]
    head = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "up"}
    chunks: list[dict[str, Any]] = []
    for delta in deltas:
        choice = {"index": 0, "delta": delta, "finish_reason": None if delta else "stop"}
        chunks.append({**head, "choices": [choice]})
    chunks.append({**head, "choices": [], "usage": _CHAT_USAGE})
    for chunk in chunks:
        _CHUNK.validate_python(chunk)
    return chunks


def _events(events: list[dict[str, Any]], *, end: str = "") -> Said:
    lines = []
    for event in events:
        name = f"event: {event['type']}\n" if "type" in event else ""
        lines.append(f"{name}data: {json.dumps(event)}\n\n")
    return 200, "text/event-stream", ("".join(lines) + end).encode(), False


def _json(body: dict[str, Any]) -> Said:
    return 200, "application/json", json.dumps(body).encode(), False
