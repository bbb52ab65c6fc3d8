"""Server-sent events: one line of JSON, whatever the text holds."""

import json

from hypothesis import given

from gateway.sse import data_frame, json_line, named_frame
from tests.support.dialect_events import texts


@given(text=texts)
def test_json_is_one_line_to_every_reader(text: str) -> None:
    encoded = json_line({"text": text})
    assert encoded.decode().splitlines() == [encoded.decode()]
    assert json.loads(encoded) == {"text": text}


def test_line_ends_beyond_ascii_are_escaped() -> None:
    assert json_line("é\x85\u2028\u2029") == '"é\\u0085\\u2028\\u2029"'.encode()


def test_frames() -> None:
    assert data_frame(b"{}") == b"data: {}\n\n"
    assert named_frame(b"ping", b"{}") == b"event: ping\ndata: {}\n\n"
