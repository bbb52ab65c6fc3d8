"""Tools of a message request. Those that Anthropic's own servers run are not served."""

import msgspec

from core.errors import Code, refuse
from gateway.anthropic.blocks import CacheBreaks, refuse_unknown
from gateway.conversation import CacheBreak
from gateway.fields import Fields, missing
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

# What else a tool may say, and the values of each that change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "input_examples": ([],),
}


def read_toolbox(fields: Fields, breaks: CacheBreaks) -> Toolbox | None:
    """Take `tools` and `tool_choice`. Raises RefusedError."""
    if fields.says_nothing("tools", ([],)):
        if not fields.says_nothing("tool_choice", ({"type": "none"}, {"type": "auto"})):
            raise no_tools("tool_choice")
        return None
    tools: list[Tool] = []
    for tool in fields.objects("tools", count_max=TOOLS_MAX):
        tools.append(_tool(tool))
        ttl = breaks.read(tool)
        refuse_unknown(tool)
        if ttl is not None:
            breaks.add(tool, CacheBreak(ttl=ttl, tools=len(tools)))
    offered = distinct(tools, "tools")
    toolbox = Toolbox(tools=offered, callable=offered)
    choice = fields.nested("tool_choice")
    return toolbox if choice is None else _with_choice(toolbox, choice)


def _tool(tool: Fields) -> Tool:
    if not tool.says_nothing("type", ("custom",)):
        path = tool.at("type")
        message = f"{path}: only tools of your own ('custom') are supported here"
        raise refuse(Code.UNSUPPORTED, message, param=path)
    name = checked_name(tool.at("name"), tool.required_text("name"))
    schema = tool.take("input_schema")
    if schema is None:
        raise missing(tool.at("input_schema"))
    for other, accepted in _NEUTRAL.items():
        tool.neutral(other, accepted)
    tool.boolean("eager_input_streaming")  # they always are
    return Tool(
        name=name,
        description=tool.text("description") or "",
        parameters=checked_schema(tool.at("input_schema"), schema, typed=True),
        strict=tool.boolean("strict") or False,
    )


def _with_choice(toolbox: Toolbox, choice: Fields) -> Toolbox:
    kind = choice.choice("type", "auto", "any", "tool", "none")
    if kind is None:
        raise missing(choice.at("type"))
    callable_ = toolbox.callable
    parallel = kind != "none" and not choice.boolean("disable_parallel_tool_use")
    if kind == "tool":
        path = choice.at("name")
        callable_ = chosen(toolbox.tools, [choice.required_text("name")], path)
        parallel = False
    refuse_unknown(choice)
    mode = {"auto": "auto", "none": "none"}.get(kind, "required")
    return msgspec.structs.replace(toolbox, mode=mode, callable=callable_, parallel=parallel)
