"""Tools of a chat request, and the calls and results of its past turns.

The legacy `functions` are refused by name. Tools other than functions are not served.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from core.errors import Code, refuse
from gateway.fields import Fields, bad, missing, wrong_kind
from gateway.openai.generation import INDEX, refuse_unknown
from gateway.toolbox import (
    CALLS_MAX,
    TOOLS_MAX,
    Tool,
    Toolbox,
    ToolCall,
    checked_id,
    checked_name,
    checked_object,
    checked_schema,
    chosen,
    distinct,
    no_tools,
)


def read_toolbox(fields: Fields) -> Toolbox | None:
    """Take `tools`, `tool_choice` and `parallel_tool_calls`. Raises RefusedError."""
    parallel = fields.boolean("parallel_tool_calls")
    if fields.says_nothing("tools", ([],)):
        if not fields.says_nothing("tool_choice", ("none", "auto")):
            raise no_tools("tool_choice")
        return None
    tools = [_tool(tool) for tool in fields.objects("tools", count_max=TOOLS_MAX)]
    offered = distinct(tools, "tools")
    toolbox = Toolbox(tools=offered, callable=offered, parallel=parallel is not False)
    return with_choice(toolbox, fields.take("tool_choice"), _with_object)


def read_calls(message: Fields) -> tuple[ToolCall, ...]:
    """Take an assistant's `tool_calls`. Raises RefusedError."""
    if message.says_nothing("tool_calls", ([],)):
        return ()
    return tuple(map(_call, message.objects("tool_calls", count_max=CALLS_MAX)))


def _tool(tool: Fields) -> Tool:
    function = _function(tool)
    name = _name(function)
    parameters = function.take("parameters")
    path = function.at("parameters")
    read = Tool(
        name=name,
        description=function.text("description") or "",
        parameters={} if parameters is None else checked_schema(path, parameters, typed=False),
        strict=function.boolean("strict") or False,
    )
    refuse_unknown(function)
    refuse_unknown(tool)
    return read


def _function(tool: Fields) -> Fields:
    """What is inside `{"type": "function", "function": {…}}`."""
    kind = tool.required_text("type")
    if kind != "function":
        path = tool.at("type")
        raise refuse(Code.UNSUPPORTED, f"{path}: only functions are supported here", param=path)
    function = tool.nested("function")
    if function is None:
        raise missing(tool.at("function"))
    return function


def _name(function: Fields) -> str:
    return checked_name(function.at("name"), function.required_text("name"))


def with_choice(
    toolbox: Toolbox, choice: object, with_object: Callable[[Toolbox, Fields], Toolbox]
) -> Toolbox:
    """`tool_choice` said in a word, which is the same in both interfaces, or `with_object`.

    Raises RefusedError.
    """
    path = "tool_choice"
    match choice:
        case None | "auto":
            return toolbox
        case "none" | "required" as mode:
            return msgspec.structs.replace(toolbox, mode=mode)
        case str():
            raise bad(path, "must be 'none', 'auto', 'required' or an object")
        case dict():
            return with_object(toolbox, Fields(dict(choice), path, index=INDEX))
        case _:
            raise wrong_kind(path, "a string or an object", choice)


def _with_object(toolbox: Toolbox, choice: Fields) -> Toolbox:
    allowed = choice.nested("allowed_tools")
    if allowed is not None:
        choice.neutral("type", ("allowed_tools",))
        return _with_allowed(toolbox, choice, allowed)
    function = _function(choice)
    (tool,) = chosen(toolbox.tools, [_name(function)], function.at("name"))
    refuse_unknown(function)
    refuse_unknown(choice)
    return msgspec.structs.replace(toolbox, mode="required", callable=(tool,), parallel=False)


def _with_allowed(toolbox: Toolbox, choice: Fields, allowed: Fields) -> Toolbox:
    mode = allowed.choice("mode", "auto", "required")
    if mode is None:
        raise missing(allowed.at("mode"))
    names = []
    for tool in allowed.objects("tools", count_max=TOOLS_MAX):
        function = _function(tool)
        names.append(_name(function))
        refuse_unknown(function)
        refuse_unknown(tool)
    callable_ = chosen(toolbox.tools, names, allowed.at("tools"))
    refuse_unknown(allowed)
    refuse_unknown(choice)
    return msgspec.structs.replace(toolbox, mode=mode, callable=callable_)


def _call(call: Fields) -> ToolCall:
    call_id = checked_id(call.at("id"), call.required_text("id"))
    call.integer("index", 0)  # of a stream's delta, kept by some clients
    function = _function(call)
    read = ToolCall(
        id=call_id, name=_name(function), arguments=_arguments(function, function.at("arguments"))
    )
    refuse_unknown(function)
    refuse_unknown(call)
    return read


def _arguments(function: Fields, path: str) -> dict[str, Any]:
    text = function.text("arguments")
    if text is None:
        raise missing(path)
    try:
        # A call without arguments is told as nothing by some clients.
        value: object = msgspec.json.decode(text) if text else {}
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError) as error:
        raise bad(path, f"is not JSON: {error}") from error
    return checked_object(path, value)
