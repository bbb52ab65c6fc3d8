"""Conversations: what names one, what does not, and that draws are spread evenly."""

import msgspec

from gateway.conversation import Conversation, Turn
from gateway.images import Image
from gateway.stickiness import DRAW_BYTES, ConversationKey, conversation_key, has_begun

SALT = bytes(16)
ASKED = (Turn(role="system", content="s"), Turn(role="user", content="u"))
CHAT = Conversation(dialect="openai", kind="chat", model="m", turns=ASKED)


def key_of(
    conversation: Conversation = CHAT,
    *,
    salt: bytes = SALT,
    route: str = "m",
    header: str | None = None,
) -> ConversationKey:
    return conversation_key(conversation, salt=salt, route=route, header=header)


def with_image(url: str) -> Conversation:
    user = msgspec.structs.replace(ASKED[1], images=(Image(url=url),))
    return msgspec.structs.replace(CHAT, turns=(ASKED[0], user))


def test_a_conversation_keeps_its_name_as_it_grows() -> None:
    longer = (*ASKED, Turn(role="assistant", content="a"), Turn(role="user", content="v"))
    assert key_of(msgspec.structs.replace(CHAT, turns=longer)) == key_of()
    assert key_of(msgspec.structs.replace(CHAT, model="alias", temperature=0.5)) == key_of()


def test_what_makes_another_conversation() -> None:
    other = (Turn(role="system", content="t"), *ASKED[1:])
    joined = (Turn(role="system", content="su"), Turn(role="user", content=""))
    names = {
        key_of().name,
        key_of(msgspec.structs.replace(CHAT, turns=other)).name,
        key_of(msgspec.structs.replace(CHAT, turns=joined)).name,
        key_of(msgspec.structs.replace(CHAT, turns=ASKED[:1])).name,
        key_of(salt=bytes(15) + b"x").name,
        key_of(route="n").name,
        key_of(header="h").name,
        key_of(msgspec.structs.replace(CHAT, cache_key="h")).name,
        key_of(with_image("https://a/1")).name,
        key_of(with_image("https://a/2")).name,
    }
    assert len(names) == 10


def test_the_callers_header_comes_before_its_cache_key_and_that_before_the_text() -> None:
    keyed = msgspec.structs.replace(CHAT, cache_key="k")
    other = msgspec.structs.replace(keyed, turns=ASKED[1:])
    assert key_of(keyed, header="h") == key_of(header="h")
    assert key_of(keyed) == key_of(other)


def test_a_text_is_named_by_how_it_begins() -> None:
    text = Conversation(dialect="openai", kind="text", model="m", prompt="x" * 2_000)
    longer = msgspec.structs.replace(text, prompt="x" * 3_000)
    assert key_of(text) == key_of(longer)
    ids = msgspec.structs.replace(text, prompt=(1, 2))
    assert key_of(ids) == key_of(ids)
    assert key_of(ids) != key_of(msgspec.structs.replace(text, prompt=(1, 3)))


def test_draws_lie_all_over() -> None:
    draws = [key_of(header=f"c{at}").draw for at in range(2_000)]
    low = sum(draw < 2 ** (8 * DRAW_BYTES) // 10 for draw in draws)
    assert 140 < low < 260


def test_a_conversation_has_begun_once_it_has_an_answer() -> None:
    asked = (Turn(role="system", content="Be brief."), Turn(role="user", content="Hello?"))
    talk = Conversation(dialect="openai", kind="chat", model="m", turns=asked)
    assert not has_begun(talk)
    answered = (*asked, Turn(role="assistant", content="Hello."), Turn(role="user", content="Bye"))
    assert has_begun(msgspec.structs.replace(talk, turns=answered))
