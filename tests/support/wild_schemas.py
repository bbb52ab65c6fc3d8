"""JSON schemas of keywords thrown together: most mean little, and some contradict themselves.

None of them is refused for its form; whether it can be held to is the compiler's to say.
"""

from collections.abc import Callable
from random import Random
from typing import Any

Schema = dict[str, Any]

TYPES = ("string", "integer", "number", "object", "array", "boolean", "null")
VALUES = ("a", "bb", 1, 2.5, None, True, [1], {"a": "x"}, -3)
LEAVES: tuple[Any, ...] = (
    {},
    True,
    {"type": "string", "maxLength": 4},
    {"type": "integer"},
    {"const": [1]},
    {"enum": ["a", 1, None]},
)


def a_wild_schema(dice: Random, depth: int = 3) -> Schema:
    keywords = dice.sample(sorted(KEYWORDS), dice.randint(1, 4))
    schema = {keyword: KEYWORDS[keyword](dice, depth) for keyword in keywords}
    return schema | {"$defs": {"q": _inner(dice, depth)}}


def _inner(dice: Random, depth: int) -> Any:
    return a_wild_schema(dice, depth - 1) if depth > 1 else dice.choice(LEAVES)


def _some(dice: Random, depth: int, most: int) -> list[Any]:
    return [_inner(dice, depth) for _ in range(dice.randint(1, most))]


def _types(dice: Random) -> str | list[str]:
    return dice.sample(TYPES, 2) if dice.random() < 0.3 else dice.choice(TYPES)


KEYWORDS: dict[str, Callable[[Random, int], Any]] = {
    "type": lambda dice, _: _types(dice),
    "properties": lambda dice, depth: {
        name: _inner(dice, depth) for name in dice.sample("abcé", 2)
    },
    "required": lambda dice, _: dice.sample("abcz", dice.randint(0, 2)),
    "additionalProperties": lambda dice, depth: dice.choice([True, False, _inner(dice, depth)]),
    "patternProperties": lambda dice, depth: {dice.choice(["^a", "b$"]): _inner(dice, depth)},
    "maxProperties": lambda dice, _: dice.randint(0, 3),
    "items": _inner,
    "prefixItems": lambda dice, depth: _some(dice, depth, 2),
    "minItems": lambda dice, _: dice.randint(0, 3),
    "maxItems": lambda dice, _: dice.randint(0, 3),
    "anyOf": lambda dice, depth: _some(dice, depth, 3),
    "allOf": lambda dice, depth: _some(dice, depth, 2),
    "oneOf": lambda dice, depth: _some(dice, depth, 2),
    "enum": lambda dice, _: dice.sample(VALUES, dice.randint(1, 4)),
    "const": lambda dice, _: dice.choice(VALUES),
    "minLength": lambda dice, _: dice.randint(0, 3),
    "maxLength": lambda dice, _: dice.randint(0, 5),
    "pattern": lambda dice, _: dice.choice(["^a", "b$", "[0-9]{2}", "^(x|y)*$", "é"]),
    "format": lambda dice, _: dice.choice(["date", "ipv4", "uuid"]),
    "minimum": lambda dice, _: dice.choice([0, 1.5, -3, 10]),
    "exclusiveMaximum": lambda dice, _: dice.choice([9, 50, 7.25]),
    "multipleOf": lambda dice, _: dice.choice([1, 2, 3, 5]),
    "$ref": lambda dice, _: dice.choice(["#/$defs/q", "#"]),
}
