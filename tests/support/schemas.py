"""JSON schemas made from dice: what the grammar compiler promises to hold an answer to.

Every one of them can be satisfied. Lengths and counts are small, so that answers end.
"""

from random import Random
from typing import Any

Schema = dict[str, Any]

WORDS = (
    "red",
    "naïve",
    "한국어",
    "🤦🏽‍♂️",
    'a "quote"',
    "back\\slash",
    "tab\there",
    "x",
    "two words",
    "é",
)
NAMES = (
    "name",
    "age",
    "tags",
    "größe",
    "이름",
    "a b",
    "isOpen",
    "$ref",
    "",
    "x-1",
    "nested",
    "type",
)
PATTERNS = ("^[a-z]{1,6}$", "^\\d{3}-\\d{4}$", "^(yes|no|maybe)$", "^[A-Z][a-z]+$", "^é+$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4")


def a_schema(dice: Random) -> Schema:
    """One whose root is an object, as most are."""
    schema = an_object(dice, depth=3)
    if dice.random() < 0.2:
        schema = {"anyOf": [schema, an_object(dice, depth=2)]}
    if dice.random() < 0.2:
        return {"$defs": {"inner": schema}, "type": "object", **_wrapping(dice)}
    return schema


def any_schema(dice: Random, depth: int = 3) -> Schema:
    kinds = [a_string, an_integer, a_number, a_constant, an_enum, a_boolean]
    if depth:
        kinds += [
            lambda dice: an_object(dice, depth - 1),
            lambda dice: an_array(dice, depth - 1),
            lambda dice: a_union(dice, depth - 1),
        ]
    return dice.choice(kinds)(dice)


def an_object(dice: Random, depth: int) -> Schema:
    names = dice.sample(NAMES, dice.randint(1, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: any_schema(dice, depth) for name in names},
        "required": dice.sample(names, dice.randint(0, len(names))),
        "additionalProperties": False,
    }
    if dice.random() < 0.3:
        schema |= {"title": "A thing", "description": "says nothing"}
    return schema


def an_array(dice: Random, depth: int) -> Schema:
    least = dice.randint(0, 2)
    schema: Schema = {
        "type": "array",
        "items": any_schema(dice, depth),
        "minItems": least,
        "maxItems": least + dice.randint(0, 2),
    }
    if dice.random() < 0.2:
        schema["prefixItems"] = [any_schema(dice, 0)]
        schema["maxItems"] = max(1, schema["maxItems"])
    return schema


def a_union(dice: Random, depth: int) -> Schema:
    return {"anyOf": [any_schema(dice, depth) for _ in range(dice.randint(1, 3))]}


def a_string(dice: Random) -> Schema:
    roll = dice.random()
    if roll < 0.25:
        return {"type": "string", "pattern": dice.choice(PATTERNS)}
    if roll < 0.4:
        return {"type": "string", "format": dice.choice(FORMATS)}
    least = dice.randint(0, 5)
    return {"type": "string", "minLength": least, "maxLength": least + dice.randint(0, 12)}


def an_integer(dice: Random) -> Schema:
    low = dice.randint(-1000, 1000)
    schema: Schema = {"type": "integer", "minimum": low, "maximum": low + dice.randint(10, 500)}
    if dice.random() < 0.2:
        schema["multipleOf"] = dice.choice((2, 5, 7))
    return schema


def a_number(dice: Random) -> Schema:
    low = dice.randint(-50, 50)
    upper = "exclusiveMaximum" if dice.random() < 0.5 else "maximum"
    return {"type": "number", "minimum": low, upper: low + dice.randint(1, 9)}


def a_boolean(dice: Random) -> Schema:
    return {"type": dice.choice(["boolean", "null", ["boolean", "null"]])}


def a_constant(dice: Random) -> Schema:
    return {"const": dice.choice([*WORDS, 0, -7, 2.5, True, None, [1, "x"], {"k": []}])}


def an_enum(dice: Random) -> Schema:
    return {"enum": dice.sample([*WORDS, 1, 2, None, True, 1.5], dice.randint(1, 6))}


def _wrapping(dice: Random) -> Schema:
    inner = {"$ref": "#/$defs/inner"}
    wrapped = dice.choice([inner, {"type": "array", "items": inner, "maxItems": 2}])
    return {"properties": {"it": wrapped}, "required": ["it"], "additionalProperties": False}
