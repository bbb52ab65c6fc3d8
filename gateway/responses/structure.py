"""Structured output as `text.format` asks for it, and the `text` that an answer repeats."""

import re
from typing import Any

from core.errors import Code, refuse
from gateway.fields import Fields, bad, missing
from gateway.openai.generation import refuse_unknown
from gateway.openai.structure import DESCRIPTION_CHARS_MAX
from gateway.structure import JSON_OBJECT, Structure, take_schema

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def read_text(fields: Fields) -> tuple[Structure | None, dict[str, Any]]:
    """Take `text`. Raises RefusedError."""
    text = fields.nested("text")
    if text is None:
        return None, {"format": {"type": "text"}}
    text.neutral("verbosity", ("medium",))
    structure, shown = _format(text)
    refuse_unknown(text)
    return structure, {"format": shown}


def _format(text: Fields) -> tuple[Structure | None, dict[str, Any]]:
    asked = text.nested("format")
    if asked is None:
        return None, {"type": "text"}
    kind, path = asked.required_text("type"), asked.at("type")
    structure: Structure | None = None
    shown: dict[str, Any] = {"type": kind}
    match kind:
        case "text":
            pass
        case "json_object":
            structure = Structure(JSON_OBJECT, path)
        case "json_schema":
            structure, more = _json_schema(asked)
            shown |= more
        case "grammar" | "python":
            raise refuse(Code.UNSUPPORTED, f"{path}: '{kind}' is not supported here", param=path)
        case _:
            raise bad(path, "must be one of 'text', 'json_object', 'json_schema'")
    refuse_unknown(asked)
    return structure, shown


def _json_schema(asked: Fields) -> tuple[Structure, dict[str, Any]]:
    name = asked.required_text("name")
    if not _NAME.fullmatch(name):
        raise bad(asked.at("name"), "must be 1 to 64 letters, digits, '_' or '-'")
    shown = {
        "name": name,
        "description": asked.text("description", chars_max=DESCRIPTION_CHARS_MAX),
        "strict": asked.boolean("strict"),
    }
    schema = asked.peek("schema")
    structure = take_schema(asked, "schema")
    if structure is None:
        raise missing(asked.at("schema"))
    return structure, {**shown, "schema": schema}
