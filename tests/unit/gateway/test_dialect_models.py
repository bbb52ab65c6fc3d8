"""Model lists in each dialect's shape."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import Code, RefusedError
from gateway import anthropic, openai
from gateway.conversation import ModelCard


def cards(count: int) -> list[ModelCard]:
    return [
        ModelCard(
            id=f"m{i}", created_ms=1_790_000_000_123, context_tokens=8192, output_tokens_max=4096
        )
        for i in range(count)
    ]


def page(count: int, **query: str) -> dict[str, Any]:
    listed: dict[str, Any] = json.loads(anthropic.models_json(cards(count), query))
    return listed


def ids(listed: dict[str, Any]) -> list[str]:
    return [model["id"] for model in listed["data"]]


def test_openai_s_list_and_one_of_it() -> None:
    model = {"id": "m0", "object": "model", "created": 1_790_000_000, "owned_by": "headworks"}
    assert json.loads(openai.model_json(cards(1)[0])) == model
    assert json.loads(openai.models_json(cards(1), {})) == {"object": "list", "data": [model]}


def test_anthropic_s_list_and_one_of_it() -> None:
    model = {
        "type": "model",
        "id": "m0",
        "display_name": "m0",
        "created_at": "2026-09-21T14:13:20Z",
        "lifecycle": "active",
        "max_input_tokens": 8192,
        "max_tokens": 4096,
    }
    assert json.loads(anthropic.model_json(cards(1)[0])) == model
    assert page(1) == {"data": [model], "has_more": False, "first_id": "m0", "last_id": "m0"}


def test_an_empty_list_has_no_cursors() -> None:
    assert page(0) == {"data": [], "has_more": False, "first_id": None, "last_id": None}


def test_a_page_is_twenty_unless_asked_otherwise() -> None:
    listed = page(21)
    assert (len(listed["data"]), listed["has_more"], listed["last_id"]) == (20, True, "m19")


@given(count=st.integers(0, 12), limit=st.integers(1, 5))
def test_pages_forward_hold_every_model_once(count: int, limit: int) -> None:
    seen: list[str] = []
    listed = page(count, limit=str(limit))
    seen += ids(listed)
    while listed["has_more"]:
        listed = page(count, limit=str(limit), after_id=listed["last_id"])
        seen += ids(listed)
    assert seen == [card.id for card in cards(count)]


@given(count=st.integers(1, 12), limit=st.integers(1, 5))
def test_pages_backward_hold_every_model_once(count: int, limit: int) -> None:
    seen = [f"m{count - 1}"]
    listed = page(count, limit=str(limit), before_id=seen[0])
    seen = ids(listed) + seen
    while listed["has_more"]:
        listed = page(count, limit=str(limit), before_id=listed["first_id"])
        seen = ids(listed) + seen
    assert seen == [card.id for card in cards(count)]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "1001"}, "limit"),
        ({"limit": "-1"}, "limit"),
        ({"limit": "1.5"}, "limit"),
        ({"limit": ""}, "limit"),
        ({"limit": "²"}, "limit"),
        ({"limit": "9" * 5000}, "limit"),
        ({"after_id": "nobody"}, "after_id"),
        ({"before_id": "nobody"}, "before_id"),
        ({"after_id": "m0", "before_id": "m1"}, "after_id"),
    ],
)
def test_a_bad_query_is_refused_by_name(query: dict[str, str], param: str) -> None:
    with pytest.raises(RefusedError) as caught:
        page(3, **query)
    assert (caught.value.refusal.code, caught.value.refusal.param) == (Code.BAD_REQUEST, param)
