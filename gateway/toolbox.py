"""Tools that a caller offers, the calls a model makes of them, and what both must look like.

Shared by both dialects: each reads its own fields, and says here what it has read. Nothing
here knows a dialect, a template or a model.
"""

import re
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from core.errors import RefusedError
from gateway.fields import bad, wrong_kind

TOOLS_MAX = 128
CALLS_MAX = 128  # of one turn
# Of a schema or of arguments: objects and arrays within one another, and values altogether.
SCHEMA_DEPTH_MAX = 32
SCHEMA_VALUES_MAX = 20_000
NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
CALL_ID = re.compile(r"[a-zA-Z0-9_.:-]{1,256}")

JSONObject = dict[str, Any]


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """One function. `parameters` is a JSON schema of an object, as its caller wrote it.

    `strict` promises that arguments fit it, whether or not a call is forced.
    """

    name: str
    description: str = ""
    parameters: JSONObject = msgspec.field(default_factory=dict)
    strict: bool = False


class Toolbox(msgspec.Struct, frozen=True, kw_only=True):
    """What may be called. `callable` is a part of `tools`, in their order, never empty.

    `auto` leaves it to the model, `required` wants at least one call, `none` allows none: the
    model is then not told of the tools.
    """

    tools: tuple[Tool, ...]
    mode: Literal["auto", "required", "none"] = "auto"
    callable: tuple[Tool, ...]
    parallel: bool = True  # more than one call in an answer


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call in a turn of the past. `id` names it to its result."""

    id: str
    name: str
    arguments: JSONObject


class Unanswered:
    """Calls of the last assistant's turn whose results have not come. Each has one, at once."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # of the calls, by their ids

    def called(self, call: ToolCall, path: str) -> None:
        """A call was made. Raises RefusedError when another of the turn has its id."""
        if call.id in self._names:
            raise bad(path, f"two tool calls have the id '{call.id}'")
        self._names[call.id] = call.name

    def answered(self, call_id: str, path: str) -> str:
        """The name of the tool whose result came. Raises RefusedError for a call not made."""
        name = self._names.pop(call_id, None)
        if name is None:
            raise bad(path, f"'{call_id}' is no tool call of the assistant message before it")
        return name

    def settled(self, path: str) -> None:
        """Something else follows. Raises RefusedError when a result is missing."""
        if self._names:
            listed = ", ".join(f"'{call_id}'" for call_id in self._names)
            raise bad(path, f"these tool calls have no results right after them: {listed}")


def checked_name(path: str, name: str) -> str:
    """A tool's name. Raises RefusedError."""
    if not NAME.fullmatch(name):
        raise bad(path, "must be 1 to 128 letters, digits, underscores and dashes")
    return name


def checked_id(path: str, call_id: str) -> str:
    """A call's id, ours or another's. Raises RefusedError."""
    if not CALL_ID.fullmatch(call_id):
        raise bad(path, "must be 1 to 256 letters, digits and _ . : -")
    return call_id


def checked_schema(path: str, value: object, *, typed: bool) -> JSONObject:
    """The schema of a tool's arguments; `typed` wants it to say so itself. Raises RefusedError."""
    schema = checked_object(path, value)
    if schema.get("type", None if typed else "object") != "object":
        raise bad(f"{path}.type", "must be 'object'")
    return schema


def checked_object(path: str, value: object) -> JSONObject:
    """A JSON object that is neither too deep nor too large. Raises RefusedError."""
    if type(value) is not dict:
        raise wrong_kind(path, "an object", value)
    level: list[object] = [value]
    values = 0
    for _ in range(SCHEMA_DEPTH_MAX):
        inside = [inner for each in level for inner in _inside(each)]
        values += len(inside)
        if values > SCHEMA_VALUES_MAX:
            raise bad(path, f"has over {SCHEMA_VALUES_MAX} values")
        level = [each for each in inside if isinstance(each, dict | list)]
        if not level:
            return value
    raise bad(path, f"is nested more than {SCHEMA_DEPTH_MAX} deep")


def distinct(tools: list[Tool], path: str) -> tuple[Tool, ...]:
    """Raises RefusedError when two have one name."""
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise bad(path, f"two tools have the name '{tool.name}'")
        seen.add(tool.name)
    return tuple(tools)


def chosen(tools: tuple[Tool, ...], names: list[str], path: str) -> tuple[Tool, ...]:
    """The tools that are named. Raises RefusedError for a name that no tool has."""
    unknown = set(names) - {tool.name for tool in tools}
    if unknown:
        raise bad(path, f"there is no tool '{min(unknown)}' in 'tools'")
    return tuple(tool for tool in tools if tool.name in names)


def no_tools(path: str) -> RefusedError:
    """A choice of tools where there are none."""
    return bad(path, "is only allowed when 'tools' are given")


def _inside(value: object) -> Iterable[object]:
    inner = value.values() if isinstance(value, dict) else value
    assert isinstance(inner, Iterable)
    return inner
