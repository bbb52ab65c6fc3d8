"""Structured output in OpenAI's dialect, and as vLLM extends it.

`response_format` is OpenAI's; `structured_outputs` and the older `guided_*` are vLLM's. All say
the same thing in other words, so that only one of them may be given. `strict` changes nothing:
a schema is always held to, or refused.
"""

import re

from core.errors import Code, refuse
from gateway.fields import Fields, bad, missing
from gateway.openai.generation import refuse_unknown
from gateway.structure import (
    JSON_OBJECT,
    Structure,
    only_one,
    take_choice,
    take_schema,
    take_text,
)

DESCRIPTION_CHARS_MAX = 16 * 1024
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# Ways to choose how vLLM does it; ours has one.
_WAYS = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")


def read_structure(fields: Fields) -> Structure | None:
    """Take every field that can ask for it. Raises RefusedError."""
    return only_one(
        [
            _response_format(fields),
            _structured_outputs(fields),
            take_schema(fields, "guided_json", as_text=True),
            take_text(fields, "guided_regex", "regex"),
            take_choice(fields, "guided_choice"),
            take_text(fields, "guided_grammar", "lark"),
        ]
    )


def _response_format(fields: Fields) -> Structure | None:
    asked = fields.nested("response_format")
    if asked is None:
        return None
    structure = None
    kind, path = asked.required_text("type"), asked.at("type")
    match kind:
        case "text":
            pass
        case "json_object":
            structure = Structure(JSON_OBJECT, path)
        case "json_schema":
            structure = _json_schema(asked)
        case "structural_tag" | "grammar" | "python":
            raise refuse(Code.UNSUPPORTED, f"{path}: '{kind}' is not supported here", param=path)
        case _:
            raise bad(path, "must be one of 'text', 'json_object', 'json_schema'")
    refuse_unknown(asked)
    return structure


def _json_schema(asked: Fields) -> Structure:
    named = asked.nested("json_schema")
    if named is None:
        raise missing(asked.at("json_schema"))
    name = named.required_text("name")
    if not _NAME.fullmatch(name):
        raise bad(named.at("name"), "must be 1 to 64 letters, digits, '_' or '-'")
    named.text("description", chars_max=DESCRIPTION_CHARS_MAX)
    named.boolean("strict")
    structure = take_schema(named, "schema")
    refuse_unknown(named)
    return structure or Structure(JSON_OBJECT, named.at("schema"))


def _structured_outputs(fields: Fields) -> Structure | None:
    asked = fields.nested("structured_outputs")
    if asked is None:
        return None
    for name in _WAYS:
        asked.neutral(name, (False,))
    found = [
        take_schema(asked, "json", as_text=True),
        take_text(asked, "regex", "regex"),
        take_choice(asked, "choice"),
        take_text(asked, "grammar", "lark"),
        Structure(JSON_OBJECT, asked.at("json_object")) if asked.boolean("json_object") else None,
    ]
    refuse_unknown(asked)
    structure = only_one(found)
    if structure is None:
        path = fields.at("structured_outputs")
        raise bad(path, "must have one of json, regex, choice, grammar, json_object")
    return structure
