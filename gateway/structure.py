"""What an answer's text must be, as a caller asked for it, and the field that said so.

Both dialects read their own fields into this. Whether a grammar can be held to is a question of
the model version's vocabulary, asked later (`gateway.grammars`); here is only what it is.
"""

from typing import Literal

import msgspec

from core.protocol import Grammar
from gateway.fields import Fields, bad, wrong_kind

GRAMMAR_CHARS_MAX = 128 * 1024
CHOICES_MAX = 5_000
CHOICE_CHARS_MAX = 4_096


class Structure(msgspec.Struct, frozen=True):
    """A grammar, and the path of its field for a refusal to name."""

    grammar: Grammar
    param: str


JSON_OBJECT = Grammar(kind="json_object")


def take_schema(fields: Fields, name: str, *, as_text: bool = False) -> Structure | None:
    """A JSON schema as an object; also as its text, where `as_text`."""
    value, path = fields.take(name), fields.at(name)
    if value is None:
        return None
    if as_text and isinstance(value, str):
        if len(value) > GRAMMAR_CHARS_MAX:
            raise bad(path, f"must be at most {GRAMMAR_CHARS_MAX} characters")
        return Structure(Grammar(kind="json_schema", text=value), path)
    if type(value) is not dict:
        raise wrong_kind(path, "an object or its text" if as_text else "an object", value)
    try:
        text = msgspec.json.encode(value).decode()
    except RecursionError as error:
        raise bad(path, "is nested too deeply") from error
    return Structure(Grammar(kind="json_schema", text=text), path)


def take_text(fields: Fields, name: str, kind: Literal["regex", "lark"]) -> Structure | None:
    """A regular expression, or a grammar in Lark's syntax."""
    text = fields.text(name, chars_max=GRAMMAR_CHARS_MAX)
    if text is None:
        return None
    if not text:
        raise bad(fields.at(name), "must not be empty")
    return Structure(Grammar(kind=kind, text=text), fields.at(name))


def take_choice(fields: Fields, name: str) -> Structure | None:
    """One of these strings, and nothing else."""
    if fields.says_nothing(name, ()):
        return None
    path = fields.at(name)
    choices = fields.strings(name, count_max=CHOICES_MAX, chars_max=CHOICE_CHARS_MAX)
    if not choices:
        raise bad(path, "must not be empty")
    text = msgspec.json.encode(choices).decode()
    return Structure(Grammar(kind="choice", text=text), path)


def only_one(asked: list[Structure | None]) -> Structure | None:
    """The one that was asked for. Raises RefusedError for a second."""
    found = [structure for structure in asked if structure is not None]
    if len(found) > 1:
        first, second, *_ = found
        raise bad(second.param, f"cannot be combined with {first.param}")
    return found[0] if found else None
