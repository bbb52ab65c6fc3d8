"""Whether a chat template speaks of tools, and how it wants to be told of calls.

Found by trying: a template is asked for a small chat with a tool, a call and its result, and
takes tools if it writes all three. Published ones differ in what an assistant's content is
beside its calls, in the form of arguments, and in how many calls one turn may have.
"""

import datetime as dt
from typing import Any

import msgspec

from text.chat import ChatCall, ChatMessage, ChatTool, TemplateRefusedError
from text.template import CallStyle, ChatTemplate

_TOOL = ChatTool("zqtool", "Zqdescription.", {"type": "object", "properties": {}})
_DAY = dt.date(2000, 1, 1)  # some templates do nothing without one
_ASKED = ChatMessage("user", "Zqquestion?")
_STYLES = (
    CallStyle(arguments_as_text=False, empty=""),
    CallStyle(arguments_as_text=False, empty=None),
    CallStyle(arguments_as_text=True, empty=""),
    CallStyle(arguments_as_text=True, empty=None),
)


class ToolStyle(msgspec.Struct, frozen=True):
    """`calls` is None for a template that does not take tools."""

    calls: CallStyle | None
    several: bool  # calls in one turn
    system: bool  # a system's turn


def tool_style(template: ChatTemplate) -> ToolStyle:
    """Try it."""
    system = _writes(template, (ChatMessage("system", "Zqsystem."), _ASKED), ("Zqsystem.",))
    for style in _STYLES:
        if _takes(template, style, calls=1):
            return ToolStyle(style, several=_takes(template, style, calls=2), system=system)
    return ToolStyle(None, several=True, system=system)


def _takes(template: ChatTemplate, style: CallStyle, *, calls: int) -> bool:
    made = tuple(_call(number) for number in range(calls))
    results = tuple(
        ChatMessage("tool", f"Zqresult{call.id}", name="zqtool", call_id=call.id) for call in made
    )
    wanted = [part for call in made for part in (f"zqvalue{call.id}", f"Zqresult{call.id}")]
    return _writes(
        template,
        (_ASKED, ChatMessage("assistant", "", calls=made), *results),
        ("Zqdescription.", *wanted),
        tools=(_TOOL,),
        style=style,
    )


def _call(number: int) -> ChatCall:
    identity = f"zqcall{number:03}"  # nine letters and digits: Mistral's want no others
    return ChatCall("zqtool", {"zqkey": f"zqvalue{identity}"}, identity)


def _writes(
    template: ChatTemplate, messages: tuple[ChatMessage, ...], parts: tuple[str, ...], **more: Any
) -> bool:
    try:
        written = template.render(messages, _DAY, **more)
    except TemplateRefusedError:
        return False
    return all(part in written for part in parts)
