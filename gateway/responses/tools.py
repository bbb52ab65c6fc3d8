"""Functions of a Responses request, which are written flat, and the choice among them.

Read with what the answer repeats of them. Tools of any other kind are refused by name.
"""

from typing import Any

import msgspec

from core.errors import Code, refuse
from gateway.fields import Fields, missing
from gateway.openai.generation import refuse_unknown
from gateway.openai.tools import with_choice
from gateway.toolbox import (
    TOOLS_MAX,
    Tool,
    Toolbox,
    checked_name,
    checked_schema,
    chosen,
    distinct,
    no_tools,
)

# What else a function may say, and the values of each that change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False,),
    "output_schema": (),
}

Shown = list[dict[str, Any]]


def read_toolbox(fields: Fields) -> tuple[Toolbox | None, object, Shown]:
    """Take `tools`, `tool_choice` and `parallel_tool_calls`. Raises RefusedError.

    With the choice and the tools as the answer tells them.
    """
    parallel = fields.boolean("parallel_tool_calls")
    choice = fields.take("tool_choice")
    if fields.says_nothing("tools", ([],)):
        if choice not in (None, "none", "auto"):
            raise no_tools("tool_choice")
        return None, choice or "auto", []
    tools = [_tool(tool) for tool in fields.objects("tools", count_max=TOOLS_MAX)]
    offered = distinct(tools, "tools")
    toolbox = Toolbox(tools=offered, callable=offered, parallel=parallel is not False)
    return (
        with_choice(toolbox, choice, _with_object),
        choice or "auto",
        [_shown(tool) for tool in tools],
    )


def _tool(fields: Fields) -> Tool:
    kind, path = fields.required_text("type"), fields.at("type")
    if kind != "function":
        message = f"{path}: only functions are supported here, not '{kind[:64]}'"
        raise refuse(Code.UNSUPPORTED, message, param=path)
    for name, accepted in _NEUTRAL.items():
        fields.neutral(name, accepted)
    parameters = fields.take("parameters")
    path = fields.at("parameters")
    tool = Tool(
        name=_name(fields),
        description=fields.text("description") or "",
        parameters={} if parameters is None else checked_schema(path, parameters, typed=False),
        strict=fields.boolean("strict") or False,
    )
    refuse_unknown(fields)
    return tool


def _shown(tool: Tool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description or None,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }


def _name(fields: Fields) -> str:
    return checked_name(fields.at("name"), fields.required_text("name"))


def _with_object(toolbox: Toolbox, choice: Fields) -> Toolbox:
    kind, path = choice.required_text("type"), choice.at("type")
    match kind:
        case "function":
            (tool,) = chosen(toolbox.tools, [_name(choice)], choice.at("name"))
            changed = msgspec.structs.replace(
                toolbox, mode="required", callable=(tool,), parallel=False
            )
        case "allowed_tools":
            changed = _with_allowed(toolbox, choice)
        case _:
            message = f"{path}: '{kind[:64]}' is not supported here"
            raise refuse(Code.UNSUPPORTED, message, param=path)
    refuse_unknown(choice)
    return changed


def _with_allowed(toolbox: Toolbox, choice: Fields) -> Toolbox:
    mode = choice.choice("mode", "auto", "required")
    if mode is None:
        raise missing(choice.at("mode"))
    names = []
    for tool in choice.objects("tools", count_max=TOOLS_MAX):
        kind, path = tool.required_text("type"), tool.at("type")
        if kind != "function":
            raise refuse(Code.UNSUPPORTED, f"{path}: only functions are supported", param=path)
        names.append(_name(tool))
        refuse_unknown(tool)
    callable_ = chosen(toolbox.tools, names, choice.at("tools"))
    return msgspec.structs.replace(toolbox, mode=mode, callable=callable_)
