"""A `Grammar` as the library reads it (llguidance: https://github.com/guidance-ai/llguidance).

Invariants: text between the tokens of JSON is bounded, so that no answer is white space for
ever; a grammar speaks of text alone, never of token ids or control tokens. Pure.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
from llguidance import regex_to_lark

from core.protocol import Grammar
from text.json_schema import OPTIONS, SchemaError, read_schema

# What may stand between two tokens of JSON: nothing, a space, or one line break and indentation.
WHITE_SPACE = r" |\n[ \t]{0,24}"
TEXT_BYTES_MAX = 128 * 1024
CHOICES_MAX = 5_000

# Which ids spell the text is for the model to say: a token forced in its stead would leave no
# way around a token that is banned.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
_DIRECTIVES = frozenset({"%ignore", "%import", "%json", "%override"})
# Of a Lark grammar: literals and comments are passed over, the rest is looked at.
_LARK = re.compile(
    r'"(?:\\.|[^"\\\n])*"|(?://|\#)[^\n]*|/(?:\\.|[^/\\\n])+/|(?P<directive>%\w+)|(?P<special><)'
)


class GrammarError(ValueError):
    """The grammar cannot be compiled; the message says why, and fits after the field's name."""


def source(grammar: Grammar) -> str:
    """The library's own form. Raises GrammarError for what it would not refuse itself."""
    if len(grammar.text.encode(errors="replace")) > TEXT_BYTES_MAX:
        raise GrammarError(f"is over {TEXT_BYTES_MAX} bytes")
    try:
        return _SOURCES[grammar.kind](grammar.text)
    except SchemaError as error:
        raise GrammarError(str(error)) from error


def choice_text(choices: list[str]) -> str:
    """`Grammar.text` of a choice between these."""
    return msgspec.json.encode(choices).decode()


def _json_schema(text: str) -> str:
    grammar = {"name": "body", "json_schema": _with_options(read_schema(text))}
    return _grammars({"lark_grammar": f"{_OPTIONS}start: @body\n"}, grammar)


def _json_object(_: str) -> str:
    return _json_schema('{"type": "object"}')


def _regex(text: str) -> str:
    if not text:
        raise GrammarError("is empty")
    return _lark_source(f"start: /{regex_to_lark(text, 'd')}/\n")


def _choice(text: str) -> str:
    try:
        choices = msgspec.json.decode(text, type=list[str])
    except (msgspec.MsgspecError, UnicodeEncodeError) as error:
        raise GrammarError("is not a list of strings") from error
    if not choices or not all(choices):
        raise GrammarError("must have at least one string, and none that is empty")
    if len(choices) > CHOICES_MAX:
        raise GrammarError(f"has over {CHOICES_MAX} strings")
    return _lark_source(f"start: {' | '.join(map(_literal, choices))}\n")


def _literal(text: str) -> str:
    # Lark's strings are JSON's, but for this one character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _lark(text: str) -> str:
    if not text.strip():
        raise GrammarError("is empty")
    return _lark_source(_checked_lark(text))


def _checked_lark(text: str) -> str:
    """The grammar with our white space in its JSON schemas, which are held to our bounds."""
    pieces, position = [], 0
    while match := _LARK.search(text, position):
        pieces.append(text[position : match.end()])
        position = match.end()
        if match["special"]:
            raise GrammarError("'<' names a token: a grammar speaks of text alone")
        directive = match["directive"]
        if directive and directive not in _DIRECTIVES:
            raise GrammarError(f"'{directive}' is not supported")
        if directive == "%json":
            schema, position = _inline_schema(text, position)
            pieces.append(f" {msgspec.json.encode(_with_options(schema)).decode()}")
    return "".join([*pieces, text[position:]])


def _inline_schema(text: str, position: int) -> tuple[dict[str, Any], int]:
    start = len(text) - len(text[position:].lstrip())
    try:
        _, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise GrammarError("'%json' must be followed by a JSON schema") from error
    return read_schema(text[start:end]), end


def _with_options(schema: dict[str, Any]) -> dict[str, Any]:
    return schema | {OPTIONS: {"whitespace_pattern": WHITE_SPACE}}


def _lark_source(text: str) -> str:
    # Our line comes last, so that a position in a message is one in the caller's text.
    return _grammars({"lark_grammar": f"{text}\n{_OPTIONS}"})


def _grammars(*grammars: dict[str, Any]) -> str:
    return msgspec.json.encode({"grammars": grammars}).decode()


_SOURCES: dict[str, Callable[[str], str]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "lark": _lark,
}
