"""Grammars made to hurt: refused with a reason, or held to within bounds, and never more.

`REFUSED` maps a name to a grammar that must not compile, and a part of why; `BOUNDED` to one
that compiles, and may be any trouble to follow.
"""

import json
from typing import Any

from core.protocol import Grammar


def schema(value: Any) -> Grammar:
    return Grammar(kind="json_schema", text=value if isinstance(value, str) else json.dumps(value))


def regex(text: str) -> Grammar:
    return Grammar(kind="regex", text=text)


def lark(text: str) -> Grammar:
    return Grammar(kind="lark", text=text)


def _nested(depth: int) -> str:
    return '{"properties":{"a":' * depth + "{}" + "}}" * depth


def _doubling(keyword: str, depth: int) -> dict[str, Any]:
    """Each definition is twice the one before."""
    definitions: dict[str, Any] = {"d0": {"type": "object", "properties": {"x": {"type": "null"}}}}
    for i in range(1, depth):
        definitions[f"d{i}"] = {keyword: [{"$ref": f"#/$defs/d{i - 1}"}] * 2}
    return {"$defs": definitions, "$ref": f"#/$defs/d{depth - 1}"}


def _product(depth: int) -> dict[str, Any]:
    """Four to the power of `depth` combinations."""
    each = [
        {
            "anyOf": [
                {"type": "object", "properties": {f"a{i}": {"const": j}}, "required": [f"a{i}"]}
                for j in range(4)
            ]
        }
        for i in range(depth)
    ]
    return {"allOf": each}


_LOOP = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
_TREE = {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#"}}}}
_ENDLESS = {
    "$defs": {"l": {"type": "array", "items": {"$ref": "#/$defs/l"}, "minItems": 1}},
    "$ref": "#/$defs/l",
}

REFUSED: dict[str, tuple[Grammar, str]] = {
    "exponential allOf of anyOf": (schema(_product(12)), "too"),
    "circular $ref": (schema(_LOOP), "no text can satisfy it"),
    "$ref to itself": (schema({"$ref": "#"}), "no text can satisfy it"),
    "$ref to elsewhere": (schema({"$ref": "https://example.com/s.json"}), "not present"),
    "$ref to nothing": (schema({"$ref": "#/$defs/none"}), "does not exist"),
    "deep nesting": (schema(_nested(60)), "nested deeper than 100 levels"),
    "very deep nesting": (schema(_nested(3_000)), "JSON"),
    "huge schema": (schema({"description": "x" * 200_000}), "over 131072 bytes"),
    "enormous enum": (schema({"enum": [f"value {i}" for i in range(50_000)]}), "over 131072 bytes"),
    "many properties": (schema({"properties": {f"p{i}": {} for i in range(3_000)}}), "properties"),
    "prime multipleOf": (schema({"type": "integer", "multipleOf": 999_983}), "'multipleOf'"),
    "primes multiplied": (
        schema({"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 89, 83)]}),
        "'multipleOf'",
    ),
    "minimum over maximum": (schema({"type": "integer", "minimum": 5, "maximum": 1}), "minimum"),
    "const against enum": (schema({"const": 1, "enum": [2]}), "Unsatisfiable"),
    "const against type": (schema({"type": "string", "const": 5}), "Unsatisfiable"),
    "NaN": (schema('{"type": "number", "maximum": NaN}'), "not valid JSON"),
    "infinity": (schema('{"type": "number", "maximum": 1e999}'), "not valid JSON"),
    "no object": (schema("[]"), "must be a JSON object"),
    "no JSON": (schema("{'type': 'string'}"), "not valid JSON"),
    "lone surrogate": (schema('{"const": "\\ud800"}'), "not valid JSON"),
    "unsupported keyword": (schema({"type": "array", "uniqueItems": True}), '"uniqueItems"'),
    "unknown type": (schema({"type": "word"}), "word"),
    "unknown format": (schema({"type": "string", "format": "nope"}), "nope"),
    "counting keys": (schema({"type": "object", "minProperties": 9_999}), "'minProperties'"),
    "options of the library": (schema({"x-guidance": {"whitespace_pattern": " *"}}), "x-guidance"),
    "pattern that looks ahead": (schema({"type": "string", "pattern": "(?=a)b"}), "look-ahead"),
    "pattern that is none": (schema({"type": "string", "pattern": "("}), "unclosed group"),
    "regex nested deep": (regex("(" * 5_000 + "a" + ")" * 5_000), "invalid regex"),
    "regex of nothing": (regex("[^\\x00-\\x{10FFFF}]"), "no text can satisfy it"),
    "empty regex": (regex(""), "is empty"),
    "empty choice": (Grammar(kind="choice", text="[]"), "at least one string"),
    "lark nested deep": (lark("start: " + "(" * 20_000 + '"a"' + ")" * 20_000), "nested"),
    "lark without a base": (lark("start: start"), "no text can satisfy it"),
    "lark terminals doubled": (
        lark("start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(30)) + 'R30: "a"'),
        "too big",
    ),
    "lark of token ids": (lark("start: <[0-16]>"), "'<' names a token"),
    "lark without bounds": (lark('start: %json {"x-guidance": {}}'), "x-guidance"),
}

BOUNDED: dict[str, Grammar] = {
    "allOf doubled": schema(_doubling("allOf", 24)),
    "anyOf doubled": schema(_doubling("anyOf", 24)),
    "tree of itself": schema(_TREE),
    "tree without leaves": schema(_ENDLESS),
    "maxLength of a billion": schema({"type": "string", "maxLength": 10**9}),
    "minLength of a billion": schema({"type": "string", "minLength": 10**9}),
    "minItems of a million": schema({"type": "array", "items": {}, "minItems": 10**6}),
    "catastrophic pattern": schema({"type": "string", "pattern": "^(a+)+$"}),
    "exponential pattern": schema({"type": "string", "pattern": "^(a|b)*a(a|b){20}$"}),
    "nested repetition": schema({"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"}),
    "white space": schema({"type": "array", "items": {"const": 1}}),
    "escaped keys": schema(
        {"properties": {"\u0000\n\U0001f600": {}}, "required": ["\u0000\n\U0001f600"]}
    ),
    "unknown keyword": schema({"type": "object", "x-unknown": [1, 2, 3]}),
    "large enum": schema({"enum": [f"value {i}" for i in range(7_000)]}),
    "tiny multipleOf": schema({"type": "number", "multipleOf": 1e-10}),
    "any JSON": schema("{}"),
    "regex of a million": regex("a{1000000}"),
    "regex squared": regex("(a{1000}){1000}"),
    "regex of many states": regex("(.{0,100}x){50}"),
    "regex ambiguous": regex("(x+x+)+y"),
    "regex of any letter": regex("\\p{L}{1,500}"),
    "lark ambiguous": lark('start: s\ns: s s | "a"\n'),
    "lark of nothing": lark('start: e*\ne: "a"*\n'),
    "lark doubled": lark(
        "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(60)) + 'r60: "a"'
    ),
    "lark of white space": lark('start: "a" "b"\n%ignore /[ \\n]+/\n'),
}
