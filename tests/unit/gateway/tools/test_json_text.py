"""The scanner of one object agrees with a JSON reader, and knows where the object ends."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tools.json_text import DEPTH_MAX, ObjectScanner

bits = st.sampled_from(
    [
        *(
            "{",
            "}",
            "[",
            "]",
            ",",
            ":",
            '"a"',
            '"',
            "\\",
            "\\u00e9",
            "\\u12",
            "\\x",
            "0",
            "-",
            "1.5",
        ),
        *("e5", "true", "nul", "null", " ", "\n", "é", "\x01", "\x7f", '"b":', '{"c":', "01", "."),
    ]
)
objects = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


def scan(text: str) -> tuple[ObjectScanner, int]:
    scanner = ObjectScanner()
    return scanner, scanner.scan(text, 0, len(text))


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except ValueError:
        return False


def _refuse(name: str) -> None:
    raise ValueError(name)


@given(value=st.dictionaries(st.text(max_size=4), objects), indent=st.sampled_from([None, 2]))
def test_every_object_is_read_to_its_end(value: dict[str, object], indent: int | None) -> None:
    text = json.dumps(value, indent=indent)
    scanner, at = scan(text + "}more")
    assert (scanner.done, scanner.broken, at) == (True, False, len(text))


@given(parts=st.lists(bits, max_size=10))
def test_what_is_done_is_json_and_json_is_done(parts: list[str]) -> None:
    text = "{" + "".join(parts)
    scanner, at = scan(text)
    assert scanner.done == (scanner.done and is_object(text[:at]))
    assert not (is_object(text) and not scanner.done)


@given(parts=st.lists(bits, max_size=10), cut=st.integers(0, 30))
def test_pieces_make_no_difference(parts: list[str], cut: int) -> None:
    text = "{" + "".join(parts)
    whole, end = scan(text)
    scanner = ObjectScanner()
    at = scanner.scan(text, 0, min(cut, len(text)))
    at = scanner.scan(text, at, len(text))
    assert (at, scanner.done, scanner.broken) == (end, whole.done, whole.broken)


@pytest.mark.parametrize(
    "text",
    ["[]", '"a"', "5", "", "{]", "{,", '{"a"}', '{"a":1,}', "{1:2}", '{"a":[1 2]}', '{"a"::1}'],
)
def test_what_is_no_object_is_never_done(text: str) -> None:
    assert not scan(text)[0].done


def test_depth_is_bounded() -> None:
    inner = DEPTH_MAX - 1
    assert scan('{"a":' + "[" * inner + "]" * inner + "}")[0].done
    assert scan('{"a":' + "[" * DEPTH_MAX)[0].broken
