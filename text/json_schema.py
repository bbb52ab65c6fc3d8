"""What a JSON schema may be before anything compiles it: the bounds, in the caller's words.

What a keyword means is the library's business (docs/structured-output.md); here is what it would
spend seconds or gigabytes on, and what it would let pass without holding to it. Pure.
"""

from collections.abc import Iterator
from decimal import Decimal
from math import lcm
from typing import Any

import msgspec

SCHEMA_BYTES_MAX = 128 * 1024
# Objects and arrays inside one another. The library refuses 128, and recurses for each.
DEPTH_MAX = 100
# Of all objects together; a thousand optional ones in a row are more than a parser's row holds.
PROPERTIES_MAX = 1_000
# The least common multiple of all `multipleOf` is the number of states of an automaton: a
# million takes 7 seconds and 400 MB to build (measured), this many 0.03 s.
MULTIPLES_MAX = 10_000
# Options for the library, hidden in a schema; ours would be overridden.
OPTIONS = "x-guidance"


class SchemaError(ValueError):
    """The schema cannot be held to; the message says why, and fits after the field's name."""


def read_schema(text: str) -> dict[str, Any]:
    """The schema as data. Raises SchemaError."""
    if len(text.encode(errors="replace")) > SCHEMA_BYTES_MAX:
        raise SchemaError(f"is over {SCHEMA_BYTES_MAX} bytes")
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError) as error:
        raise SchemaError(f"is not valid JSON: {error}") from error
    if not isinstance(schema, dict):
        raise SchemaError("must be a JSON object")
    if OPTIONS in schema:
        raise SchemaError(f"the keyword '{OPTIONS}' is not supported")
    _hold_bounds(schema)
    return schema


def _hold_bounds(schema: dict[str, Any]) -> None:
    properties, multiples = 0, 1
    for node in _objects(schema):
        named = node.get("properties")
        properties += len(named) if isinstance(named, dict) else 0
        multiples = lcm(multiples, _multiple(node.get("multipleOf")))
        _refuse_counting(node)
        if properties > PROPERTIES_MAX:
            raise SchemaError(f"has over {PROPERTIES_MAX} properties")
        if multiples > MULTIPLES_MAX:
            raise SchemaError(
                f"'multipleOf' is too large: the least common multiple of all of them, "
                f"without their decimal point, may be at most {MULTIPLES_MAX}"
            )


def _objects(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every object in it, whether it is a schema or data: a `$ref` may make a schema of any."""
    level: list[Any] = [schema]
    for _ in range(DEPTH_MAX):
        yield from (value for value in level if isinstance(value, dict))
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            return
    raise SchemaError(f"is nested deeper than {DEPTH_MAX} levels")


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _multiple(value: object) -> int:
    """Its digits without the decimal point; 1 for what is no positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        return 1
    _, digits, exponent = Decimal(str(value)).normalize().as_tuple()
    # A number with this many zeros is over MULTIPLES_MAX whatever else it has.
    zeros = "0" * min(max(int(exponent), 0), 9)
    return int("".join(map(str, digits)) + zeros)


def _refuse_counting(node: dict[str, Any]) -> None:
    """A grammar cannot tell that a key came twice, so it cannot count different ones."""
    least, required = node.get("minProperties"), node.get("required")
    named = len(required) if isinstance(required, list) else 0
    if isinstance(least, int) and least > max(1, named):
        raise SchemaError("'minProperties' is not supported beyond what 'required' names")
