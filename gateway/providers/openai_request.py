"""A conversation as a body for an upstream's `/chat/completions`.

Calls get new ids, counted through the conversation: the ids of our callers may be longer than
others allow, and mean nothing outside of it. Nothing that names the caller's own user is sent.
Marks of what is worth caching have no place here; such servers cache by themselves. Nor have
images within results of calls: the interface's results are text. What was thought goes only to
servers that are known to take it (`extensions`), under both of its names, and without signatures.
"""

from typing import Any

import msgspec

from core.providers import ProviderSettings
from gateway.conversation import Conversation, Turn
from gateway.images import Image, pieces
from gateway.openai.thinking import ALIAS, FIELD, NONE
from gateway.providers.asked import (
    EXTENSIONS,
    asks,
    is_forced,
    only_chats,
    refuse_asked,
    refuse_images,
    schema_of,
    unsupported,
)
from gateway.providers.call_ids import CallIds
from gateway.thinking import effort_of
from gateway.toolbox import Tool, Toolbox

STOPS_MAX = 4  # the interface's own bound; vLLM has none
SCHEMA_NAME = "answer"
_DRAWING = ("temperature", "top_p", "seed", "n", "frequency_penalty", "presence_penalty")
_STRUCTURES = {"regex": "regex", "lark": "grammar"}  # as vLLM's `structured_outputs` names them


def chat_body(
    conversation: Conversation, *, model: str, max_tokens: int, settings: ProviderSettings
) -> dict[str, Any]:
    """Raises RefusedError for what such a server cannot be asked."""
    only_chats(conversation)
    refuse_asked(conversation, ("prompt_logprobs",))
    if not settings.extensions:
        refuse_asked(conversation, EXTENSIONS)
        if len(conversation.stop) > STOPS_MAX:
            raise unsupported(conversation, "stop", f"this model takes at most {STOPS_MAX}")
    refuse_images(conversation, settings)
    ids = CallIds("call")
    body: dict[str, Any] = {
        "model": model,
        "messages": [
            _message(conversation, turn, ids) | (_thoughts(turn) if settings.extensions else {})
            for turn in conversation.turns
        ],
        settings.output_limit: max_tokens,
        **_drawing(conversation),
        **_tools(conversation.toolbox),
        **_structure(conversation, settings),
        **_thinking(conversation),
    }
    if settings.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def _message(conversation: Conversation, turn: Turn, ids: CallIds) -> dict[str, Any]:
    if turn.role == "tool":
        for image in turn.images:
            why = "this model takes no images in results of tools"
            raise unsupported(conversation, image.param, why)
        return {"role": "tool", "tool_call_id": ids.answered(turn), "content": turn.content}
    if not turn.calls:
        return {"role": turn.role, "content": _content(turn)}
    calls = [
        {
            "id": ids.called(call),
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": msgspec.json.encode(call.arguments).decode(),
            },
        }
        for call in turn.calls
    ]
    return {"role": "assistant", "content": turn.content or None, "tool_calls": calls}


def _content(turn: Turn) -> str | list[dict[str, Any]]:
    if not turn.images:
        return turn.content
    return [
        {"type": "text", "text": piece} if isinstance(piece, str) else _image(piece)
        for piece in pieces(turn.content, turn.images)
    ]


def _image(image: Image) -> dict[str, Any]:
    told = {"url": image.address}
    if image.detail != "auto":
        told["detail"] = image.detail
    return {"type": "image_url", "image_url": told}


def _thoughts(turn: Turn) -> dict[str, Any]:
    text = "".join(thought.text for thought in turn.thoughts)
    return {FIELD: text, ALIAS: text} if text else {}


def _thinking(conversation: Conversation) -> dict[str, Any]:
    thinking = conversation.thinking
    if thinking is None:
        return {}
    if thinking.mode == "between_tools":
        raise unsupported(conversation, "thinking", "this model has no thinking between tools")
    effort = NONE if thinking.mode == "off" else effort_of(thinking)
    return {} if effort is None else {"reasoning_effort": effort}


def _drawing(conversation: Conversation) -> dict[str, Any]:
    fields: dict[str, Any] = {name: asks(conversation, name) for name in (*_DRAWING, *EXTENSIONS)}
    fields["stop"] = list(conversation.stop) or None
    if conversation.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in conversation.logit_bias}
    if conversation.logprobs is not None:
        fields["logprobs"] = True
        fields["top_logprobs"] = conversation.logprobs
    return {name: value for name, value in fields.items() if value is not None}


def _tools(toolbox: Toolbox | None) -> dict[str, Any]:
    if toolbox is None:
        return {}
    # Of tools that may not be called the model need not hear.
    offered = toolbox.tools if toolbox.mode == "none" else toolbox.callable
    fields: dict[str, Any] = {"tools": [_tool(tool) for tool in offered]}
    if toolbox.mode != "auto":
        fields["tool_choice"] = toolbox.mode
    if toolbox.mode == "required" and len(offered) == 1:
        fields["tool_choice"] = {"type": "function", "function": {"name": offered[0].name}}
    if not toolbox.parallel:
        fields["parallel_tool_calls"] = False
    return fields


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = tool.parameters
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _structure(conversation: Conversation, settings: ProviderSettings) -> dict[str, Any]:
    grammar = conversation.grammar
    if grammar is None or is_forced(conversation):
        return {}
    match grammar.kind:
        case "json_object":
            return {"response_format": {"type": "json_object"}}
        case "json_schema":
            return {"response_format": _schema(conversation)}
        case kind if settings.extensions:
            text = msgspec.json.decode(grammar.text) if kind == "choice" else grammar.text
            return {"structured_outputs": {_STRUCTURES.get(kind, kind): text}}
        case _:
            raise unsupported(conversation, conversation.grammar_param)


def _schema(conversation: Conversation) -> dict[str, Any]:
    schema = {"name": SCHEMA_NAME, "schema": schema_of(conversation), "strict": True}
    return {"type": "json_schema", "json_schema": schema}
