"""Strict tools where the model decides: free text, and calls in its own form that fit.

A call's mark opens it wherever it comes; what follows the mark can then only be a call of a
tool of the request, and what is not opened by a mark is no call. Where one call is the most,
an answer ends with it. Bare objects, which Llama's
models write, are told from text by the brace they begin with: an answer of text has none there.
"""

import json

import msgspec

from core.errors import Code, refuse
from core.protocol import Grammar
from gateway.conversation import Conversation
from gateway.toolbox import Toolbox
from gateway.tools.forced import as_text, calls_schema
from text.tool_format import HERMES_CALL, HERMES_CALL_END, LLAMA_CALL, MISTRAL_CALLS, ToolFormat

TOOLS = "tools"

_TEXT = r"TEXT: /(.|\n)*/"
_SPACE = r"SPACE: /[ \n]?/"


def held(conversation: Conversation, tool_format: ToolFormat) -> Conversation:
    """The conversation with the grammar that strict tools need of this model, if they do.

    Raises RefusedError for a form whose calls cannot be told from text by their beginning.
    """
    toolbox = conversation.toolbox
    if toolbox is None or toolbox.mode != "auto":
        return conversation  # forced calls have theirs
    if not any(tool.strict for tool in toolbox.callable):
        return conversation
    if tool_format == "deepseek":
        message = (
            f"{TOOLS}: strict functions are not supported by this model unless a call is forced"
        )
        raise refuse(Code.UNSUPPORTED, message, param=TOOLS)
    grammar = Grammar(kind="lark", text=_lark(toolbox, tool_format))
    return msgspec.structs.replace(conversation, grammar=grammar, grammar_param=TOOLS)


def _lark(toolbox: Toolbox, tool_format: ToolFormat) -> str:
    array = tool_format == "mistral"
    call = f"%json {as_text(calls_schema(toolbox, several=array, strict_only=True))}"
    more = toolbox.parallel
    match tool_format:
        case "mistral":
            rules = ["start: calls | TEXT", "calls: mark SPACE call", _marked(MISTRAL_CALLS)]
        case "llama":
            rules = [
                "start: SPACE calls | mark SPACE calls | NOTE",
                'calls: call (";" SPACE call)*' if more else "calls: call",
                r"NOTE: /([^{ \n](.|\n)*)?/",
                f"mark[lazy]: NOTE {json.dumps(LLAMA_CALL)}",
            ]
        case _:
            rules = [
                "start: calls* TEXT" if more else "start: calls | TEXT",
                f"calls: mark SPACE call SPACE {json.dumps(HERMES_CALL_END)}",
                _marked(HERMES_CALL),
            ]
    return "\n".join([*rules, f"call: {call}", _TEXT, _SPACE]) + "\n"


def _marked(mark: str) -> str:
    return f"mark[lazy]: TEXT {json.dumps(mark)}"
