"""The bounds of a JSON schema."""

import json

import pytest

from text.json_schema import DEPTH_MAX, SchemaError, read_schema


def refusal(schema):
    with pytest.raises(SchemaError) as raised:
        read_schema(schema if isinstance(schema, str) else json.dumps(schema))
    return str(raised.value)


def nested(depth):
    return '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)


def test_a_schema_is_an_object_of_json():
    assert read_schema('{"type": "string"}') == {"type": "string"}
    assert refusal("true") == "must be a JSON object"
    assert refusal('{"a": 1e999}').startswith("is not valid JSON")
    assert refusal("[" * 50_000).startswith("is not valid JSON")
    assert refusal('{"a": "\ud800"}').startswith("is not valid JSON")
    assert refusal({"a": "x" * 131_072}) == "is over 131072 bytes"


def test_options_of_the_library_are_not_the_callers():
    assert refusal({"x-guidance": {"lenient": True}}) == "the keyword 'x-guidance' is not supported"


def test_depth_is_bounded():
    assert read_schema(nested(DEPTH_MAX))
    assert refusal(nested(DEPTH_MAX + 1)) == "is nested deeper than 100 levels"


def test_properties_are_counted_over_all_objects():
    def objects(count):
        each = {"properties": {f"p{i}": {} for i in range(100)}}
        return {"$defs": {f"d{i}": each for i in range(count)}}

    assert read_schema(json.dumps(objects(10)))
    assert refusal(objects(11)) == "has over 1000 properties"


@pytest.mark.parametrize("multiple", [0.001, 1e-10, 1, 10_000, 9_999, 1e4, 0, -5, True, "7"])
def test_multiples_of_few_digits_pass(multiple):
    assert read_schema(json.dumps({"multipleOf": multiple}))


@pytest.mark.parametrize("multiple", [10_007, 1e5, 1e300, 0.30000000000000004, 10**40])
def test_multiples_of_many_digits_are_refused(multiple):
    assert "'multipleOf' is too large" in refusal({"items": [{"multipleOf": multiple}]})


def test_multiples_that_are_small_alone_may_be_too_large_together():
    assert "'multipleOf' is too large" in refusal(
        {"allOf": [{"multipleOf": 97}, {"multipleOf": 101}, {"multipleOf": 89}]}
    )


def test_a_property_may_have_the_name_of_a_keyword():
    assert read_schema('{"properties": {"multipleOf": {}, "required": {}, "minProperties": {}}}')
    assert read_schema('{"properties": [1], "required": "a"}')


def test_different_keys_are_not_counted():
    assert read_schema('{"minProperties": 1}')
    assert read_schema('{"minProperties": 2, "required": ["a", "b"]}')
    assert "'minProperties'" in refusal({"minProperties": 2})
    assert "'minProperties'" in refusal({"minProperties": 3, "required": ["a", "b"]})
