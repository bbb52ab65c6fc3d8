"""Headers that say where a request belongs, and what is not one."""

import pytest

from core.errors import RefusedError
from gateway.hints import CONVERSATION, NO_HINTS, TAGS, TAGS_MAX, TEXT_MAX, Hints, hints_of


def test_without_any_there_are_no_hints() -> None:
    assert hints_of([(b"accept", b"*/*")]) is NO_HINTS
    assert hints_of([], {}) is NO_HINTS


def test_a_conversation_and_tags() -> None:
    headers = [(CONVERSATION, b" c-1 "), (TAGS, b"team=search , env = a=b"), (TAGS, b"x=")]
    assert hints_of(headers) == Hints(
        conversation="c-1", tags={"team": "search", "env": "a=b", "x": ""}
    )


def test_metadata_are_tags_that_a_header_overrides() -> None:
    assert hints_of([(TAGS, b"a=1")], {"a": "2", "b": "3"}).tags == {"a": "1", "b": "3"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (CONVERSATION, b""),
        (CONVERSATION, b"a\tb"),
        (CONVERSATION, b"x" * (TEXT_MAX + 1)),
        (TAGS, b""),
        (TAGS, b"a"),
        (TAGS, b"=b"),
        (TAGS, b"a=1,,b=2"),
        (TAGS, b"a=1,a=2"),
        (TAGS, b"a=" + b"x" * (TEXT_MAX + 1)),
        (TAGS, b",".join(b"t%d=1" % at for at in range(TAGS_MAX + 1))),
    ],
)
def test_what_is_not_a_hint_is_refused_by_its_header(name: bytes, value: bytes) -> None:
    with pytest.raises(RefusedError) as caught:
        hints_of([(name, value)])
    assert caught.value.refusal.status == 400
    assert caught.value.refusal.param == name.decode()
