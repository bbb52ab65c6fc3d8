"""How the tool calls of one request's answers are to be read."""

import msgspec

from gateway.toolbox import Toolbox
from gateway.tools.forced import forced_form
from gateway.tools.parser import CallForm, CallParser
from text.tool_format import ToolFormat


class ToolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Makes a parser for each choice."""

    form: CallForm
    names: tuple[str, ...]
    parallel: bool

    def parser(self) -> CallParser:
        """At the start of an answer."""
        return CallParser(self.form, self.names, parallel=self.parallel)


def plan(toolbox: Toolbox | None, tool_format: ToolFormat) -> ToolPlan | None:
    """None: whatever the model writes is text. `tool_format` is the model's own."""
    if toolbox is None or toolbox.mode == "none":
        return None
    form: CallForm = forced_form(toolbox) if toolbox.mode == "required" else tool_format
    names = tuple(tool.name for tool in toolbox.callable)
    return ToolPlan(form=form, names=names, parallel=toolbox.parallel)
