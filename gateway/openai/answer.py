"""Whole answers, for callers that do not stream, and the parts that streams share with them."""

from typing import Any

import msgspec

from gateway.conversation import Answer, AnswerChoice, Conversation, Finish, Opened
from gateway.openai.generation import SERVED_TIERS
from gateway.openai.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from gateway.openai.thinking import FIELD
from gateway.openai.usage import from_usage
from gateway.tools.ids import call_id

FINISH_REASONS: dict[Finish, str] = {
    "stop": "stop",
    "length": "length",
    "filtered": "content_filter",
    "tool_calls": "tool_calls",
}
CALL_PREFIX = "call_"


def chat_json(
    answer: Answer, conversation: Conversation, *, request_id: str, created_ms: int
) -> bytes:
    """The body of a `chat.completion`."""
    return msgspec.json.encode(
        {
            "id": chat_id(request_id),
            "object": "chat.completion",
            "created": created_ms // 1000,
            "model": conversation.model,
            "choices": [_chat_choice(choice, request_id) for choice in answer.choices],
            "usage": from_usage(answer.usage, answer.bill),
            **served_tier(conversation),
            **_prompt_logprobs(answer.opened, conversation),
        }
    )


def completion_json(
    answer: Answer, conversation: Conversation, *, request_id: str, created_ms: int
) -> bytes:
    """The body of a `text_completion`."""
    return msgspec.json.encode(
        {
            "id": completion_id(request_id),
            "object": "text_completion",
            "created": created_ms // 1000,
            "model": conversation.model,
            "choices": [
                _completion_choice(choice, answer.opened, conversation) for choice in answer.choices
            ],
            "usage": from_usage(answer.usage, answer.bill),
            **served_tier(conversation),
        }
    )


def chat_id(request_id: str) -> str:
    """`req_x` -> `chatcmpl-x`: the answer's name leads back to the request."""
    return "chatcmpl-" + request_id.removeprefix("req_")


def completion_id(request_id: str) -> str:
    """`req_x` -> `cmpl-x`."""
    return "cmpl-" + request_id.removeprefix("req_")


def served_tier(conversation: Conversation) -> dict[str, str]:
    """The tier it was served as, told to who named one."""
    if not conversation.tier_asked:
        return {}
    return {"service_tier": SERVED_TIERS[conversation.service_class]}


def _chat_choice(choice: AnswerChoice, request_id: str) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": choice.text if choice.text or not choice.calls else None,
        "refusal": None,
        "annotations": [],
    }
    thought = "".join(each.text for each in choice.thoughts)
    if thought:
        message[FIELD] = thought
    if choice.calls:
        message["tool_calls"] = [
            {
                "id": call_id(CALL_PREFIX, request_id, choice=choice.index, call=number),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(choice.calls)
        ]
    return {
        "index": choice.index,
        "message": message,
        "logprobs": None if choice.chances is None else chat_logprobs(choice.chances),
        "finish_reason": FINISH_REASONS[choice.finish],
    }


def _completion_choice(
    choice: AnswerChoice, opened: Opened, conversation: Conversation
) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": opened.echo + choice.text,
        "logprobs": _completion_logprobs(choice, opened, conversation),
        "finish_reason": FINISH_REASONS[choice.finish],
        **_prompt_logprobs(opened, conversation),
    }


def _completion_logprobs(
    choice: AnswerChoice, opened: Opened, conversation: Conversation
) -> dict[str, Any] | None:
    if choice.chances is None or conversation.logprobs is None:
        return None
    writer = CompletionLogprobs()
    if not conversation.echo:
        return writer.write(choice.chances)
    before = writer.write_prompt(opened.prompt, conversation.logprobs)
    after = writer.write(choice.chances)
    return {name: before[name] + after[name] for name in before}


def _prompt_logprobs(opened: Opened, conversation: Conversation) -> dict[str, Any]:
    """An extension's field, where it was asked for."""
    if conversation.prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": prompt_logprobs(opened.prompt, conversation.prompt_logprobs)}
