"""What makes two requests the same: nothing that changes an answer may be left out."""

from typing import Any

import msgspec
import pytest

from core.errors import RefusedError
from core.protocol import Generate, Grammar, Sampling, Usage
from gateway.answer_cache import (
    OFF,
    Asked,
    asked_of,
    charged,
    engine_message,
    name_of,
    repeatable,
)
from gateway.conversation import Conversation, Turn
from gateway.toolbox import Tool, Toolbox

SECRET = b"secret"
TOOL = Tool(name="f", parameters={"type": "object", "properties": {"b": {}, "a": {}}})
ASKED = Conversation(dialect="openai", kind="chat", model="m")
SAMPLING = Sampling(max_tokens=5, temperature=0.0, seed=7)

# Of a conversation: what is told otherwise, is in the message as tokens, or is another's business.
PASSED_OVER = {
    "turns",
    "prompt",
    "cache_breaks",
    "stream",
    "include_usage",
    "service_class",
    "user",
    "cache_key",
    "ask",
    "deadline_s",
    "metadata",
}
# Of a message: of this telling alone, or of how it is served.
OF_THIS_TELLING = {
    "request_id",
    "attempt",
    "cache_marks",
    "service_class",
    "deadline_ms",
    "placement",
}
ANOTHER: dict[str, Any] = {
    "dialect": "anthropic",
    "kind": "text",
    "toolbox": Toolbox(tools=(TOOL,), callable=(TOOL,)),
    "grammar": Grammar(kind="regex", text="a"),
    "turns": (Turn(role="user", content="x"),),
}


def message(sampling: Sampling = SAMPLING, **changes: Any) -> Generate:
    fields: dict[str, Any] = {
        "version": "v",
        "prompt_ids": (1, 2),
        "choices": 1,
        "salt": b"s",
    }
    return engine_message(sampling=sampling, **(fields | changes))


def name(
    conversation: Conversation = ASKED, asked: Generate | None = None, tenant: str = "t"
) -> bytes:
    return name_of(SECRET, tenant, conversation, asked or message())


def changed(struct: Any, field: str) -> Any:
    """The same with another value in one field."""
    value = getattr(struct, field)
    match value:
        case bool():
            other: Any = not value
        case int() | float():
            other = value + 1
        case str():
            other = value + "x"
        case bytes():
            other = value + b"x"
        case tuple():
            other = (*value, (1, 1.0)) if field == "logit_bias" else (*value, 1)
        case _:
            other = 1
    return msgspec.structs.replace(struct, **{field: ANOTHER.get(field, other)})


@pytest.mark.parametrize("field", Conversation.__struct_fields__)
def test_every_field_of_a_request_counts_or_is_known_not_to(field: str) -> None:
    same = name(changed(ASKED, field)) == name()
    assert same == (field in PASSED_OVER)


@pytest.mark.parametrize("field", Sampling.__struct_fields__)
def test_every_field_of_its_sampling_counts(field: str) -> None:
    drawn = msgspec.structs.replace(SAMPLING, temperature=0.5)
    assert name(asked=message(changed(drawn, field))) != name(asked=message(drawn))


def test_every_field_of_what_an_engine_is_told_counts_or_is_of_this_telling() -> None:
    for field in Generate.__struct_fields__:
        if field not in OF_THIS_TELLING:
            assert name(asked=changed(message(), field)) != name(), field


def test_a_greedy_answer_does_not_depend_on_the_seed_that_was_drawn() -> None:
    other = msgspec.structs.replace(SAMPLING, seed=8)
    assert name(asked=message(other)) == name(asked=message())


def test_names_are_a_tenant_s_and_a_secret_s() -> None:
    assert name(tenant="u") != name()
    assert name_of(b"other", "t", ASKED, message()) != name()
    assert len(name()) == 32


def test_the_order_of_a_schema_s_fields_is_no_difference() -> None:
    turned = Tool(name="f", parameters={"properties": {"a": {}, "b": {}}, "type": "object"})
    boxes = [Toolbox(tools=(tool,), callable=(tool,)) for tool in (TOOL, turned)]
    names = {name(msgspec.structs.replace(ASKED, toolbox=box)) for box in boxes}
    assert len(names) == 1


def test_only_what_would_come_again_is_repeatable() -> None:
    drawn = msgspec.structs.replace(SAMPLING, temperature=0.5)
    assert repeatable(ASKED, SAMPLING)
    assert not repeatable(ASKED, drawn)
    assert repeatable(msgspec.structs.replace(ASKED, seed=0), drawn)


def test_a_request_says_whether_and_for_how_long() -> None:
    assert asked_of([]) == OFF
    assert asked_of([(b"x-headworks-cache", b"off")]) == OFF
    on = [(b"x-headworks-cache", b"on"), (b"x-headworks-cache-ttl-s", b"86400")]
    assert asked_of(on) == Asked(wish="on", ttl_s=86_400)
    assert asked_of([(b"x-headworks-cache", b"refresh")]).wish == "refresh"


@pytest.mark.parametrize(
    ("header", "value"),
    [
        (b"x-headworks-cache", b""),
        (b"x-headworks-cache", b"ON"),
        (b"x-headworks-cache-ttl-s", b"0"),
        (b"x-headworks-cache-ttl-s", b"-1"),
        (b"x-headworks-cache-ttl-s", b"86401"),
        (b"x-headworks-cache-ttl-s", b"0000001"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(header: bytes, value: bytes) -> None:
    with pytest.raises(RefusedError) as error:
        asked_of([(header, value)])
    assert error.value.refusal.param == header.decode()


def test_a_repeat_costs_nothing_or_its_prompt_as_a_cached_one() -> None:
    assert charged("free", 9) is None
    assert charged("cached_input", 9) == Usage(prompt_tokens=9, cached_tokens=9)
