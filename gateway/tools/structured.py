"""What an answer's text must be: a format that was asked for, or a call that is forced."""

from core.errors import Code, refuse
from gateway.fields import bad
from gateway.structure import Structure
from gateway.toolbox import Toolbox
from gateway.tools.forced import forced_grammar

TOOLS = "tools"


def structure_of(asked: Structure | None, toolbox: Toolbox | None) -> Structure | None:
    """None where the text is free. Raises RefusedError for two that exclude one another."""
    forced = forced_grammar(toolbox)
    if asked is None:
        return None if forced is None else Structure(forced, TOOLS)
    if forced is not None:
        raise bad(asked.param, "cannot be combined with a tool choice that forces a call")
    if toolbox is not None and toolbox.mode == "auto":
        # Held to the format, no answer could be a call.
        raise refuse(
            Code.UNSUPPORTED,
            f"{asked.param}: not supported beside tools that the model may call; "
            "send one of the two, or the tool choice 'none'",
            param=asked.param,
        )
    return asked
