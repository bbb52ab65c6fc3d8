"""Structured output in Anthropic's dialect: `output_config.format`, and the older `output_format`.

Its one kind is a JSON schema, which is always held to, or refused.
"""

from gateway.anthropic.thinking import read_effort
from gateway.fields import Fields, bad, missing
from gateway.structure import Structure, only_one, take_schema
from gateway.thinking import Effort


def read_output(fields: Fields) -> tuple[Structure | None, Effort | None]:
    """Take both fields: what the answer must be, and how hard it is worked for.

    Raises RefusedError.
    """
    old = _format(fields, "output_format")
    config = fields.nested("output_config")
    if config is None:
        return old, None
    effort = read_effort(config)
    structure = only_one([_format(config, "format"), old])
    _refuse_unknown(config)
    return structure, effort


def _format(fields: Fields, name: str) -> Structure | None:
    asked = fields.nested(name)
    if asked is None:
        return None
    if asked.required_text("type") != "json_schema":
        raise bad(asked.at("type"), "must be 'json_schema'")
    structure = take_schema(asked, "schema")
    if structure is None:
        raise missing(asked.at("schema"))
    _refuse_unknown(asked)
    return structure


def _refuse_unknown(fields: Fields) -> None:
    name = fields.first_left()
    if name is not None:
        raise bad(fields.at(name), "Extra inputs are not permitted")
