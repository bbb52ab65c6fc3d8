"""Which family's marks a model's own template has around tool calls, and what those marks are.

Some vocabularies hold the marks as control tokens, which are silent otherwise: those of
`MARKS` keep their characters, so that the text of an answer is all that a reader of calls
needs, wherever it is resumed.
"""

from typing import Literal

HERMES_CALL, HERMES_CALL_END = "<tool_call>", "</tool_call>"
LLAMA_CALL = "<|python_tag|>"
MISTRAL_CALLS, MISTRAL_CALL_ID, MISTRAL_ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_BAR = "\uff5c"  # as DeepSeek writes it, full-width
DEEPSEEK_CALLS = f"<{_BAR}tool▁calls▁begin{_BAR}>"
DEEPSEEK_CALLS_END = f"<{_BAR}tool▁calls▁end{_BAR}>"
DEEPSEEK_CALL = f"<{_BAR}tool▁call▁begin{_BAR}>"
DEEPSEEK_CALL_END = f"<{_BAR}tool▁call▁end{_BAR}>"
DEEPSEEK_SEP = f"<{_BAR}tool▁sep{_BAR}>"

MARKS = frozenset(
    {
        *(HERMES_CALL, HERMES_CALL_END, LLAMA_CALL),
        *(MISTRAL_CALLS, MISTRAL_CALL_ID, MISTRAL_ARGS),
        *(DEEPSEEK_CALLS, DEEPSEEK_CALLS_END, DEEPSEEK_CALL, DEEPSEEK_CALL_END, DEEPSEEK_SEP),
    }
)

ToolFormat = Literal["hermes", "llama", "mistral", "deepseek"]


def tool_format(template: str | None, *, takes_tools: bool) -> ToolFormat:
    """By the template's source. One that takes no tools is told of them by us, in Hermes' form.

    A template that takes tools and has no mark we know is read as Llama's: a bare object.
    """
    if template is None or not takes_tools:
        return "hermes"
    if DEEPSEEK_CALLS in template:
        return "deepseek"
    if MISTRAL_CALLS in template:
        return "mistral"
    return "hermes" if HERMES_CALL in template else "llama"
