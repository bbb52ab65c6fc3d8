"""Conversations as the text rules of a model take them. Pure.

Calls get names of ours in a prompt, in their order: some templates want a form of their own,
and a caller's words would be more untrusted text. Cache breaks become beginnings, chats that
share their prompt with the whole up to the break and no further.
"""

from msgspec.structs import replace

from gateway.conversation import CacheBreak, Conversation, Turn
from text.chat import Chat, ChatCall, ChatMessage, ChatTool


def chat_of(conversation: Conversation) -> Chat:
    """Tools that must not be called are not told of."""
    toolbox = conversation.toolbox
    tools = () if toolbox is None or toolbox.mode == "none" else toolbox.tools
    return Chat(
        _messages(conversation.turns),
        tuple(ChatTool(tool.name, tool.description, tool.parameters) for tool in tools),
    )


def beginnings(chat: Chat, breaks: tuple[CacheBreak, ...]) -> list[Chat]:
    """What the chat is up to each break, and then something else."""
    return [_beginning(chat, each) for each in breaks]


def _messages(turns: tuple[Turn, ...]) -> tuple[ChatMessage, ...]:
    messages = []
    number = 0
    names: dict[str, str] = {}  # of the last calls, by the caller's own
    for turn in turns:
        assert not turn.images, "no route leads images to a model that reads text alone"
        calls = []
        for call in turn.calls:
            number += 1
            names[call.id] = f"call{number:05}"  # nine letters and digits, as Mistral's have
            calls.append(ChatCall(call.name, call.arguments, names[call.id]))
        call_id = names.get(turn.call_id, "")
        messages.append(ChatMessage(turn.role, turn.content, tuple(calls), turn.tool, call_id))
    return tuple(messages)


def _beginning(chat: Chat, place: CacheBreak) -> Chat:
    if not place.turns:
        system = [message for message in chat.messages[:1] if message.role == "system"]
        return _asked(chat, system, chat.tools[: place.tools])
    last = chat.messages[place.turns - 1]
    last = replace(last, content=last.content[: place.chars], calls=last.calls[: place.calls])
    return _asked(chat, [*chat.messages[: place.turns - 1], last], chat.tools)


def _asked(chat: Chat, messages: list[ChatMessage], tools: tuple[ChatTool, ...]) -> Chat:
    """Ending in a question where it would end without a turn, and another than the chat's."""
    if not messages or messages[-1].role == "system":
        follows = chat.messages[len(messages)].content
        messages = [*messages, ChatMessage("user", "!" if follows.startswith("?") else "?")]
    return Chat(tuple(messages), tools)
