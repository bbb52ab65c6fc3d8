"""A provider's server-sent events, whatever pieces they come in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.providers.event_stream import EventParser, EventStreamError, ServerEvent

LINES = st.lists(
    st.sampled_from(
        [
            "data: a",
            "data:b",
            "data",
            "event: x",
            "event",
            ": ping",
            "id: 1",
            "retry: 5",
            "",
            "",
            "é",
        ]
    ),
    max_size=14,
)


def reference(lines: list[str]) -> list[ServerEvent]:
    """The standard's algorithm, over whole lines."""
    events: list[ServerEvent] = []
    name, data = "", list[str]()
    for line in lines:
        if not line:
            if data:
                events.append(ServerEvent(name, "\n".join(data)))
            name, data = "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            name = value
    return events


@given(LINES, st.lists(st.sampled_from(["\n", "\r\n", "\r"])), st.booleans(), st.data())
def test_events_are_those_of_the_standard_in_whatever_pieces(lines, ends, mark, data) -> None:
    text = ""
    for number, line in enumerate(lines):
        end = ends[number % len(ends)] if ends else "\n"
        if text.endswith("\r") and not line and end == "\n":
            end = "\r"  # a bare CR and an LF after it would be one end
        text += line + end
    raw = ("\ufeff" if mark else "").encode() + text.encode()
    parser = EventParser()
    events: list[ServerEvent] = []
    while raw:
        size = data.draw(st.integers(1, len(raw)))
        events += parser.feed(raw[:size])
        assert not list(parser.feed(b""))
        raw = raw[size:]
    assert events == reference(lines)


def test_an_event_without_end_and_bytes_that_are_no_text_are_errors() -> None:
    with pytest.raises(EventStreamError, match="over 100 bytes"):
        list(EventParser(event_bytes_max=100).feed(b"data: " + b"x" * 200))
    parser = EventParser(event_bytes_max=100)
    with pytest.raises(EventStreamError):
        list(parser.feed(b"data: x\n" * 50))
    parser = EventParser(event_bytes_max=100)
    for _ in range(500):  # comments are not held
        list(parser.feed(b": ping\n"))
    assert list(parser.feed(b"data: x\n\n")) == [ServerEvent("", "x")]
    with pytest.raises(EventStreamError, match="UTF-8"):
        list(EventParser().feed(b"data: \xff\n"))
