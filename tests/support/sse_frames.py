"""Splits recorded bytes of an event stream into frames, refusing whatever an SDK might forgive."""

import json
from typing import Any, NamedTuple


class GrammarError(AssertionError):
    """The recorded stream breaks its dialect's grammar; the message says where and how."""


class Frame(NamedTuple):
    """One frame: a comment has only `comment`; an event has `data` and, in one dialect, `event`."""

    comment: str | None
    event: str | None
    data: str


def split(raw: bytes, *, cut: bool) -> list[Frame]:
    """All frames. With `cut`, the client left: an incomplete last frame is dropped."""
    blocks = raw.split(b"\n\n")
    tail = blocks.pop()
    expect(cut or not tail, f"the stream ends inside a frame: {tail!r}")
    return [_frame(block) for block in blocks]


def expect(condition: bool, reason: str) -> None:  # noqa: FBT001 - reads as an assertion
    if not condition:
        raise GrammarError(reason)


def expect_keys(value: Any, keys: set[str], where: str) -> None:
    expect(isinstance(value, dict), f"{where} is not an object: {value!r}")
    expect(set(value) == keys, f"{where} has keys {sorted(value)}, expected {sorted(keys)}")


def expect_count(value: Any, where: str) -> None:
    expect(type(value) is int and value >= 0, f"{where} is not a count: {value!r}")


def parse(data: str) -> dict[str, Any]:
    try:
        value: Any = json.loads(data, parse_constant=_no_constant)
    except ValueError as error:
        raise GrammarError(f"data is not JSON: {data!r}") from error
    expect(isinstance(value, dict), f"data is not an object: {data!r}")
    return dict(value)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _frame(block: bytes) -> Frame:
    try:
        text = block.decode()
    except UnicodeDecodeError as error:
        raise GrammarError(f"a frame is not UTF-8: {block!r}") from error
    lines = text.split("\n")
    # Some readers split decoded text at every Unicode line end.
    expect(lines == text.splitlines(), f"a frame has another line end than LF: {text!r}")
    if lines[0].startswith(":"):
        expect(len(lines) == 1, f"a comment shares its frame: {text!r}")
        return Frame(lines[0][1:].strip(), None, "")
    event = None
    if lines[0].startswith("event: "):
        event = lines.pop(0).removeprefix("event: ")
    expect(len(lines) == 1, f"a frame has {len(lines)} lines of data: {text!r}")
    expect(lines[0].startswith("data: "), f"a frame without data: {text!r}")
    return Frame(None, event, lines[0].removeprefix("data: "))
