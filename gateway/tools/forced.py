"""The grammar that makes an answer call a tool, and the form that its text then has.

    one call of a tool that is known   its arguments, and nothing else   bare
    one call of any of several         {"name": …, "arguments": {…}}     object
    one or more calls                  [{"name": …, "arguments": {…}}]   list

JSON and not the model's own marks, so that the same text is forced of every model, and parses
whatever its vocabulary. A tool's schema moves into `$defs`; its references to itself move too.
"""

from typing import Any, Literal

import msgspec

from core.protocol import Grammar
from gateway.toolbox import JSONObject, Tool, Toolbox

FORCED_CALLS_MAX = 16  # of one array: a small model may find no end of its own

_SCHEMAS_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
_DATA = frozenset({"const", "enum", "default", "examples"})
# Beside these, what `properties` does not name may be allowed by something else.
_ALLOWING = frozenset({"$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties"})


def forced_form(toolbox: Toolbox) -> Literal["bare", "object", "list"]:
    """What a forced answer consists of."""
    if toolbox.parallel:
        return "list"
    return "bare" if len(toolbox.callable) == 1 else "object"


def forced_grammar(toolbox: Toolbox | None) -> Grammar | None:
    """None where no call is forced."""
    if toolbox is None or toolbox.mode != "required":
        return None
    form = forced_form(toolbox)
    if form == "bare":
        schema = arguments_schema(toolbox.callable[0])
    else:
        schema = calls_schema(toolbox, several=form == "list")
    return Grammar(kind="json_schema", text=as_text(schema))


def calls_schema(toolbox: Toolbox, *, several: bool, strict_only: bool = False) -> JSONObject:
    """Of a call as an object, or of an array of some.

    Where `strict_only`, other tools' arguments may be any object.
    """
    one_of_them: JSONObject = {"anyOf": [_call(i, tool) for i, tool in enumerate(toolbox.callable)]}
    schema = one_of_them
    if several:
        schema = {
            "type": "array",
            "items": one_of_them,
            "minItems": 1,
            "maxItems": FORCED_CALLS_MAX if toolbox.parallel else 1,
        }
    moved = {
        str(i): {"type": "object"}
        if strict_only and not tool.strict
        else _moved(arguments_schema(tool), f"#/$defs/{i}")
        for i, tool in enumerate(toolbox.callable)
    }
    return {**schema, "$defs": moved}


def arguments_schema(tool: Tool) -> JSONObject:
    """The schema, which says that it is an object, and takes nothing that it does not name."""
    schema = {"type": "object", **tool.parameters}
    if not _ALLOWING & schema.keys():
        schema.setdefault("additionalProperties", False)
    return schema


def as_text(schema: JSONObject) -> str:
    """For a grammar."""
    return msgspec.json.encode(schema).decode()


def _call(number: int, tool: Tool) -> JSONObject:
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.name},
            "arguments": {"$ref": f"#/$defs/{number}"},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, root: str) -> Any:
    """The schema as it must read when its root is at `root`."""
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved: JSONObject = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = root + value[1:]
        elif key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            moved[key] = {name: _moved(each, root) for name, each in value.items()}
        else:
            moved[key] = value if key in _DATA else _moved(value, root)
    return moved
