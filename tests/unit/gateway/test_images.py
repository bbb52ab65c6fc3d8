"""Images: read from every dialect, told to either, refused by name, and never in a log."""

import base64
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import Code, RefusedError
from core.protocol import Sampling
from gateway.answer_cache import engine_message, name_of
from gateway.anthropic import parse_messages
from gateway.chats import chat_of
from gateway.conversation import Conversation, Turn
from gateway.fields import Fields
from gateway.images import (
    Image,
    ImageLimits,
    check_images,
    is_base64,
    pieces,
    takes_none,
    written,
)
from gateway.items import Item
from gateway.openai import parse_chat
from gateway.providers.estimate import (
    IMAGE_LOW_TOKENS,
    IMAGE_ORIGINAL_TOKENS,
    IMAGE_TOKENS,
    prompt_tokens,
)
from gateway.providers.verdict import refused
from gateway.responses import continued, parse_response
from gateway.responses.items import item_json, read_items
from tests.support.provider_world import a_provider, asked
from tests.unit.gateway.test_provider_requests import assert_unasked, body_of

HEADS = {
    "image/jpeg": b"\xff\xd8\xff\xe0more",
    "image/png": b"\x89PNG\r\n\x1a\nmore",
    "image/gif": b"GIF89amore",
    "image/webp": b"RIFF\x04\x00\x00\x00WEBPmore",
}
PNG = base64.b64encode(HEADS["image/png"]).decode()
DATA = f"data:image/png;base64,{PNG}"
FAR = "https://pictures.example/cat.png?sig=s3cret"


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def url(address: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address, **more}}


def block(**source: Any) -> dict[str, Any]:
    return {"type": "image", "source": source}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


STORED = block(type="base64", media_type="image/png", data=PNG)
LINKED = block(type="url", url=FAR)


def in_chat(*parts: Any) -> Conversation:
    return parse_chat(json.dumps({"model": "m", "messages": [user(*parts)]}).encode())


def in_message(*parts: Any, **more: Any) -> Conversation:
    body = {"model": "m", "max_tokens": 9, "messages": [user(*parts)], **more}
    return parse_messages(json.dumps(body).encode())


def in_response(*parts: Any) -> Conversation:
    body = {"model": "m", "input": [user(*parts)]}
    return continued(parse_response(json.dumps(body).encode()), ())


def plain(images: tuple[Image, ...]) -> tuple[Image, ...]:
    """Without what a refusal names them by."""
    return tuple(msgspec.structs.replace(image, param="") for image in images)


SEEN = (
    Image(at=1, media_type="image/png", data=PNG),
    Image(at=1, url=FAR),
    Image(at=3, media_type="image/png", data=PNG),
)


def test_every_dialect_reads_the_same_images_at_the_same_places() -> None:
    chat = in_chat(text("a"), url(DATA), url(FAR), text("b"), url(DATA))
    message = in_message(text("a"), STORED, LINKED, text("b"), STORED)
    picture = {"type": "input_image", "image_url": DATA, "detail": "auto"}
    linked = {"type": "input_image", "image_url": FAR}
    say = {"type": "input_text"}
    response = in_response(
        say | {"text": "a"}, picture, linked, say | {"text": "b"}, picture | {"file_id": None}
    )
    for conversation in (chat, message, response):
        (turn,) = conversation.turns
        assert (turn.content, plain(turn.images)) == ("a\nb", SEEN)
        assert len(list(conversation.images)) == 3
    assert chat.turns[0].images[0].param == "messages[0].content[1].image_url"
    assert message.turns[0].images[0].param == "messages.0.content.1.source"
    assert response.turns[0].images[0].param == "input[0].content[1].image_url"


def test_an_image_alone_is_a_question() -> None:
    for conversation in (in_chat(url(DATA)), in_message(STORED)):
        assert conversation.turns[0].content == ""
        assert conversation.turns[0].images[0].at == 0


@pytest.mark.parametrize("kind", HEADS)
def test_each_type_is_known_by_its_first_bytes_and_taken_for_no_other(kind: str) -> None:
    data = base64.b64encode(HEADS[kind]).decode()
    (turn,) = in_chat(url(f"DATA:{kind};base64,{data}", detail="low")).turns
    assert (turn.images[0].media_type, turn.images[0].detail) == (kind, "low")
    assert turn.images[0].bytes == len(HEADS[kind])
    for other in set(HEADS) - {kind}:
        assert_refused(in_chat, url(f"data:{other};base64,{data}"), "image_url.url", other)
    jpeg = base64.b64encode(HEADS["image/jpeg"]).decode()
    (turn,) = in_chat(url(f"data:image/jpg;base64,{jpeg}")).turns
    assert turn.images[0].media_type == "image/jpeg"


@given(st.text(alphabet="Az9+/==-é \n\ud800", max_size=9))
def test_base64_is_what_can_be_decoded(data: str) -> None:
    try:
        base64.b64decode(data, validate=True)
    except ValueError:
        assert not is_base64(data)
    else:
        assert is_base64(data)


def assert_refused(read: Callable[..., Any], part: Any, where: str, said: str = "") -> None:
    with pytest.raises(RefusedError) as caught:
        read(part)
    refusal = caught.value.refusal
    assert refusal.status == 400
    assert refusal.param is not None
    assert refusal.param.endswith(where)
    assert refusal.param in refusal.message
    assert said in refusal.message


@pytest.mark.parametrize(
    "address",
    [
        "http://pictures.example/cat.png",
        "file:///etc/passwd",
        "https://",
        "https://user:pass@pictures.example/",
        "https://[bad/",
        "https://a b.example/",
        "https://ä.example/",
        "https://a.example/\u0000",
        "https://a.example/" + "x" * 8_192,
        "cat.png",
        "data:image/png,x",
        "data:image/png;base64;x," + PNG,
        "data:image/svg+xml;base64," + PNG,
        "data:image/png;base64,",
        "data:image/png;base64,****",
        f"data:image/png;base64,{PNG}=",
        f"data:image/png;base64,{PNG[:-1]}",
        "data:image/png;base64,ä",
        "data:image/png;base64,AAAA",
    ],
)
def test_what_is_no_image_is_refused_by_its_field(address: str) -> None:
    assert_refused(in_chat, url(address), "messages[0].content[0].image_url.url")
    picture = {"type": "input_image", "image_url": address}
    assert_refused(in_response, picture, "input[0].content[0].image_url")


@pytest.mark.parametrize(
    ("part", "where"),
    [
        ({"type": "image"}, "source"),
        (block(type="file", file_id="f"), "source.type"),
        (block(type="base64", data=PNG), "source.media_type"),
        (block(type="base64", media_type="image/bmp", data=PNG), "source.media_type"),
        (block(type="base64", media_type="image/png"), "source.data"),
        (block(type="base64", media_type="image/gif", data=PNG), "source.data"),
        (block(type="url"), "source.url"),
        (block(type="url", url=DATA), "source.url"),
        (block(type="url", url="http://x/"), "source.url"),
        (block(type="url", url=FAR, more=1), "source.more"),
        (STORED | {"transformations": {"dimensions": "resize"}}, "transformations"),
        (STORED | {"more": 1}, "more"),
    ],
)
def test_a_bad_block_is_refused_by_its_field(part: Any, where: str) -> None:
    assert_refused(in_message, part, f"messages.0.content.0.{where}")


@pytest.mark.parametrize(
    ("part", "where"),
    [
        ({"type": "image_url"}, "image_url"),
        (url(FAR, detail="most"), "image_url.detail"),
        (url(FAR, more=1), "image_url.more"),
        (url(FAR) | {"more": 1}, "more"),
    ],
)
def test_a_bad_part_is_refused_by_its_field(part: Any, where: str) -> None:
    assert_refused(in_chat, part, f"messages[0].content[0].{where}")


def test_a_file_of_the_api_s_own_is_no_image_here() -> None:
    part = {"type": "input_image", "file_id": "file_1", "detail": "auto"}
    assert_refused(in_response, part, "input[0].content[0].file_id")


def test_an_image_is_never_shown_where_it_may_be_logged() -> None:
    shown = repr(in_chat(text("a"), url(DATA), url(FAR)))
    assert PNG[:12] not in shown
    assert "s3cret" not in shown
    assert "Image(image/png, 12 bytes)" in shown
    told = {"error": {"type": "invalid_request_error", "message": f"cannot get {FAR} or {DATA}"}}
    fault = refused(400, {}, json.dumps(told).encode()).fault
    assert "s3cret" not in fault.detail
    assert PNG[:12] not in fault.detail
    assert "s3cret" in fault.refusal.message  # which is the caller's own word


def test_a_request_has_so_many_images_of_such_a_size() -> None:
    images = list(in_chat(text("a"), url(DATA), url(FAR)).images)
    check_images(images, ImageLimits(bytes_max=12, count_max=2))
    for limits, at in (((11, 2), 1), ((12, 1), 2)):
        with pytest.raises(RefusedError) as caught:
            check_images(images, ImageLimits(bytes_max=limits[0], count_max=limits[1]))
        assert caught.value.refusal.param == f"messages[0].content[{at}].image_url"
        assert str(min(limits)) in caught.value.refusal.message
    assert takes_none("small", "p").refusal.code is Code.UNSUPPORTED


# To providers.


RESULT = [
    user(text("What is there?")),
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}],
    },
    user({"type": "tool_result", "tool_use_id": "t1", "content": [text("a cat"), STORED]}),
]


def test_data_and_addresses_are_the_same_to_either() -> None:
    parts = [text("a"), url(DATA, detail="high"), url(FAR), text("b")]
    conversation = in_chat(*parts)
    body = body_of(conversation, a_provider())
    assert body["messages"] == [{"role": "user", "content": parts}]
    body = body_of(conversation, a_provider("anthropic"))
    blocks = [text("a"), STORED, LINKED, text("b")]
    assert body["messages"] == [{"role": "user", "content": blocks}]
    message = in_message(*blocks)
    assert body_of(message, a_provider("anthropic"))["messages"][0]["content"] == blocks
    parts[1] = url(DATA)
    assert body_of(message, a_provider())["messages"][0]["content"] == parts


def test_images_of_results_go_where_results_have_them() -> None:
    conversation = asked({"max_tokens": 9, "messages": RESULT}, "anthropic")
    assert plain(conversation.turns[2].images) == (Image(at=5, media_type="image/png", data=PNG),)
    body = body_of(conversation, a_provider("anthropic"))
    (result,) = body["messages"][2]["content"]
    assert result["content"] == [text("a cat"), STORED]
    with pytest.raises(RefusedError) as caught:
        body_of(conversation, a_provider())
    assert caught.value.refusal.code is Code.UNSUPPORTED
    assert caught.value.refusal.param == "messages.2.content.0.content.1.source"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([text("no"), STORED], ("Error: no", 9)),
        ([STORED, text("no")], ("Error\nno", 5)),
        ([], ("Error", None)),
    ],
)
def test_a_failed_result_says_so_beside_its_images(content: Any, said: Any) -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": content}
    turn = asked({"max_tokens": 9, "messages": [*RESULT[:2], user(result)]}, "anthropic").turns[2]
    assert (turn.content, turn.images[0].at if turn.images else None) == said


@pytest.mark.parametrize(
    ("part", "dialect", "settings"),
    [
        (url(DATA), "openai", {"images": "none"}),
        (url(DATA), "anthropic", {"images": "none"}),
        (url(FAR), "openai", {"images": "data"}),
        (url(FAR), "anthropic", {"images": "data"}),
        (url(DATA, detail="low"), "anthropic", {}),
        (url(DATA, detail="original"), "anthropic", {}),
    ],
)
def test_what_a_provider_is_not_to_be_sent_is_refused_by_its_part(
    part: Any, dialect: str, settings: Any
) -> None:
    param = "messages[0].content[1].image_url"
    body = {"messages": [user(text("a"), part)]}
    assert_unasked(body, a_provider(dialect, **settings), param)
    body_of(in_chat(url(DATA)), a_provider(dialect, images="data"))


def test_marks_stay_where_they_were_among_images() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    cases = [
        [text("a") | mark, STORED, text("b") | mark],
        [text("a"), STORED | mark, text("b")],
        [STORED | mark, LINKED | mark, text("b")],
        [text("a"), STORED, LINKED | mark],
    ]
    for blocks in cases:
        body = body_of(in_message(*blocks), a_provider("anthropic"))
        assert body["messages"][0]["content"] == blocks
    body = body_of(in_message(text("a"), STORED, **mark), a_provider("anthropic"))
    assert body["messages"][0]["content"] == [text("a"), STORED | mark]


said = st.text(st.characters(categories=("Ll", "Nd")), min_size=1).map(text)
shown = st.sampled_from([url(DATA), url(FAR), url(DATA, detail="auto")])
users = st.lists(said | shown, min_size=1, max_size=6).map(lambda parts: user(*parts))
assistants = st.text("ab", min_size=1).map(lambda s: {"role": "assistant", "content": s})
chats = st.builds(
    lambda first, more, last: [first, *(turn for pair in more for turn in pair), *last],
    users,
    st.lists(st.tuples(assistants, users), max_size=3),
    st.just(()),
)


def known(conversation: Conversation) -> list[Turn]:
    """What both dialects have a place for."""
    return [msgspec.structs.replace(turn, images=plain(turn.images)) for turn in conversation.turns]


@given(chats)
def test_a_chat_told_to_anthropic_and_read_again_is_the_same(messages: list[Any]) -> None:
    conversation = asked({"messages": messages})
    body = body_of(conversation, a_provider("anthropic", stream=False))
    again = parse_messages(json.dumps(body).encode())
    assert known(again) == known(conversation)
    back = body_of(again, a_provider(stream=False))
    assert known(parse_chat(json.dumps(back).encode())) == known(conversation)


@given(st.lists(said.map(lambda part: part["text"]) | st.just(SEEN[1])))
def test_pieces_are_what_was_written(parts: list[Any]) -> None:
    made = written(parts)
    joined: list[Any] = []
    for piece in parts:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += "\n" + piece
        else:
            joined.append(piece)
    again = list(pieces(made.text, made.images))
    assert [p if isinstance(p, str) else plain((p,)) for p in again] == [
        p if isinstance(p, str) else (msgspec.structs.replace(p, at=i.at),)
        for p, i in zip(joined, again, strict=True)
    ]


# Elsewhere.


def test_an_estimate_counts_images_by_how_closely_they_are_looked_at() -> None:
    bare = prompt_tokens(in_chat(text("a")))
    for detail, tokens in (
        ("auto", IMAGE_TOKENS),
        ("high", IMAGE_TOKENS),
        ("low", IMAGE_LOW_TOKENS),
        ("original", IMAGE_ORIGINAL_TOKENS),
    ):
        assert prompt_tokens(in_chat(text("a"), url(FAR, detail=detail))) == bare + tokens


def test_images_are_part_of_an_answer_s_name() -> None:
    message = engine_message(
        version="v", prompt_ids=(1,), choices=1, sampling=Sampling(max_tokens=1, seed=1), salt=b"s"
    )
    names = {
        name_of(b"k", "t", in_chat(*parts), message)
        for parts in ([text("a")], [text("a"), url(DATA)], [text("a"), url(FAR)])
    }
    assert len(names) == 3


def test_no_image_comes_to_a_model_that_reads_text_alone() -> None:
    with pytest.raises(AssertionError):
        chat_of(in_chat(url(DATA)))


def test_items_with_images_are_kept_and_told_as_they_were() -> None:
    picture = {"type": "input_image", "image_url": DATA, "file_id": None, "detail": "low"}
    items = [
        {
            "id": "m1", "type": "message", "status": "completed", "role": "user",
            "content": [{"type": "input_text", "text": "a"}, picture],
        },
        {
            "id": "c1", "type": "function_call", "status": "completed", "call_id": "c",
            "name": "f", "arguments": "{}",
        },
        {
            "id": "r1", "type": "function_call_output", "status": "completed", "call_id": "c",
            "output": [{"type": "input_text", "text": "b"}, picture],
        },
    ]  # fmt: skip
    given = json.loads(json.dumps({"input": items}))
    read = read_items(Fields(given, "", index="[{}]"))
    assert [item_json(item) for item in read] == items
    assert msgspec.json.decode(msgspec.json.encode(read), type=tuple[Item, ...]) == read
    body = {"model": "m", "input": items}
    turns = continued(parse_response(json.dumps(body).encode()), ()).turns
    assert [(turn.content, len(turn.images)) for turn in turns] == [("a", 1), ("", 0), ("b", 1)]
