"""Requests before anything is rendered from them: masked in place, or refused."""

import msgspec
import pytest

from gateway.conversation import CacheBreak, Conversation, Turn
from gateway.images import Image
from gateway.safety.inputs import AT_ONCE_CHARS, BlockedError, InputScreen, Masked
from gateway.thinking import Thought
from gateway.toolbox import Tool, Toolbox, ToolCall
from tests.support.safety_cases import a_book, pii, terms

pytestmark = pytest.mark.anyio

BOOK = a_book(terms("secret"), pii("card"), replacement="#")


def a_chat(*turns, **fields):
    return Conversation(dialect="openai", kind="chat", model="m", turns=turns, **fields)


async def screened(conversation, book=BOOK):
    hits = []
    return await InputScreen(book, hits.append).conversation(conversation), hits


async def test_every_text_of_a_request_is_masked():
    call = ToolCall(id="c", name="f", arguments={
        "secret": "a secret", "list": ["secret", 4111111111111111, 1.5, True, None],
    })  # fmt: skip
    tool = Tool(name="f", description="no secret")
    asked = a_chat(
        Turn(role="system", content="a secret"),
        Turn(role="assistant", content="", calls=(call,)),
        Turn(role="tool", content="the secret", call_id="c", tool="f"),
        toolbox=Toolbox(tools=(tool, Tool(name="g")), callable=(tool,)),
    )
    masked, hits = await screened(asked)
    assert [turn.content for turn in masked.turns] == ["a #", "", "the #"]
    assert masked.turns[1].calls[0].arguments == {
        "secret": "a #", "list": ["#", 0, 1.5, True, None],
    }  # fmt: skip
    assert masked.toolbox.tools[0].description == "no #"
    assert masked.toolbox.callable == masked.toolbox.tools[:1]
    assert len(hits) == 6


async def test_a_prompt_is_a_text_too():
    asked = Conversation(dialect="openai", kind="text", model="m", prompt="a secret")
    masked, _ = await screened(asked)
    assert masked.prompt == "a #"


async def test_a_thought_with_something_to_mask_is_left_out():
    thoughts = (
        Thought(text="a secret", signature="s"),
        Thought(text="fine", signature="t", at=8),
        Thought(redacted="secret", at=8, calls=1),
    )
    asked = a_chat(Turn(role="assistant", content="a secret", thoughts=thoughts))
    masked, hits = await screened(asked)
    assert masked.turns[0].thoughts == (
        Thought(text="fine", signature="t", at=3),
        Thought(redacted="secret", at=3, calls=1),
    )
    assert len(hits) == 2


async def test_places_to_be_cached_move_with_the_text_and_never_into_a_mask():
    turn = Turn(role="user", content="a secret b secret c")
    breaks = tuple(CacheBreak(ttl="5m", turns=1, chars=at) for at in (1, 5, 8, 11, 19))
    other = CacheBreak(ttl="5m", tools=1)
    masked, _ = await screened(a_chat(turn, cache_breaks=(*breaks, other)))
    assert masked.turns[0].content == "a # b # c"
    assert [each.chars for each in masked.cache_breaks] == [1, 2, 3, 6, 9, 0]
    shown = tuple(Image(at=at, url="https://a/secret") for at in (1, 8, 19))
    masked, _ = await screened(a_chat(msgspec.structs.replace(turn, images=shown)))
    assert [image.at for image in masked.turns[0].images] == [1, 3, 9]
    assert masked.turns[0].images[0].url == "https://a/secret"  # passed over, and so not changed
    assert Masked("", ()).moved(0) == 0


async def test_a_rule_that_blocks_raises_it_wherever_it_matches():
    book = a_book(terms("secret"), action="block")
    with pytest.raises(BlockedError) as blocked:
        await screened(a_chat(Turn(role="user", content="a secret")), book)
    assert blocked.value.rule.name == "r0"


async def test_a_long_text_is_looked_at_in_parts_that_nobody_notices():
    for shift in range(8):
        text = "x" * (AT_ONCE_CHARS - shift) + "secret" + "y" * AT_ONCE_CHARS
        masked, (hit,) = await screened(a_chat(Turn(role="user", content=text)))
        assert masked.turns[0].content == text.replace("secret", "#")
        assert hit.text == "secret"
