"""A model's own chat template, run as the foreign code it is.

Jinja in its immutable sandbox, with the names that published templates expect. What it may
cost is bounded in characters; whatever it raises is a `TemplateRefusedError`. There is no
clock: a template that asks for the date gets the day it is given, or takes its own fallback.
"""

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import msgspec
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from text.chat import ROLES, ChatCall, ChatMessage, ChatTool, TemplateRefusedError

# A template repeats its own phrases for every message and may repeat content a little (a
# system prompt moved into the first turn); anything past this is a runaway loop.
TEMPLATE_CHARS_MAX = 256 * 1024
CONTENT_REPEAT_MAX = 4
MESSAGE_CHARS_MAX = 1024
JSON_REPEAT_MAX = 16  # of tools and arguments, which templates indent


class CallStyle(msgspec.Struct, frozen=True):
    """How a template takes a turn's calls; `empty` is the content of a turn that has none."""

    arguments_as_text: bool
    empty: str | None


PLAIN_STYLE = CallStyle(arguments_as_text=False, empty="")


class ChatTemplate:
    """A compiled template. Safe to render from several threads."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """Compile `source`; `variables` are the tokenizer's own (`bos_token`, …).

        Raises TemplateRefusedError when it does not parse.
        """
        self.source = source
        self._variables = dict(variables)
        try:
            self._template = _Environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateRefusedError(f"the chat template does not parse: {error}") from error

    def render(
        self,
        messages: Sequence[ChatMessage],
        day: dt.date | None = None,
        *,
        tools: Sequence[ChatTool] = (),
        style: CallStyle = PLAIN_STYLE,
    ) -> str:
        """The prompt, open for the assistant's answer. Raises TemplateRefusedError."""
        for message in messages:
            if message.role not in ROLES:
                raise TemplateRefusedError(f"no chat template takes the role {message.role!r}")
        try:
            context = self._context([_message(message, style) for message in messages], day)
            context["tools"] = [tool.described for tool in tools] or None
            return self._collect(context, _chars_max(messages, tools))
        except TemplateRefusedError:
            raise
        except Exception as error:  # foreign code: whatever it raises is its refusal
            raise TemplateRefusedError(
                f"the chat template does not take these messages: {error}"
            ) from error

    def _collect(self, context: dict[str, Any], chars_max: int) -> str:
        pieces: list[str] = []
        chars = 0
        for piece in self._template.generate(context):
            chars += len(piece)
            if chars > chars_max:
                raise TemplateRefusedError(f"the chat template wrote over {chars_max} characters")
            pieces.append(piece)
        return "".join(pieces)

    def _context(self, messages: list[dict[str, Any]], day: dt.date | None) -> dict[str, Any]:
        context: dict[str, Any] = {
            **self._variables,
            "messages": messages,
            "documents": None,
            "add_generation_prompt": True,
        }
        if day is not None:
            context["strftime_now"] = day.strftime
        return context


def _message(message: ChatMessage, style: CallStyle) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.calls:
        shown["content"] = message.content or style.empty
        shown["tool_calls"] = [_call(call, style) for call in message.calls]
    if message.role == "tool":
        shown |= {"tool_call_id": message.call_id, "name": message.name}
    return shown


def _call(call: ChatCall, style: CallStyle) -> dict[str, Any]:
    arguments = _tojson(call.arguments) if style.arguments_as_text else call.arguments
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _chars_max(messages: Sequence[ChatMessage], tools: Sequence[ChatTool]) -> int:
    content = sum(len(message.content) for message in messages)
    written = [tool.described for tool in tools]
    written += [call.arguments for message in messages for call in message.calls]
    json_chars = sum(len(_tojson(each)) for each in written)
    return (
        TEMPLATE_CHARS_MAX
        + CONTENT_REPEAT_MAX * content
        + JSON_REPEAT_MAX * json_chars
        + MESSAGE_CHARS_MAX * (len(messages) + len(written))
    )


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks training targets; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """As Hugging Face compiles chat templates, plus a bound on repetition."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        del self.globals["lipsum"]  # writes as much filler as it is asked for

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic on numbers: `'a' * 10**9` would fill the memory in one step."""
        numbers = all(isinstance(side, int | float) for side in (left, right))
        if operator == "**" or not (numbers or _short(operator, left, right)):
            raise TemplateRefusedError(f"the chat template uses {operator!r} beyond its bounds")
        return super().call_binop(context, operator, left, right)


def _short(operator: str, left: Any, right: Any) -> bool:
    if operator == "*" and isinstance(left, str) and isinstance(right, int):
        return len(left) * right <= MESSAGE_CHARS_MAX
    return False


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusedError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates pass it by position or name
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - as above
) -> str:
    # Jinja's own filter escapes for HTML, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
