"""A conversation as a body for an upstream's `/v1/messages`.

The interface has one system prompt, at the beginning; a system turn later on would have to be
moved or reworded, so it is refused. So is a conversation that the assistant has begun or would
have to go on with. Marks of what is worth caching go where the caller had them. How tokens are
drawn is no longer in the interface's published types: it is said only to servers that are known
to take it, as vLLM and older models do (`extensions`). Thoughts go back where they were, if they
are signed or sealed: whose they are takes them only so.
"""

from collections import defaultdict
from typing import Any

from core.providers import ProviderSettings
from gateway.conversation import CacheBreak, Conversation, Turn
from gateway.fields import bad
from gateway.images import Image, pieces
from gateway.providers.asked import (
    EXTENSIONS,
    asks,
    is_forced,
    message_at,
    only_chats,
    refuse_asked,
    refuse_images,
    schema_of,
    unsupported,
)
from gateway.providers.call_ids import CallIds
from gateway.thinking import Thought
from gateway.toolbox import Tool, Toolbox

TEMPERATURE_MAX = 1.0
_NOT_HERE = (
    "n", "logprobs", "seed", "frequency_penalty", "presence_penalty", "logit_bias",
    "prompt_logprobs", *(name for name in EXTENSIONS if name != "top_k"),
)  # fmt: skip
_DRAWING = ("temperature", "top_p", "top_k")
_MODES = {"off": "disabled", "budget": "enabled"}
_EFFORTS = {"minimal": "low"}  # the least that there is
_DETAILS_NOT_HERE = ("low", "original")

Block = dict[str, Any]


def message_body(
    conversation: Conversation, *, model: str, max_tokens: int, settings: ProviderSettings
) -> dict[str, Any]:
    """Raises RefusedError for what such a server cannot be asked."""
    only_chats(conversation)
    refuse_asked(conversation, _NOT_HERE if settings.extensions else (*_NOT_HERE, *_DRAWING))
    if conversation.temperature is not None and conversation.temperature > TEMPERATURE_MAX:
        raise unsupported(conversation, "temperature", "this model takes at most 1")
    refuse_images(conversation, settings)
    for image in conversation.images:
        if image.detail in _DETAILS_NOT_HERE:
            why = f"this model looks at images as closely as it can, not at detail '{image.detail}'"
            raise unsupported(conversation, image.param, why)
    system, messages = _Messages(conversation).write()
    body: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "messages": messages}
    if system:
        body["system"] = system
    if settings.stream:
        body["stream"] = True
    body |= _drawing(conversation) | _tools(conversation)
    body |= _thinking(conversation, max_tokens)
    output = _structure(conversation) | _effort(conversation)
    return body | ({"output_config": output} if output else {})


class _Messages:
    """Turns into messages: neighbours on the user's side are one, results first."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._ids = CallIds("toolu")
        self._marks: defaultdict[int, list[CacheBreak]] = defaultdict(list)
        for mark in conversation.cache_breaks:
            self._marks[mark.turns].append(mark)

    def write(self) -> tuple[list[Block], list[dict[str, Any]]]:
        """The system prompt's blocks, and the messages."""
        system: list[Block] = []
        messages: list[dict[str, Any]] = []
        for index, turn in enumerate(self._conversation.turns):
            blocks = self._blocks(index, turn)
            if turn.role == "system":
                if messages:
                    why = "this model takes a system message only before all others"
                    raise self._misplaced(index, why)
                system += blocks
                continue
            if not blocks:
                continue  # an answer of thoughts alone, none of which could be taken back
            role = "assistant" if turn.role == "assistant" else "user"
            if not messages and role == "assistant":
                raise self._misplaced(index, "this model wants the user to speak first")
            if messages and messages[-1]["role"] == role:
                messages[-1]["content"] += blocks
            else:
                messages.append({"role": role, "content": blocks})
        if not messages or messages[-1]["role"] == "assistant":
            raise self._misplaced(
                len(self._conversation.turns) - 1, "this model wants the user to speak last"
            )
        return system, messages

    def _misplaced(self, index: int, why: str) -> Exception:
        path = message_at(self._conversation, index)
        return unsupported(self._conversation, path, why)

    def _blocks(self, index: int, turn: Turn) -> list[Block]:
        marks = self._marks[index + 1]
        if turn.role == "tool":
            block: Block = {"type": "tool_result", "tool_use_id": self._ids.answered(turn)}
            if turn.images:
                block["content"] = [_piece(each) for each in pieces(turn.content, turn.images)]
            elif turn.content:
                block["content"] = turn.content
            return [_marked(block, marks[-1]) if marks else block]
        if turn.content and not turn.content.strip():
            path = message_at(self._conversation, index)
            raise bad(f"{path}.content", "must hold more than white space")
        blocks = _said(turn, [mark for mark in marks if not mark.calls])
        for number, call in enumerate(turn.calls, 1):
            blocks += [_thought(each) for each in _signed(turn) if each.calls == number - 1 > 0]
            block = {
                "type": "tool_use",
                "id": self._ids.called(call),
                "name": call.name,
                "input": call.arguments,
            }
            last = [mark for mark in marks if mark.calls == number]
            blocks.append(_marked(block, last[-1]) if last else block)
        number = len(turn.calls)
        return blocks + [_thought(each) for each in _signed(turn) if each.calls == number > 0]


def _said(turn: Turn, marks: list[CacheBreak]) -> list[Block]:
    """Text and images; the text in blocks that end where it is marked."""
    blocks: list[Block] = []
    start = 0
    for chars, cut in _cuts(turn, marks):
        blocks += _text(turn.content[start:chars], start)
        start = chars
        if isinstance(cut, Image):
            blocks.append(_piece(cut))
        elif isinstance(cut, Thought):
            blocks.append(_thought(cut))
        # Else another mark is there already: the request's own, on its last block.
        elif blocks and "cache_control" not in blocks[-1]:
            blocks[-1] = _marked(blocks[-1], cut)
    return blocks + _text(turn.content[start:], start)


Cut = Image | Thought | CacheBreak


def _cuts(turn: Turn, marks: list[CacheBreak]) -> list[tuple[int, Cut]]:
    """Where the text is interrupted: a mark comes after as many images as it counts.

    Thoughts are an assistant's and images are not. A mark at a thought is of the text before it.
    """
    placed: list[tuple[int, int, bool, Cut]] = [
        (image.at, number, False, image) for number, image in enumerate(turn.images, 1)
    ]
    placed += [(mark.chars, mark.images, True, mark) for mark in marks]
    placed += [(each.at, 1, False, each) for each in _signed(turn) if not each.calls]
    return [(each[0], each[-1]) for each in sorted(placed, key=lambda each: each[:3])]


def _signed(turn: Turn) -> list[Thought]:
    return [each for each in turn.thoughts if each.signature or each.redacted]


def _thought(thought: Thought) -> Block:
    if thought.redacted:
        return {"type": "redacted_thinking", "data": thought.redacted}
    return {"type": "thinking", "thinking": thought.text, "signature": thought.signature}


def _text(text: str, start: int) -> list[Block]:
    # Blocks of one turn were joined by line ends when they were read.
    text = text.removeprefix("\n" if start else "")
    return [{"type": "text", "text": text}] if text.strip() else []


def _piece(piece: str | Image) -> Block:
    if isinstance(piece, str):
        return {"type": "text", "text": piece}
    if piece.url:
        return {"type": "image", "source": {"type": "url", "url": piece.url}}
    source = {"type": "base64", "media_type": piece.media_type, "data": piece.data}
    return {"type": "image", "source": source}


def _marked(block: Block, mark: CacheBreak) -> Block:
    control = {"type": "ephemeral"} | ({"ttl": "1h"} if mark.ttl == "1h" else {})
    return {**block, "cache_control": control}


def _drawing(conversation: Conversation) -> dict[str, Any]:
    fields: dict[str, Any] = {name: asks(conversation, name) for name in _DRAWING}
    fields["stop_sequences"] = list(conversation.stop) or None
    return {name: value for name, value in fields.items() if value is not None}


def _tools(conversation: Conversation) -> dict[str, Any]:
    toolbox = conversation.toolbox
    if toolbox is None:
        return {}
    return {"tools": _offered(toolbox, conversation), "tool_choice": _choice(toolbox)}


def _offered(toolbox: Toolbox, conversation: Conversation) -> list[dict[str, Any]]:
    marks = {
        toolbox.tools[mark.tools - 1].name: mark
        for mark in conversation.cache_breaks
        if not mark.turns
    }
    # Past calls need their tools told of, even where none may be called now.
    offered = toolbox.tools if toolbox.mode == "none" else toolbox.callable
    return [
        _marked(_tool(tool), marks[tool.name]) if tool.name in marks else _tool(tool)
        for tool in offered
    ]


def _tool(tool: Tool) -> dict[str, Any]:
    told: dict[str, Any] = {
        "name": tool.name,
        "input_schema": {"type": "object", **tool.parameters},
    }
    if tool.description:
        told["description"] = tool.description
    if tool.strict:
        told["strict"] = True
    return told


def _choice(toolbox: Toolbox) -> dict[str, Any]:
    choice: dict[str, Any]
    match toolbox.mode:
        case "none":
            return {"type": "none"}
        case "required" if len(toolbox.callable) == 1:
            choice = {"type": "tool", "name": toolbox.callable[0].name}
        case "required":
            choice = {"type": "any"}
        case _:
            choice = {"type": "auto"}
    return choice if toolbox.parallel else {**choice, "disable_parallel_tool_use": True}


def _structure(conversation: Conversation) -> dict[str, Any]:
    grammar = conversation.grammar
    if grammar is None or is_forced(conversation):
        return {}
    if grammar.kind != "json_schema":
        raise unsupported(conversation, conversation.grammar_param)
    return {"format": {"type": "json_schema", "schema": schema_of(conversation)}}


def _effort(conversation: Conversation) -> dict[str, Any]:
    thinking = conversation.thinking
    if thinking is None or thinking.effort is None:
        return {}
    return {"effort": _EFFORTS.get(thinking.effort, thinking.effort)}


def _thinking(conversation: Conversation, max_tokens: int) -> dict[str, Any]:
    thinking = conversation.thinking
    if thinking is None or thinking.mode == "unsaid":
        return {}
    told: dict[str, Any] = {"type": _MODES.get(thinking.mode, thinking.mode)}
    if thinking.mode == "budget":
        if thinking.budget_tokens >= max_tokens:
            why = f"an answer has at most {max_tokens} tokens here, thinking included"
            raise unsupported(conversation, "thinking.budget_tokens", why)
        told["budget_tokens"] = thinking.budget_tokens
    if thinking.display is not None and thinking.mode != "off":
        told["display"] = thinking.display
    return {"thinking": told}
