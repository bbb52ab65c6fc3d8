"""Tools told of in plain text, for models whose own templates do not speak of them.

The words and tags are those of Qwen 2.5's template, which Hermes' models know as well. An
answer is read as theirs.
"""

import json
from collections.abc import Sequence

from text.chat import Chat, ChatMessage, ChatTool
from text.tool_format import HERMES_CALL, HERMES_CALL_END

_BEFORE = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_AFTER = f"""
</tools>

For each function call, return a json object with function name and arguments within \
{HERMES_CALL}{HERMES_CALL_END} XML tags:
{HERMES_CALL}
{{"name": <function-name>, "arguments": <args-json-object>}}
{HERMES_CALL_END}"""


def spelled(chat: Chat, *, system: bool) -> Chat:
    """The same chat without tools, calls and roles that a plain template does not know.

    Results become a user's turn, together with what the user says next: many a template wants
    users and assistants to alternate. Without a `system` turn to put them in, the tools are
    told to the first user.
    """
    messages: list[ChatMessage] = []
    after_result = False
    for message in chat.messages:
        role, text = _spelled(message)
        if after_result and role == "user":
            text = f"{messages.pop().content}\n{text}"
        messages.append(ChatMessage(role, text))
        after_result = message.role == "tool"
    if chat.tools:
        _tell(messages, _told(chat.tools), system=system)
    return Chat(tuple(messages))


def _spelled(message: ChatMessage) -> tuple[str, str]:
    """Role and content."""
    if message.role == "tool":
        return "user", f"<tool_response>\n{message.content}\n</tool_response>"
    said = [message.content] if message.content else []
    for call in message.calls:
        written = _json({"name": call.name, "arguments": call.arguments})
        said.append(f"{HERMES_CALL}\n{written}\n{HERMES_CALL_END}")
    return message.role, "\n".join(said)


def _tell(messages: list[ChatMessage], tools: str, *, system: bool) -> None:
    first = messages[0] if messages else ChatMessage("system", "")
    if first.role in ("system", "developer"):
        said = f"{first.content}\n\n{tools}" if first.content else tools
        messages[:1] = [ChatMessage(first.role, said)]
    elif system:
        messages.insert(0, ChatMessage("system", tools))
    else:
        messages[0] = ChatMessage(first.role, f"{tools}\n\n{first.content}")


def _told(tools: Sequence[ChatTool]) -> str:
    return _BEFORE + "\n".join(_json(tool.described) for tool in tools) + _AFTER


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
