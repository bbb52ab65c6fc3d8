"""Conversations as models' text rules take them."""

from gateway.chats import beginnings, chat_of
from gateway.conversation import CacheBreak, Turn
from gateway.toolbox import Tool, Toolbox, ToolCall
from tests.support.dialect_events import a_conversation
from text.chat import Chat, ChatCall, ChatMessage, ChatTool

F, G = Tool(name="f", description="Does."), Tool(name="g", parameters={"type": "object"})
BOTH = Toolbox(tools=(F, G), callable=(F,))
TOLD = (ChatTool("f", "Does.", {}), ChatTool("g", "", {"type": "object"}))


def a_call(call_id: str, **arguments: object) -> ToolCall:
    return ToolCall(id=call_id, name="f", arguments=arguments)


def test_tools_are_told_of_unless_they_must_not_be_called() -> None:
    assert chat_of(a_conversation(toolbox=BOTH)).tools == TOLD
    none = Toolbox(tools=(F,), callable=(F,), mode="none")
    assert chat_of(a_conversation(toolbox=none)).tools == ()
    assert chat_of(a_conversation()).tools == ()


def test_calls_get_names_of_ours() -> None:
    turns = (
        Turn(role="user", content="Hello"),
        Turn(role="assistant", content="", calls=(a_call("<a>", x=1), a_call("b"))),
        Turn(role="tool", content="one", call_id="b", tool="f"),
        Turn(role="tool", content="two", call_id="<a>", tool="f"),
        Turn(role="assistant", content="So.", calls=(a_call("b"),)),
        Turn(role="tool", content="three", call_id="b", tool="f"),
    )
    assert chat_of(a_conversation(turns=turns)).messages == (
        ChatMessage("user", "Hello"),
        ChatMessage(
            "assistant", "", (ChatCall("f", {"x": 1}, "call00001"), ChatCall("f", {}, "call00002"))
        ),
        ChatMessage("tool", "one", (), "f", "call00002"),
        ChatMessage("tool", "two", (), "f", "call00001"),
        ChatMessage("assistant", "So.", (ChatCall("f", {}, "call00003"),)),
        ChatMessage("tool", "three", (), "f", "call00003"),
    )


def test_a_break_after_tools_keeps_the_system_and_asks_something_else() -> None:
    system, user = ChatMessage("system", "Be brief."), ChatMessage("user", "?!")
    place = CacheBreak(ttl="5m", tools=1)
    assert beginnings(Chat((system, user), TOLD), (place,)) == [
        Chat((system, ChatMessage("user", "!")), TOLD[:1])
    ]
    assert beginnings(Chat((user,), TOLD), (place,)) == [
        Chat((ChatMessage("user", "!"),), TOLD[:1])
    ]


def test_a_break_in_the_system_asks_something_else() -> None:
    chat = Chat((ChatMessage("system", "Be brief."), ChatMessage("user", "Hello")), TOLD)
    place = CacheBreak(ttl="5m", turns=1, chars=2)
    assert beginnings(chat, (place,)) == [
        Chat((ChatMessage("system", "Be"), ChatMessage("user", "?")), TOLD)
    ]


def test_a_break_in_a_turn_cuts_it_there() -> None:
    calls = (ChatCall("f", {}, "call00001"), ChatCall("f", {}, "call00002"))
    chat = Chat((ChatMessage("user", "Hello"), ChatMessage("assistant", "So. Well.", calls)))
    places = (
        CacheBreak(ttl="5m", turns=1, chars=5),
        CacheBreak(ttl="5m", turns=2, chars=3, calls=1),
    )
    assert beginnings(chat, places) == [
        Chat(chat.messages[:1]),
        Chat((chat.messages[0], ChatMessage("assistant", "So.", calls[:1]))),
    ]
