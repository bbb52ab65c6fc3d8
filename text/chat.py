"""What goes into a chat prompt, and the refusals that turning text into ids may end in."""

from collections.abc import Callable
from typing import Any

import msgspec

# The roles that published chat templates know. Templates that build a control token from the
# role (`'<|' + role + '|>'`) would let any other role name one.
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class ChatCall(msgspec.Struct, frozen=True):
    """A tool that an assistant called. Name and arguments are untrusted, `id` is ours."""

    name: str
    arguments: dict[str, Any]
    id: str = ""


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn. `content` and `name` are untrusted text; `role` is one of ROLES.

    An assistant's may have calls; a tool's answers the call `call_id` of the tool `name`.
    """

    role: str
    content: str
    calls: tuple[ChatCall, ...] = ()
    name: str = ""
    call_id: str = ""


class ChatTool(msgspec.Struct, frozen=True):
    """A function that may be called; `parameters` is a JSON schema. All of it is untrusted."""

    name: str
    description: str
    parameters: dict[str, Any]

    @property
    def described(self) -> dict[str, Any]:
        """As templates expect it: Hugging Face's form, which is OpenAI's."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class Chat(msgspec.Struct, frozen=True):
    """The turns of a chat and the tools that its assistant is told of."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[ChatTool, ...] = ()

    @property
    def has_tools(self) -> bool:
        """Whether anything in it is about tools."""
        return bool(self.tools) or any(m.calls or m.role == "tool" for m in self.messages)

    def one_call_at_a_time(self) -> "Chat":
        """With a turn for each call, its result right after it: some templates take no two."""
        results = {m.call_id: m for m in self.messages if m.role == "tool"}
        messages: list[ChatMessage] = []
        for message in self.messages:
            if not message.calls:
                messages += () if message.role == "tool" else (message,)
                continue
            content = message.content
            for call in message.calls:
                messages.append(ChatMessage(message.role, content, (call,)))
                messages += (results[call.id],) if call.id in results else ()
                content = ""
        return Chat(tuple(messages), self.tools)

    def mapped(self, change: Callable[[str], str]) -> "Chat":
        """With every untrusted text changed, names of JSON members included."""
        return Chat(
            tuple(_message(message, change) for message in self.messages),
            tuple(_tool(tool, change) for tool in self.tools),
        )

    def texts(self) -> list[str]:
        """Every untrusted text."""
        found: list[str] = []

        def note(text: str) -> str:
            found.append(text)
            return text

        self.mapped(note)
        return found


class TextRefusedError(Exception):
    """This text cannot be turned into ids; the message is fit for the caller's eyes."""


class TemplateRefusedError(TextRefusedError):
    """The model's chat template is missing, or does not take these messages."""


def _message(message: ChatMessage, change: Callable[[str], str]) -> ChatMessage:
    return ChatMessage(
        message.role,
        change(message.content),
        tuple(
            ChatCall(change(call.name), _inside(call.arguments, change), call.id)
            for call in message.calls
        ),
        change(message.name),
        message.call_id,
    )


def _tool(tool: ChatTool, change: Callable[[str], str]) -> ChatTool:
    return ChatTool(change(tool.name), change(tool.description), _inside(tool.parameters, change))


def _inside(value: Any, change: Callable[[str], str]) -> Any:
    match value:
        case str():
            return change(value)
        case dict():
            return {change(key): _inside(each, change) for key, each in value.items()}
        case list():
            return [_inside(each, change) for each in value]
        case _:
            return value
